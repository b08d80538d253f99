"""num_expert_layers says how many of a model's layers have experts, by whichever of its config's keys tells: a list of
the layers or of their kinds, a pattern, or the number of dense ones that come first.
"""

from __future__ import annotations

from placement.latency.config_keys import ConfigKeys
from placement.latency.families import FIRST_DENSE


def num_expert_layers(keys: ConfigKeys, layers: int) -> int:
    if kinds := keys.items("mlp_layer_types", str):
        return sum(kind != "dense" for kind in kinds)
    if listed := keys.items("moe_layers", int):
        return len(set(listed))
    return sum(_has_experts(keys, layer, layers) for layer in range(layers))


def _has_experts(keys: ConfigKeys, layer: int, layers: int) -> bool:
    dense = keys.items("mlp_only_layers", int)
    first = keys.number("first_dense", FIRST_DENSE.get(keys.model_type, 0))
    last = keys.config.get("moe_layer_end_index")  # -1: the last of all
    step = keys.number("expert_step", 1) or 1
    freq = keys.number("moe_layer_freq", 1) or 1  # counted from 0
    is_within = first <= layer and (last in (None, -1) or layer <= keys.number("moe_layer_end_index"))
    return is_within and layer not in dense and (layer + 1) % step == 0 and layer % freq == 0
