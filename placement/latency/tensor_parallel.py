"""Which tensor-parallel degrees a worker loads: those that share out evenly all that engine/parallel/sharding.py cuts.

The engine asks transformers' config, and this a ModelShape, without transformers: it does not know which models have no
tensor-parallel plan there. tests/placement/latency/test_tensor_parallel.py holds the two against each other.
"""

from __future__ import annotations

from placement.latency.model_shape import ModelShape


def not_shared_out(shape: ModelShape, tp: int, *, has_whole_experts: bool = False) -> str:
    """What stands in the way of so many ranks, in words; empty: nothing. `has_whole_experts`: each rank has some of
    them (expert_parallel), and not a part of each."""
    counts = _counts(shape, has_whole_experts and shape.experts > 0)
    what = next((f"{count} {what}" for what, count in counts.items() if count % tp), "")
    if what or shape.kv_heads % tp == 0 or tp % shape.kv_heads == 0:
        return what
    return f"{shape.kv_heads} KV heads"


def _counts(shape: ModelShape, has_whole_experts: bool) -> dict[str, int]:
    mlp_width, expert_width, experts = shape.mlp_width, shape.expert_width, 0
    if has_whole_experts:
        experts = shape.experts
        if expert_width:
            expert_width *= shape.shared_experts  # which are cut all the same
        else:
            mlp_width = 0  # it is the experts'
    return {
        "heads": shape.heads,
        "experts": experts,
        "columns of the MLP": mlp_width,
        "columns of an expert": expert_width,
    }
