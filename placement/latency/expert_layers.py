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
    first = keys.number("first_dense", FIRST_DENSE.get(keys.model_type, 0))
    ends = keys.config.get("moe_layer_end_index") not in (None, -1)  # -1: with the last of all
    end = min(layers, keys.number("moe_layer_end_index") + 1) if ends else layers
    dense = keys.items("mlp_only_layers", int)
    step = keys.number("expert_step", 1) or 1
    freq = keys.number("moe_layer_freq", 1) or 1  # counted from 0
    return sum((at + 1) % step == 0 and at % freq == 0 for at in range(first, end) if at not in dense)
