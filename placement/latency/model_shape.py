"""ModelShape says what a decoder-only model costs: parameters, bytes, arithmetic. It reads nothing: see model_config.

MLA (DeepSeek): kvrelay pages the keys and values that reach the attention function, which are the expanded ones, of all
heads. So `kv_bytes_per_token` counts those.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.pages.layout import BESIDE
from placement.catalogs.base import PlanError

DTYPE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "float8": 1.0}
FEW_BITS = ("quantization", "kv_dtype")  # options of workers (engine/options.py), which they tell of themselves
KV_DTYPES = {"fp8_e4m3": "float8", "int8": "int8"}  # what is called so here of kv_dtype's values; auto: as dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Parameters are counts, of one layer unless a name says otherwise; times and machines are not known here.

    `linear_params`: of a layer's attention matrices. `mlp_params`: of a dense layer's MLP. Where there are experts,
    `num_moe_layers` layers have a router and `experts` of `expert_params` each, of which a token uses
    `experts_per_token`, and `shared_expert_params` that every token uses.
    """

    name: str
    model_type: str
    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    k_dim: int  # of one head's key; the query's, too
    v_dim: int
    vocab: int
    max_positions: int = 0  # 0: not said
    linear_params: int
    mlp_params: int
    num_moe_layers: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_params: int = 0
    shared_expert_params: int = 0
    router_params: int = 0
    mlp_width: int = 0  # of a dense layer; of the experts where expert_width is 0
    expert_width: int = 0
    shared_experts: int = 0  # of expert_width each
    other_layer_params: int = 0  # norms and biases
    embedding_params: int = 0  # of tokens and positions, and what is not in a layer
    head_params: int = 0  # 0 in memory when tied: see `is_tied`
    is_tied: bool = False
    window: int = 0  # tokens that windowed layers attend to
    num_window_layers: int = 0
    reduces_per_layer: int = 2  # sums over a TP group: behind attention and MLP, or behind both at once
    has_norms_of_heads: bool = False  # each head's queries and keys have a norm of their own weights
    dtype: str = "bfloat16"
    kv_dtype: str = ""  # empty: as dtype
    weight_bits: float = 16.0  # of the layers' matrices; embeddings and head keep dtype
    quantisation: str = ""  # of the checkpoint: see as_served
    compute_dtype: str = "bfloat16"

    # sizes

    @property
    def num_params(self) -> int:
        return self._matrix_params + self.num_layers * self.other_layer_params + self._outer_params

    @property
    def active_params(self) -> int:
        """That one token's step multiplies with, the head's and one row of embeddings aside."""
        dense = (self.num_layers - self.num_moe_layers) * self.mlp_params
        moe = self.experts_per_token * self.expert_params + self.shared_expert_params + self.router_params
        return self.num_layers * self.linear_params + dense + self.num_moe_layers * moe

    @property
    def _matrix_params(self) -> int:
        dense = (self.num_layers - self.num_moe_layers) * self.mlp_params
        moe = self.experts * self.expert_params + self.shared_expert_params + self.router_params
        return self.num_layers * self.linear_params + dense + self.num_moe_layers * moe

    @property
    def _outer_params(self) -> int:
        return self.embedding_params + (0 if self.is_tied else self.head_params)

    @property
    def dtype_bytes(self) -> float:
        return DTYPE_BYTES[self.dtype]

    @property
    def weight_bytes(self) -> int:
        """In memory."""
        plain = self.num_layers * self.other_layer_params + self._outer_params
        return round(self._matrix_params * self.weight_bits / 8 + plain * self.dtype_bytes)

    @property
    def head_bytes(self) -> float:
        return self.head_params * self.dtype_bytes

    @property
    def dense_bytes(self) -> float:
        """Weights of all layers that every step reads: all but the experts that tokens are sent to."""
        moe = self.num_moe_layers * (self.shared_expert_params + self.router_params)
        dense = (self.num_layers - self.num_moe_layers) * self.mlp_params
        return (self.num_layers * self.linear_params + dense + moe) * self.weight_bits / 8

    # KV

    @property
    def kv_bytes_per_token_layer(self) -> float:
        return self.kv_heads * (self.k_dim + self.v_dim) * self.kv_dtype_bytes

    @property
    def kv_dtype_bytes(self) -> float:
        if self.kv_dtype == "int8":  # and a scale for each head's row
            return 1.0 + 2.0 * BESIDE["int8"] / (self.k_dim + self.v_dim)
        return DTYPE_BYTES[self.kv_dtype or self.dtype]

    @property
    def kv_bytes_per_token(self) -> int:
        """As kvrelay's pages hold it, over all layers and heads, each once."""
        return round(self.num_layers * self.kv_bytes_per_token_layer)

    def worker_kv_bytes_per_token(self, tp: int) -> int:
        """Of all of a worker's ranks: a KV head that several hold counts as often."""
        return self.kv_bytes_per_token * max(1, tp // self.kv_heads)

    # arithmetic

    @property
    def flops_per_token(self) -> float:
        """Of the layers' matrices: two for each parameter that a token meets. The head comes once for each token that
        is drawn: `head_flops`."""
        return 2.0 * self.active_params

    @property
    def head_flops(self) -> float:
        return 2.0 * self.head_params

    def as_served(self) -> ModelShape:
        """In the checkpoint's own dtype."""
        return self.with_dtype(self.dtype)

    def with_dtype(self, dtype: str) -> ModelShape:
        """Served in another dtype: `auto` keeps it, and makes bfloat16 of float16. A quantised checkpoint is served as
        its weights in full width (engine/weights/loader.py)."""
        if dtype == "auto":
            dtype = "bfloat16" if self.dtype == "float16" else self.dtype
        if dtype not in DTYPE_BYTES:
            raise PlanError(f"dtype is {dtype!r}; give one of auto, {', '.join(DTYPE_BYTES)}")
        return replace(self, dtype=dtype, compute_dtype=dtype, weight_bits=8 * DTYPE_BYTES[dtype], quantisation="")

    def in_few_bits(self, *, kv_dtype: str = "auto", quantization: str = "none") -> ModelShape:
        """With the `kv_dtype` and `quantization` that workers are given (engine/options.py)."""
        shape = replace(self, kv_dtype=KV_DTYPES.get(kv_dtype, self.kv_dtype))
        return replace(shape, weight_bits=8.0, quantisation="int8") if quantization == "int8" else shape
