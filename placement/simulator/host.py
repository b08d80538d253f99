"""Host is what workers of one machine share: while prefill and decode both compute there, each is slower than alone.

It says by how much, as was measured (SharedHost), and tells the machines when that changes; they carry it out. With
several prefill workers, as many as were measured, decode is slowed by the share of them that compute.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from placement.simulator.cluster import SharedHost

if TYPE_CHECKING:
    from placement.simulator.decode_machine import DecodeMachine
    from placement.simulator.prefill_machine import PrefillMachine


class Host:
    def __init__(self, shared: SharedHost) -> None:
        self.prefills: dict[str, PrefillMachine] = {}
        self.decodes: dict[str, DecodeMachine] = {}
        points = [(0.0, 1.0, shared.by_batch[0][2]), *((float(b), p, d) for b, p, d in shared.by_batch)]
        self._sizes = [size for size, _, _ in points]
        self._prefill = [prefill for _, prefill, _ in points]
        self._decode = [decode for _, _, decode in points]

    def prefill_factor(self) -> float:
        """How many times as long as alone a prefill step takes now."""
        batch_size = sum([decode.batch_size for decode in self.decodes.values()])
        return self._at(self._prefill, batch_size) if batch_size else 1.0

    def decode_factor(self, batch_size: int) -> float:
        busy = sum([prefill.is_computing for prefill in self.prefills.values()])
        if not busy:
            return 1.0
        return 1.0 + (self._at(self._decode, batch_size) - 1.0) * busy / len(self.prefills)

    def on_prefill_changed(self) -> None:
        for decode in self.decodes.values():
            decode.change_pace()

    def on_decode_changed(self) -> None:
        for prefill in self.prefills.values():
            prefill.change_pace()

    def _at(self, factors: list[float], batch_size: int) -> float:
        """Straight between the measured sizes, level beyond the last."""
        i = bisect_right(self._sizes, batch_size) - 1
        if i == len(self._sizes) - 1:
            return factors[i]
        share = (batch_size - self._sizes[i]) / (self._sizes[i + 1] - self._sizes[i])
        return factors[i] + share * (factors[i + 1] - factors[i])
