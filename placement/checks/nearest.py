"""nearest finds the measured steps that are most like those of a plan, and by how much its latency model misses them.

Alike: the same GPU before others, then size of the model, TP degree, precision and prompts, by ratios. It measures
nothing: the steps are those of placement/latency/measured.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from placement.latency.hardware import Hardware, load_hardware
from placement.latency.measured import HARDWARE, UNSHARED, Batch, Phase, predicted_s, read_batches, shape_of
from placement.latency.model_shape import ModelShape
from placement.plan import Candidate, Near

SHOWN = 3  # of each phase
OTHER_GPU, OTHER_PRECISION = 3.0, 1.0  # as far as an e-fold of size so many times
PHASES_OF: dict[str, tuple[Phase, ...]] = {"prefill": ("prefill",), "decode": ("decode",)}


def nearest(shape: ModelShape, hardware: Hardware, candidate: Candidate, prompt_tokens: float) -> tuple[Near, ...]:
    """Of each phase that its pools compute, the nearest first. `prompt_tokens`: of a request, on average."""
    batches = [batch for batch in read_batches() if batch.setting.model != UNSHARED]
    known = {name: load_hardware(name) for name in HARDWARE.values()}

    def of(phase: Phase, tp: int) -> Iterator[Near]:
        def distance(batch: Batch) -> float:
            at = batch.setting
            other = shape_of(at.model, at.precision, phase)
            apart = abs(math.log(other.num_params / shape.num_params)) + abs(math.log(at.tp / tp))
            apart += 0.5 * abs(math.log(batch.input_len / max(1.0, prompt_tokens)))
            apart += OTHER_GPU * (known[at.hardware].name != hardware.name)
            return apart + OTHER_PRECISION * (other.weight_bits != shape.weight_bits)

        near = _spread(sorted(batches, key=distance))
        for batch, time_s in zip(near, predicted_s(near, known, phase), strict=True):
            yield _near(batch, phase, known[batch.setting.hardware].name, time_s)

    asked = ((phase, p.degrees.tp) for p in candidate.pools for phase in PHASES_OF.get(p.role, ("prefill", "decode")))
    return tuple(near for phase, tp in dict.fromkeys(asked) for near in of(phase, tp))


def _near(batch: Batch, phase: Phase, hardware: str, predicted: float) -> Near:
    at, lengths = batch.setting, f"{batch.size} x {batch.input_len:,}+{batch.output_len:,}"
    return Near(
        phase=phase,
        case=f"{at.model} {at.precision}, {hardware}, TP {at.tp}, {lengths}",
        measured_s=batch.measured_s[phase],
        predicted_s=predicted,
    )


def _spread(batches: Sequence[Batch]) -> list[Batch]:
    """The first of them and others as near, of other sizes: small, middle, large."""
    first = batches[0]
    alike = [b for b in batches if (b.setting, b.input_len) == (first.setting, first.input_len)]
    alike = sorted({batch.size: batch for batch in alike}.values(), key=lambda batch: batch.size)
    places = sorted({0, len(alike) // 2, len(alike) - 1})
    return [alike[place] for place in places][:SHOWN]
