"""Which tensor-parallel degrees a worker loads: those that share out evenly all that engine/parallel/sharding.py cuts.

The engine asks transformers' config, and this a ModelShape, without transformers.
tests/placement/latency/test_tensor_parallel.py holds the two against each other.
"""

from __future__ import annotations

from placement.latency.model_shape import ModelShape

UNCUT = frozenset(  # model types for which transformers has no plan
    ("bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_oss", "gptj", "mpt", "opt", "stablelm")
)


def why_not_cut(shape: ModelShape, tp: int, *, has_whole_experts: bool = False) -> str:
    """What stands in the way of so many ranks; empty: nothing. `has_whole_experts`: each rank has some of them
    (expert_parallel), and not a part of each."""
    if tp > 1 and shape.model_type in UNCUT:
        return f"{shape.name} ({shape.model_type}) has no tensor-parallel plan in transformers, and TP is {tp}"
    counts = _counts(shape, has_whole_experts and shape.experts > 0)
    if not (shape.kv_heads % tp == 0 or tp % shape.kv_heads == 0):
        counts["KV heads"] = shape.kv_heads
    what = next((f"{count} {what}" for what, count in counts.items() if count % tp), "")
    return f"TP {tp} does not divide the {what} of {shape.name}" if what else ""


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
