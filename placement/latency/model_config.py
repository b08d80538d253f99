"""shape_of reads a ModelShape from a model's config.json alone: no weight is looked at, no library asked.

Counts are exact for the architectures whose parts stand in the config (Llama, Mistral, Qwen2, Qwen3, Mixtral, DeepSeek,
OPT, GPT-2, BLOOM, GPT-NeoX and their like); what a config does not tell (a vision tower, a next-token-prediction layer)
is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from placement.catalogs.base import PlanError
from placement.latency.config_keys import NAMES, ConfigKeys, section
from placement.latency.expert_layers import num_expert_layers
from placement.latency.families import (
    FAMILIES,
    FULL_EVERY,
    INDEXED_LAYERS,
    INDEXED_TYPES,
    NEW_ERA,
    NO_KV_TYPES,
    NOT_COUNTED,
    PLAIN_MLP,
    STATE_LAYERS,
    WINDOW_IF_ASKED,
    WINDOW_TYPES,
)
from placement.latency.model_shape import DTYPE_BYTES, ModelShape


def shape_of(config: Mapping[str, Any], name: str = "model") -> ModelShape:
    """From a config's own keys. Raises PlanError: a key is missing, or the model keeps more than KV."""
    text = section(config, "text_config", name) or section(config, "llm_config", name) or config
    text = {**section(text, "attn_config", name), **section(text, "ffn_config", name), **text}  # DBRX's parts
    quantised = section(text, "quantization_config", name) or section(config, "quantization_config", name)
    dtype = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    return _ShapeReader(ConfigKeys(text, name)).shape(quantised, dtype or "bfloat16")


def _refuse(keys: ConfigKeys) -> None:
    """Raises PlanError for a model that keeps more than KV."""
    what = f"model {keys.name} ({keys.model_type})"
    if keys.config.get("is_encoder_decoder"):
        raise PlanError(f"{what} is an encoder-decoder; give a decoder-only model")
    types = keys.items("layer_types", str)
    stateful, indexed = (
        sorted({kind for kind in types if any(part in kind for part in parts)})
        for parts in (STATE_LAYERS, INDEXED_LAYERS)
    )
    if indexed or keys.model_type in INDEXED_TYPES:
        raise PlanError(f"{what} attends to those keys that an index chooses, which is not served; give another model")
    if stateful or keys.model_type in NO_KV_TYPES:
        kinds = ", ".join(stateful) or "a recurrent state"
        raise PlanError(f"{what} has layers of {kinds}, which is not KV in pages; give a model of attention only")
    if keys.model_type in NOT_COUNTED:
        raise PlanError(
            f"{what} is not told in full by its config.json; give a profile that kvrelay calibrate measured"
        )


class _ShapeReader:
    """Counts a layer's parameters part by part: attention, MLP or experts, norms; and what is outside the layers."""

    def __init__(self, keys: ConfigKeys) -> None:
        self.keys = keys
        self.family = NEW_ERA | FAMILIES.get(keys.model_type, {})
        _refuse(keys)

    def shape(self, quantised: Mapping[str, Any], dtype: str) -> ModelShape:
        layers, hidden, heads = (self.keys.positive(key) for key in ("num_layers", "hidden", "heads"))
        dtype = {"float": "float32", "half": "float16"}.get(
            str(dtype).removeprefix("torch."), str(dtype).removeprefix("torch.")
        )
        if dtype not in DTYPE_BYTES:
            raise PlanError(f"model {self.keys.name}: dtype is {dtype!r}; give one of {', '.join(DTYPE_BYTES)}")
        bits, method, compute = _quantisation(quantised, dtype, self.keys.name)
        window, num_window = self._window(layers)
        attention = self._mla(hidden, heads) if self.keys.config.get("kv_lora_rank") else self._heads(hidden, heads)
        outer = self._outer(hidden, layers)
        return ModelShape(
            name=self.keys.name,
            model_type=self.keys.model_type,
            num_layers=layers,
            hidden=hidden,
            heads=heads,
            max_positions=self.keys.number("positions", 0),
            mlp_width=self.keys.number("intermediate", 0),
            expert_width=self.keys.number("moe_intermediate_size", 0),
            shared_experts=self._shared_experts,
            window=window,
            num_window_layers=num_window,
            has_norms_of_heads=self.keys.model_type == "cohere" and bool(self.keys.config.get("use_qk_norm")),
            reduces_per_layer=1 if self._is_parallel else 2,
            dtype=dtype,
            weight_bits=bits,
            quantisation=method,
            compute_dtype=compute,
            **_merged(attention, self._mlp(hidden, layers), {"other_layer_params": self._norms(hidden)}),
            **outer,
        )

    def _heads(self, hidden: int, heads: int) -> dict[str, Any]:
        """Multi-head, grouped or multi-query attention."""
        config, family = self.keys.config, self.family
        head_dim = self.keys.number("head_dim", 0) or self.keys.number("head_size", 0)
        if not head_dim and hidden % heads:
            raise PlanError(f"model {self.keys.name}: {heads} heads do not divide hidden_size {hidden}; give head_dim")
        head_dim = head_dim or hidden // heads
        kv_heads = self._kv_heads(heads)
        if heads % kv_heads:
            raise PlanError(
                f"model {self.keys.name}: num_key_value_heads is {kv_heads}, which does not divide {heads} heads; "
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
            "vocab": self.keys.positive("vocab"),
            "linear_params": hidden * (q + 2 * kv) + q * hidden,
            "other_layer_params": biases + norms,
        }

    def _kv_heads(self, heads: int) -> int:
        if self.keys.model_type == "falcon":
            if self.keys.config.get("new_decoder_architecture"):
                return self.keys.number("num_kv_heads", heads)
            return 1 if self.keys.config.get("multi_query", True) else heads
        if self.keys.model_type == "gpt_bigcode":
            return 1 if self.keys.config.get("multi_query", True) else heads
        return self.keys.number("kv_heads", heads) or heads

    @property
    def _is_parallel(self) -> bool:
        """Attention and MLP of a layer are summed before a TP group reduces them (as vLLM does for Falcon alone)."""
        config = self.keys.config
        is_parallel = config.get("parallel_attn", True) or config.get("new_decoder_architecture")
        return self.keys.model_type == "falcon" and bool(is_parallel)

    def _mla(self, hidden: int, heads: int) -> dict[str, Any]:
        """Multi-head latent attention: low-rank queries and KV, a rotary key shared by all heads."""
        rank, rope = self.keys.number("kv_lora_rank"), self.keys.number("qk_rope_head_dim")
        nope, v_dim = self.keys.number("qk_nope_head_dim"), self.keys.number("v_head_dim")
        q_rank = self.keys.number("q_lora_rank", 0)
        q_out = heads * (nope + rope)
        q_params = hidden * q_rank + q_rank * q_out if q_rank else hidden * q_out
        kv_params = hidden * (rank + rope) + rank * heads * (nope + v_dim)
        return {
            "kv_heads": heads,
            "k_dim": nope + rope,
            "v_dim": v_dim,
            "vocab": self.keys.positive("vocab"),
            "linear_params": q_params + kv_params + heads * v_dim * hidden,
            "other_layer_params": rank + q_rank,
        }

    def _mlp(self, hidden: int, layers: int) -> dict[str, Any]:
        matrices = 2 if self.keys.model_type in PLAIN_MLP else 3
        experts = self.keys.number("experts", 0)
        if not experts:
            width = self.keys.number("intermediate", 4 * hidden if matrices == 2 else None) or 4 * hidden
            bias = self.keys.config.get("mlp_bias", self.family.get("mlp_bias", self.family["bias"]))
            biases = (width * (matrices - 1) + hidden) * bool(bias)
            return {"mlp_params": matrices * hidden * width, "other_layer_params": biases}
        width = self.keys.number("moe_intermediate_size", 0) or self.keys.number("intermediate")
        dense = self.keys.number("dense_width", 0) or self.keys.number("intermediate", width)
        shared = self.keys.number("shared_width", 0) or self._shared_experts * width
        router = hidden * experts + hidden * bool(self.family.get("shared_gate"))
        router += experts * bool(self.family.get("router_bias"))
        expert_bias = (2 * width + hidden) * bool(self.family.get("expert_bias"))
        return {
            "mlp_params": 3 * hidden * dense,
            "num_moe_layers": num_expert_layers(self.keys, layers),
            "experts": experts,
            "experts_per_token": self._experts_per_token(experts),
            "expert_params": 3 * hidden * width + expert_bias,
            "shared_expert_params": 3 * hidden * shared,
            "router_params": router,
            "other_layer_params": 0,
        }

    @property
    def _shared_experts(self) -> int:
        return self.keys.number("shared_experts", int(self.family.get("shared_experts", 0)))

    def _experts_per_token(self, experts: int) -> int:
        count = self.keys.number("experts_per_token")
        if not 1 <= count <= experts:
            raise PlanError(
                f"model {self.keys.name}: {NAMES['experts_per_token'][0]} is {count}; give 1 to its {experts} experts"
            )
        return count

    def _norms(self, hidden: int) -> int:
        return int(self.family.get("norms", 2)) * hidden * (1 + bool(self.family["norm_bias"]))

    def _outer(self, hidden: int, layers: int) -> dict[str, Any]:
        """Embeddings, the norms outside the layers, the head."""
        config, family = self.keys.config, self.family
        vocab, width = self.keys.positive("vocab"), self.keys.number("embedding_width", hidden)
        norm = hidden * (1 + bool(family["norm_bias"]))
        count = vocab * width + norm * (1 + bool(family["embedding_norm"]))
        if family["positions"] or family.get("has_positions"):
            count += (self.keys.positive("positions") + family["positions"]) * hidden
        if width != hidden:
            count += 2 * width * hidden
        if family.get("head_transform"):
            count += (hidden + 1) * hidden
        count += self._beside_tokens(hidden)
        tied = config.get("tie_word_embeddings", family.get("tied", False))
        head = vocab * width
        bias = vocab * bool(family.get("head_bias"))
        return {"embedding_params": count + bias, "head_params": head, "is_tied": bool(tied)}

    def _beside_tokens(self, hidden: int) -> int:
        """Embeddings that a token has besides its own (RoCBert's shapes and sounds), and the matrix that joins them."""
        names = self.family.get("joined_embeddings", ())
        widths = [self.keys.number(f"{name}_embed_dim") for name in names]
        vocabs = [self.keys.number(f"{name}_vocab_size") for name in names]
        count = sum(vocab * width for vocab, width in zip(vocabs, widths, strict=True))
        return count + ((hidden + sum(widths) + 1) * hidden if names else 0)

    def _window(self, layers: int) -> tuple[int, int]:
        """(tokens, layers that look no further back)."""
        window = self.keys.number("window", 0)
        is_asked = self.keys.config.get("use_sliding_window", self.keys.model_type not in WINDOW_IF_ASKED)
        types = self.keys.items("layer_types", str) or self.keys.items("attention_layers", str)
        if not window or not is_asked:
            return 0, 0
        if types:
            return window, sum(1 for kind in types if kind in WINDOW_TYPES)
        if self.keys.model_type in WINDOW_IF_ASKED:
            return window, max(0, layers - self.keys.number("max_window_layers", layers))
        pattern = self.keys.config.get("sliding_window_pattern")  # 4, or LLLG
        default = FULL_EVERY.get(self.keys.model_type, 0)
        every = len(pattern) if isinstance(pattern, str) else self.keys.number("sliding_window_pattern", default)
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
    group = section({"": next(iter(section(config, "config_groups", name).values()), {})}, "", name)
    weights, inputs = section(group, "weights", name), section(group, "input_activations", name)
    bits = config.get("bits") or config.get("w_bit") or weights.get("num_bits")
    if not isinstance(bits, int | float) or isinstance(bits, bool) or not 1 <= bits <= 16:
        raise PlanError(f"model {name}: quantization_config.bits is {bits!r}; give the bits of a weight, 1 to 16")
    group_size = config.get("group_size") or weights.get("group_size") or 0
    scales = 20 / group_size if isinstance(group_size, int) and group_size > 0 else 0.0  # a scale and a zero point
    is_float8 = inputs.get("num_bits") == 8 and inputs.get("type") == "float"
    return float(bits) + scales, method, "float8" if is_float8 else dtype
