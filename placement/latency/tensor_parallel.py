"""Which degrees a worker loads: tensor-parallel ones that share out evenly all that engine/parallel/sharding.py cuts,
and as many stages as there are layers at most, of a model that can be cut so at all.

The engine asks transformers' config and the model, and this a ModelShape, without transformers.
tests/placement/latency/test_tensor_parallel.py and test_cut_types.py hold the two against each other.
"""

from __future__ import annotations

from placement.latency.cut_types import RANKS
from placement.latency.model_shape import KV_DTYPES, ModelShape


def why_not_cut(shape: ModelShape, tp: int, *, has_whole_experts: bool = False) -> str:
    """What stands in the way of so many ranks; empty: nothing. `has_whole_experts`: each rank has some of them
    (expert_parallel), and not a part of each."""
    if tp > 1 and (why := few_bits_of(shape)):
        return f"{why} goes with TP 1 alone, and TP is {tp}"
    if tp > 1 and (why := _why_whole(shape, has_whole_experts)):
        return f"{shape.name} ({shape.model_type}) {why}, and TP is {tp}"
    counts = _counts(shape, has_whole_experts)
    if not (shape.kv_heads % tp == 0 or tp % shape.kv_heads == 0):
        counts["KV heads"] = shape.kv_heads
    what = next((f"{count} {what}" for what, count in counts.items() if count % tp), "")
    return f"TP {tp} does not divide the {what} of {shape.name}" if what else ""


def why_not_staged(shape: ModelShape, pp: int) -> str:
    """What stands in the way of so many stages, and the mend; empty: nothing."""
    if pp > shape.num_layers:
        return f"PP {pp} is more than the {shape.num_layers} layers of {shape.name}; give fewer stages"
    if pp > 1 and (why := few_bits_of(shape)) not in ("", "kv_dtype int8"):
        return f"{why} goes with PP 1 alone, and PP is {pp}; give PP 1"
    return ""


def few_bits_of(shape: ModelShape) -> str:
    """Which of a worker's numbers have few bits, by the key that asks for it (engine/options.py has it for one process
    alone); empty: none."""
    if shape.quantisation == "int8":
        return "quantization int8"
    return next((f"kv_dtype {name}" for name, dtype in KV_DTYPES.items() if dtype == shape.kv_dtype), "")


def _why_whole(shape: ModelShape, has_whole_experts: bool) -> str:
    if shape.model_type not in RANKS:
        return "has no tensor-parallel plan in transformers that is known to be served"
    if shape.has_norms_of_heads:
        return "has norms with weights for each head, which are not cut"
    return "has no experts for expert_parallel" if has_whole_experts and not shape.experts else ""


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
