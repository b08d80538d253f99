"""ConfigKeys reads a model's config.json: whole numbers and lists, by whichever names its family gives them.

It knows no architecture. What is missing or is no number is one sentence: the model, the key, the value, the mend.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from placement.catalogs.base import PlanError

MOST = 2**40  # of any number in a config
NAMES = {  # ours: the keys under which configs say it, the first that is there
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "n_embed"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    "embedding_width": ("word_embed_proj_dim", "embedding_size"),
    "window": ("sliding_window", "attention_chunk_size", "window_size"),
    "kv_heads": ("num_key_value_heads", "kv_n_heads"),
    "vocab": ("vocab_size",),
    "intermediate": ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"),
    "positions": ("max_position_embeddings", "n_positions", "seq_length", "max_sequence_length", "max_seq_len"),
    "experts": ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts"),
    "experts_per_token": ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k"),
    "first_dense": ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers"),
    "expert_step": ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval"),
    # of the layers without experts, where it differs from that of an expert
    "dense_width": ("intermediate_size_mlp", "dense_intermediate_size", "prefix_dense_intermediate_size"),
    "shared_experts": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert"),
    "shared_width": ("shared_expert_intermediate_size", "shared_intermediate_size"),  # of all shared experts
}


class ConfigKeys:
    """Finds in a config what the shape wants, whatever its keys are called."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.config = config
        self.name = name
        self.model_type = str(config.get("model_type", "llama"))

    def number(self, key: str, default: int | None = None) -> int:
        for written in NAMES.get(key, (key,)):
            value = self.config.get(written)
            if value is None:
                continue
            if isinstance(value, list) and value and all(item == value[0] for item in value):
                value = value[0]  # of each layer
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < MOST:
                raise PlanError(f"model {self.name}: {written} is {value!r}; give a whole number in its config.json")
            return value
        if default is None:
            raise PlanError(f"model {self.name}: {NAMES.get(key, (key,))[0]} is missing; give it in its config.json")
        return default

    def items(self, key: str, kind: type) -> list[Any]:
        value = self.config.get(key) or []
        if not isinstance(value, list | tuple) or not all(isinstance(item, kind) for item in value):
            what = "names" if kind is str else "whole numbers"
            raise PlanError(f"model {self.name}: {key} is {value!r}; give a list of {what} in its config.json")
        return list(value)

    def positive(self, key: str) -> int:
        value = self.number(key)
        if value < 1:
            raise PlanError(f"model {self.name}: {NAMES[key][0]} is {value}; give 1 or more in its config.json")
        return value


def section(config: Mapping[str, Any], key: str, name: str) -> Mapping[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise PlanError(f"model {name}: {key} is {value!r}; give keys and values in its config.json")
    return value
