"""ModelShape says what a decoder-only model costs: parameters, bytes, arithmetic; all from its config.json alone.

It counts and loads nothing: no weight is looked at, no library asked. Counts are exact for the architectures whose
parts stand in the config (Llama, Mistral, Qwen2, Qwen3, Mixtral, DeepSeek, OPT, GPT-2, BLOOM, GPT-NeoX and their
like); what a config does not tell (a vision tower, a next-token-prediction layer) is not counted.

MLA (DeepSeek): kvrelay pages the keys and values that reach the attention function, which are the expanded ones, of all
heads. So `kv_bytes_per_token` counts those; `latent_kv_bytes_per_token` is of an engine that pages the latents.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from placement.catalogs.base import PlanError
from placement.named_files import CONFIGS, named_file, names_of

DTYPE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "float8": 1.0}
WINDOW_TYPES = ("sliding_attention", "chunked_attention", "local")
FULL_EVERY = {  # where a config lists no layer_types: one layer in so many looks at all of its context
    "gemma2": 2,
    "gpt_oss": 2,
    "cohere2": 4,
    "olmo3": 4,
    "exaone4": 4,
    "llama4_text": 4,
    "gemma3n_text": 5,
    "gemma3_text": 6,
}
WINDOW_IF_ASKED = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")  # by use_sliding_window, from max_window_layers on
MOST = 2**40  # of any number in a config
PLAIN_MLP = (  # one matrix up, one down; all others have a gate beside the first
    *("opt", "gpt2", "bloom", "gpt_neox", "gptj", "falcon", "phi", "starcoder2", "mpt", "gpt_bigcode", "codegen"),
    *("gpt_neo", "biogpt", "persimmon", "nemotron", "xglm"),
)
NO_KV_TYPES = (
    "mamba",
    "mamba2",
    "rwkv",
    "falcon_mamba",
    "xlstm",
    "recurrent_gemma",
    "jamba",
    "bamba",
    "zamba",
    "zamba2",
)
STATE_LAYERS = ("linear_attention", "recurrent", "mamba", "conv", "lightning", "delta", "rwkv", "retention")
NEW_ERA = {"bias": False, "norm_bias": False, "positions": 0, "embedding_norm": False, "final_norm": True}
FAMILIES: dict[str, dict[str, Any]] = {  # what these configs leave unsaid; the rest are as Llama
    "opt": {"bias": True, "norm_bias": True, "positions": 2, "tied": True},
    "gpt2": {"bias": True, "norm_bias": True, "positions": 0, "has_positions": True, "tied": True},
    "bloom": {"bias": True, "norm_bias": True, "embedding_norm": True, "tied": True},
    "gpt_neox": {"bias": True, "norm_bias": True},
    "falcon": {"norm_bias": True, "tied": True},
    "phi": {"bias": True, "norm_bias": True, "head_bias": True, "norms": 1},
    "gptj": {"norm_bias": True, "norms": 1, "mlp_bias": True, "head_bias": True},
    "starcoder2": {"bias": True, "norm_bias": True, "tied": True},
    "gpt_bigcode": {"bias": True, "norm_bias": True, "has_positions": True, "tied": True, "kv_heads": 1},
    "qwen2": {"qkv_bias": True},
    "qwen2_moe": {"qkv_bias": True, "shared_gate": True},
    "qwen3": {"qk_norm": True},
    "qwen3_moe": {"qk_norm": True},
    "gemma": {"tied": True},
    "gemma2": {"tied": True, "norms": 4},
    "gemma3_text": {"tied": True, "norms": 4, "qk_norm": True},
    "cohere": {"tied": True, "norms": 1},
    "gpt_oss": {"bias": True, "sinks": True, "expert_bias": True, "router_bias": True},
    "glm4_moe": {"router_bias": True},
    "deepseek_v3": {"router_bias": False},
}
NAMES = {  # ours: the keys under which configs say it, the first that is there
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "n_embed"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocab": ("vocab_size",),
    "intermediate": ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"),
    "positions": ("max_position_embeddings", "n_positions", "seq_length", "max_sequence_length"),
    "experts": ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts"),
    "experts_per_token": ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"),
}


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
    other_layer_params: int = 0  # norms and biases
    embedding_params: int = 0  # of tokens and positions, and what is not in a layer
    head_params: int = 0  # 0 in memory when tied: see `is_tied`
    is_tied: bool = False
    window: int = 0  # tokens that windowed layers attend to
    num_window_layers: int = 0
    latent_dim: int = 0  # MLA: elements of a token's latent and its rotary key
    dtype: str = "bfloat16"
    weight_bits: float = 16.0  # of the layers' matrices; embeddings and head keep dtype
    quantisation: str = ""
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

    def layer_bytes_read(self, num_tokens: float) -> float:
        """Weights of all layers that a step of so many tokens reads: of the experts, those that some token is sent to,
        if each token's are drawn evenly and apart."""
        moe = self.shared_expert_params + self.router_params + self.distinct_experts(num_tokens) * self.expert_params
        dense = (self.num_layers - self.num_moe_layers) * self.mlp_params
        params = self.num_layers * self.linear_params + dense + self.num_moe_layers * moe
        return params * self.weight_bits / 8

    def active_weight_bytes(self, num_tokens: float = 1) -> float:
        """Read in one step of so many tokens: layers and head."""
        return self.layer_bytes_read(num_tokens) + self.head_bytes

    def distinct_experts(self, num_tokens: float) -> float:
        """Expected number of a layer's experts that at least one of the tokens is sent to."""
        if not self.experts:
            return 0.0
        return float(self.experts * (1.0 - (1.0 - self.experts_per_token / self.experts) ** num_tokens))

    # KV

    @property
    def kv_bytes_per_token_layer(self) -> float:
        return self.kv_heads * (self.k_dim + self.v_dim) * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """As kvrelay's pages hold it, over all layers and heads."""
        return round(self.num_layers * self.kv_bytes_per_token_layer)

    @property
    def latent_kv_bytes_per_token(self) -> int:
        """MLA: of an engine that pages the latents. Elsewhere the same as kv_bytes_per_token."""
        if not self.latent_dim:
            return self.kv_bytes_per_token
        return round(self.num_layers * self.latent_dim * self.dtype_bytes)

    # arithmetic

    @property
    def flops_per_token(self) -> float:
        """Of the layers' matrices: two for each parameter that a token meets. The head comes once for each token that
        is drawn: `head_flops`."""
        return 2.0 * self.active_params

    @property
    def head_flops(self) -> float:
        return 2.0 * self.head_params

    def attention_flops(self, length: int, context: int) -> float:
        """Of `length` new tokens behind `context` others, causal, over all layers."""
        full = self.num_layers - self.num_window_layers
        pairs = full * _pairs(length, context)
        if self.num_window_layers:
            pairs += self.num_window_layers * min(_pairs(length, context), float(length * self.window))
        return 2.0 * self.heads * (self.k_dim + self.v_dim) * pairs

    def with_dtype(self, dtype: str) -> ModelShape:
        """Served in another dtype: `auto` keeps it, and makes bfloat16 of float16."""
        if dtype == "auto":
            dtype = "bfloat16" if self.dtype == "float16" else self.dtype
        if dtype not in DTYPE_BYTES:
            raise PlanError(f"dtype is {dtype!r}; give one of auto, {', '.join(DTYPE_BYTES)}")
        if self.quantisation:
            return replace(self, dtype=dtype)
        return replace(self, dtype=dtype, compute_dtype=dtype, weight_bits=8 * DTYPE_BYTES[dtype])


def _pairs(length: int, context: int) -> float:
    return length * (context + (length + 1) / 2)


def load_shape(model: str | Path) -> ModelShape:
    """Of a model directory, a config.json, or a name under configs/models. Raises PlanError."""
    path = _find(str(model))
    name = path.parent.name if path.name == "config.json" else path.stem
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise PlanError(
            f"model {model} cannot be read: {path}: {why}; give a model directory or a config.json"
        ) from None
    except json.JSONDecodeError as error:
        raise PlanError(
            f"{path} is not JSON: line {error.lineno}: {error.msg}; give a Hugging Face config.json"
        ) from None
    if not isinstance(config, Mapping):
        raise PlanError(f"{path} is no object; give a Hugging Face config.json")
    return shape_of(config, name=name)


def known_models() -> list[str]:
    return names_of("models", ".json")


def loadable_name(model: str) -> str:
    """What a worker can load: a model directory by its full path, the hub id of a name under configs/models; otherwise
    what was given."""
    try:
        path = _find(model)
    except PlanError:
        return model
    if path.name == "config.json":
        return str(path.parent.resolve())
    if path.parent != CONFIGS / "models":
        return model
    hub_id = json.loads(path.read_text(encoding="utf-8")).get("_name_or_path")
    return model if hub_id is None or "/" in model else str(hub_id)


def _find(model: str) -> Path:
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            raise PlanError(f"model {model} has no config.json; give a Hugging Face model directory")
        return path / "config.json"
    if path.is_file():
        return path
    shipped = named_file("models", path.name.removesuffix(".json"), ".json")
    if shipped is not None and not model.startswith((".", "/", "~")) and model.count("/") < 2:  # a name, or a hub id
        return shipped
    known = ", ".join(known_models())
    raise PlanError(f"model is {model!r}, which is no directory and no config.json; give one, or a name of {known}")


def shape_of(config: Mapping[str, Any], name: str = "model") -> ModelShape:
    """From a config's own keys. Raises PlanError: a key is missing, or the model keeps more than KV."""
    text = _object(config, "text_config", name) or _object(config, "llm_config", name) or config
    quantised = _object(text, "quantization_config", name) or _object(config, "quantization_config", name)
    dtype = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    return _Reader(text, name).shape(quantised, dtype or "bfloat16")


def _object(config: Mapping[str, Any], key: str, name: str) -> Mapping[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise PlanError(f"model {name}: {key} is {value!r}; give keys and values in its config.json")
    return value


class _Reader:
    """Finds in a config what the shape wants, whatever its keys are called."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.config = config
        self.name = name
        self.model_type = str(config.get("model_type", "llama"))
        self.family = NEW_ERA | FAMILIES.get(self.model_type, {})
        self._refuse()

    def _refuse(self) -> None:
        what = f"model {self.name} ({self.model_type})"
        if self.config.get("is_encoder_decoder"):
            raise PlanError(f"{what} is an encoder-decoder; give a decoder-only model")
        types = self._list("layer_types", str)
        stateful = sorted({kind for kind in types if any(state in kind for state in STATE_LAYERS)})
        if stateful or self.model_type in NO_KV_TYPES:
            kinds = ", ".join(stateful) or "a recurrent state"
            raise PlanError(f"{what} has layers of {kinds}, which is not KV in pages; give a model of attention only")

    def number(self, key: str, default: int | None = None) -> int:
        for written in NAMES.get(key, (key,)):
            value = self.config.get(written)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < MOST:
                raise PlanError(f"model {self.name}: {written} is {value!r}; give a whole number in its config.json")
            return value
        if default is None:
            raise PlanError(f"model {self.name}: {NAMES.get(key, (key,))[0]} is missing; give it in its config.json")
        return default

    def _list(self, key: str, kind: type) -> list[Any]:
        value = self.config.get(key) or []
        if not isinstance(value, list | tuple) or not all(isinstance(item, kind) for item in value):
            what = "names" if kind is str else "whole numbers"
            raise PlanError(f"model {self.name}: {key} is {value!r}; give a list of {what} in its config.json")
        return list(value)

    def shape(self, quantised: Mapping[str, Any], dtype: str) -> ModelShape:
        layers, hidden, heads = (self._positive(key) for key in ("num_layers", "hidden", "heads"))
        dtype = {"float": "float32", "half": "float16"}.get(
            str(dtype).removeprefix("torch."), str(dtype).removeprefix("torch.")
        )
        if dtype not in DTYPE_BYTES:
            raise PlanError(f"model {self.name}: dtype is {dtype!r}; give one of {', '.join(DTYPE_BYTES)}")
        bits, method, compute = _quantisation(quantised, dtype, self.name)
        window, num_window = self._window(layers)
        attention = self._mla(hidden, heads) if self.config.get("kv_lora_rank") else self._heads(hidden, heads)
        outer = self._outer(hidden, layers)
        return ModelShape(
            name=self.name,
            model_type=self.model_type,
            num_layers=layers,
            hidden=hidden,
            heads=heads,
            max_positions=self.number("positions", 0),
            window=window,
            num_window_layers=num_window,
            dtype=dtype,
            weight_bits=bits,
            quantisation=method,
            compute_dtype=compute,
            **_merged(attention, self._mlp(hidden, layers), {"other_layer_params": self._norms(hidden)}),
            **outer,
        )

    def _positive(self, key: str) -> int:
        value = self.number(key)
        if value < 1:
            raise PlanError(f"model {self.name}: {NAMES[key][0]} is {value}; give 1 or more in its config.json")
        return value

    def _heads(self, hidden: int, heads: int) -> dict[str, Any]:
        """Multi-head, grouped or multi-query attention."""
        config, family = self.config, self.family
        head_dim = self.number("head_dim", 0) or self.number("head_size", 0)
        if not head_dim and hidden % heads:
            raise PlanError(f"model {self.name}: {heads} heads do not divide hidden_size {hidden}; give head_dim")
        head_dim = head_dim or hidden // heads
        kv_heads = self._kv_heads(heads)
        if heads % kv_heads:
            raise PlanError(
                f"model {self.name}: num_key_value_heads is {kv_heads}, which does not divide {heads} heads; "
                "give a divisor in its config.json"
            )
        q, kv = heads * head_dim, kv_heads * head_dim
        bias = config.get("attention_bias", config.get("enable_bias", family["bias"]))
        biases = (q + 2 * kv) * bool(bias or family.get("qkv_bias")) + hidden * bool(bias)
        norms = 2 * head_dim * bool(family.get("qk_norm")) + heads * bool(family.get("sinks"))
        return {
            "kv_heads": kv_heads,
            "k_dim": head_dim,
            "v_dim": head_dim,
            "vocab": self._positive("vocab"),
            "linear_params": hidden * (q + 2 * kv) + q * hidden,
            "other_layer_params": biases + norms,
        }

    def _kv_heads(self, heads: int) -> int:
        if self.model_type == "falcon":
            if self.config.get("new_decoder_architecture"):
                return self.number("num_kv_heads", heads)
            return 1 if self.config.get("multi_query", True) else heads
        if self.model_type == "gpt_bigcode":
            return 1 if self.config.get("multi_query", True) else heads
        return self.number("num_key_value_heads", heads) or heads

    def _mla(self, hidden: int, heads: int) -> dict[str, Any]:
        """Multi-head latent attention: low-rank queries and KV, a rotary key shared by all heads."""
        rank, rope = self.number("kv_lora_rank"), self.number("qk_rope_head_dim")
        nope, v_dim = self.number("qk_nope_head_dim"), self.number("v_head_dim")
        q_rank = self.number("q_lora_rank", 0)
        q_out = heads * (nope + rope)
        q_params = hidden * q_rank + q_rank * q_out if q_rank else hidden * q_out
        kv_params = hidden * (rank + rope) + rank * heads * (nope + v_dim)
        return {
            "kv_heads": heads,
            "k_dim": nope + rope,
            "v_dim": v_dim,
            "vocab": self._positive("vocab"),
            "latent_dim": rank + rope,
            "linear_params": q_params + kv_params + heads * v_dim * hidden,
            "other_layer_params": rank + q_rank,
        }

    def _mlp(self, hidden: int, layers: int) -> dict[str, Any]:
        matrices = 2 if self.model_type in PLAIN_MLP else 3
        experts = self.number("experts", 0)
        if not experts:
            width = self.number("intermediate", 4 * hidden if matrices == 2 else None) or 4 * hidden
            bias = self.config.get("mlp_bias", self.family.get("mlp_bias", self.family["bias"]))
            biases = (width * (matrices - 1) + hidden) * bool(bias)
            return {"mlp_params": matrices * hidden * width, "other_layer_params": biases}
        width = self.number("moe_intermediate_size", 0) or self.number("intermediate")
        shared = self.number("shared_expert_intermediate_size", 0)
        shared = shared or self.number("n_shared_experts", 0) * width
        router = hidden * experts + hidden * bool(self.family.get("shared_gate"))
        router += experts * bool(self.family.get("router_bias"))
        expert_bias = (2 * width + hidden) * bool(self.family.get("expert_bias"))
        return {
            "mlp_params": 3 * hidden * self.number("intermediate", width),
            "num_moe_layers": self._moe_layers(layers),
            "experts": experts,
            "experts_per_token": self._experts_per_token(experts),
            "expert_params": 3 * hidden * width + expert_bias,
            "shared_expert_params": 3 * hidden * shared,
            "router_params": router,
            "other_layer_params": 0,
        }

    def _experts_per_token(self, experts: int) -> int:
        count = self.number("experts_per_token")
        if not 1 <= count <= experts:
            raise PlanError(
                f"model {self.name}: {NAMES['experts_per_token'][0]} is {count}; give 1 to its {experts} experts"
            )
        return count

    def _moe_layers(self, layers: int) -> int:
        config = self.config
        if "first_k_dense_replace" in config:
            return max(0, layers - self.number("first_k_dense_replace"))
        dense = set(self._list("mlp_only_layers", int))
        step = self.number("decoder_sparse_step", 1) or 1
        return sum(1 for layer in range(layers) if layer not in dense and (layer + 1) % step == 0)

    def _norms(self, hidden: int) -> int:
        return int(self.family.get("norms", 2)) * hidden * (1 + bool(self.family["norm_bias"]))

    def _outer(self, hidden: int, layers: int) -> dict[str, Any]:
        """Embeddings, the norms outside the layers, the head."""
        config, family = self.config, self.family
        vocab, width = self._positive("vocab"), self.number("word_embed_proj_dim", hidden)
        norm = hidden * (1 + bool(family["norm_bias"]))
        count = vocab * width + norm * (1 + bool(family["embedding_norm"]))
        if family["positions"] or family.get("has_positions"):
            count += (self._positive("positions") + family["positions"]) * hidden
        if width != hidden:
            count += 2 * width * hidden
        tied = config.get("tie_word_embeddings", family.get("tied", False))
        head = vocab * width
        bias = vocab * bool(family.get("head_bias"))
        return {"embedding_params": count + bias, "head_params": head, "is_tied": bool(tied)}

    def _window(self, layers: int) -> tuple[int, int]:
        """(tokens, layers that look no further back)."""
        window = self.number("sliding_window", 0) or self.number("attention_chunk_size", 0)
        is_asked = self.config.get("use_sliding_window", self.model_type not in WINDOW_IF_ASKED)
        types = self._list("layer_types", str)
        if not window or not is_asked:
            return 0, 0
        if types:
            return window, sum(1 for kind in types if kind in WINDOW_TYPES)
        if self.model_type in WINDOW_IF_ASKED:
            return window, max(0, layers - self.number("max_window_layers", layers))
        pattern = self.config.get("sliding_window_pattern")  # 4, or LLLG
        default = FULL_EVERY.get(self.model_type, 0)
        every = len(pattern) if isinstance(pattern, str) else self.number("sliding_window_pattern", default)
        return window, layers - layers // every if every else layers


def _merged(*parts: dict[str, Any]) -> dict[str, Any]:
    """Their keys; what several parts add to the other parameters of a layer is summed."""
    merged: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            merged[key] = merged.get(key, 0) + value if key == "other_layer_params" else value
    return merged


def _quantisation(config: Mapping[str, Any], dtype: str, name: str) -> tuple[float, str, str]:
    """(bits of a weight, method, dtype of the arithmetic)."""
    if not config:
        return 8 * DTYPE_BYTES[dtype], "", dtype
    method = str(config.get("quant_method", "unknown"))
    if method in ("fp8", "fbgemm_fp8", "modelopt_fp8"):
        return 8.0, method, "float8"
    if method == "mxfp4":
        return 4.25, method, dtype
    if method == "bitsandbytes":
        return (4.5 if config.get("load_in_4bit") else 8.0), method, dtype
    group = _object({"": next(iter(_object(config, "config_groups", name).values()), {})}, "", name)
    weights, inputs = _object(group, "weights", name), _object(group, "input_activations", name)
    bits = config.get("bits") or config.get("w_bit") or weights.get("num_bits")
    if not isinstance(bits, int | float) or isinstance(bits, bool) or not 1 <= bits <= 16:
        raise PlanError(f"model {name}: quantization_config.bits is {bits!r}; give the bits of a weight, 1 to 16")
    group_size = config.get("group_size") or weights.get("group_size") or 0
    scales = 20 / group_size if isinstance(group_size, int) and group_size > 0 else 0.0  # a scale and a zero point
    is_float8 = inputs.get("num_bits") == 8 and inputs.get("type") == "float"
    return float(bits) + scales, method, "float8" if is_float8 else dtype
