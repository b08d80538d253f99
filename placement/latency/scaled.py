"""ScaledLatency is another latency model with all its times longer or shorter: its error carried through, a power cap.

It decides no factor: those of an error come from the estimate, those of a cap from the hardware file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from placement.latency.base import DecodeLine, LatencyModel

MOST_TOO_LONG = 0.9  # of a time that was predicted: all of it would leave no time at all


def factors_of(error: float) -> tuple[float, float]:
    """By how much times may be longer and shorter than a model says whose error is so large, above 1 or not."""
    return 1 + error, 1 - min(error, MOST_TOO_LONG)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledLatency:
    """`prefill`: factor of steps that hold a part of a prompt; `decode`: of those that only decode; `transfer`: of the
    link. `how` is said behind the model's source."""

    model: LatencyModel
    prefill: float
    decode: float
    transfer: float
    how: str

    @property
    def source(self) -> str:
        return f"{self.model.source}, {self.how}"

    @property
    def stages(self) -> int:
        return self.model.stages

    def prefill_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        return self.model.prefill_s(chunks) * self.prefill

    def decode_line(self, batch_size: int, context_tokens: int) -> DecodeLine:
        line = self.model.decode_line(batch_size, context_tokens)
        return DecodeLine(line.step_s * self.decode, line.per_token_s * self.decode, line.until_tokens)

    def mixed_s(self, chunks: Sequence[tuple[int, int]], batch_size: int, context_tokens: int) -> float:
        factor = self.prefill if chunks else self.decode
        return self.model.mixed_s(chunks, batch_size, context_tokens) * factor

    def transfer_s(self, num_tokens: int) -> float:
        return self.model.transfer_s(num_tokens) * self.transfer


def scaled_latency(model: LatencyModel, factor: float) -> LatencyModel:
    """Every time `factor` times as long."""
    if factor == 1.0:
        return model
    return ScaledLatency(model=model, prefill=factor, decode=factor, transfer=factor, how=f"times {factor:g}")
