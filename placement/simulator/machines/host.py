"""Host is what workers of one machine share: while prefill and decode both compute there, each is slower than alone.

It says by how much, as was measured (SharedHost). The workers tell it what they do; when that changes for one it tells
the others, who carry it out. With several prefill workers, as many as were measured, decode is slowed by the share of
them that compute. A mixed worker's step is one of prefill where it has prompts, else one of decode. Beside another
worker's step of the same phase, which was not measured, it takes as long as beside the other phase: prefill as beside
the least batch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from placement.simulator.cluster import SharedHost


class Host:
    def __init__(self, shared: SharedHost) -> None:
        points = [(0.0, 1.0, shared.by_batch[0][2]), *((float(b), p, d) for b, p, d in shared.by_batch)]
        self._sizes = [size for size, _, _ in points]
        self._prefill = [prefill for _, prefill, _ in points]
        self._decode = [decode for _, _, decode in points]
        self._is_computing: dict[str, bool] = {}  # prompts; by worker that may
        self._batch_size: dict[str, int] = {}  # by worker that decodes; a mixed one is in both
        self._change_pace: dict[str, Callable[[], None]] = {}  # by worker

    def join_prefill(self, name: str, change_pace: Callable[[], None]) -> None:
        """The worker is there, idle; another one of its name is not any more."""
        self._is_computing[name] = False
        self._change_pace[name] = change_pace

    def join_decode(self, name: str, change_pace: Callable[[], None]) -> None:
        self._batch_size[name] = 0
        self._change_pace[name] = change_pace

    def tell_prefill(self, name: str, is_computing: bool) -> None:
        if self._is_computing[name] != is_computing:
            self._is_computing[name] = is_computing
            self._tell_others(name)

    def tell_decode(self, name: str, batch_size: int) -> None:
        if self._batch_size[name] != batch_size:
            self._batch_size[name] = batch_size
            self._tell_others(name)

    def _tell_others(self, name: str) -> None:
        for other, change_pace in self._change_pace.items():
            if other != name:
                change_pace()

    def on_lost(self, name: str) -> None:
        """It computes no more. The others find out with their next step."""
        if name in self._is_computing:
            self._is_computing[name] = False
        if name in self._batch_size:
            self._batch_size[name] = 0

    def prefill_factor(self, name: str) -> float:
        """How many times as long as alone a prefill step of that worker takes now."""
        batch_size = sum([size for other, size in self._batch_size.items() if other != name])
        if batch_size:
            return self._at(self._prefill, batch_size)
        alike = [reads for other, reads in self._is_computing.items() if other != name and self._is_mixed(name, other)]
        return self._prefill[1] if any(alike) else 1.0

    def decode_factor(self, name: str, batch_size: int) -> float:
        rivals = [other for other in self._change_pace if other != name and self._slows_decode(name, other)]
        busy = [self._is_computing.get(other, False) or self._batch_size.get(other, 0) > 0 for other in rivals]
        if not any(busy):
            return 1.0
        return 1.0 + (self._at(self._decode, batch_size) - 1.0) * sum(busy) / len(busy)

    def _slows_decode(self, name: str, other: str) -> bool:
        return other in self._is_computing or name in self._is_computing

    def _is_mixed(self, *names: str) -> bool:
        """One of them is."""
        return any(name in self._is_computing and name in self._batch_size for name in names)

    def _at(self, factors: list[float], batch_size: int) -> float:
        """Straight between the measured sizes, level beyond the last."""
        i = bisect_right(self._sizes, batch_size) - 1
        if i == len(self._sizes) - 1:
            return factors[i]
        share = (batch_size - self._sizes[i]) / (self._sizes[i + 1] - self._sizes[i])
        return factors[i] + share * (factors[i + 1] - factors[i])


class TimeSlices(Host):
    """A GPU that processes have by turns, as a driver gives it without MPS: while several compute, each takes so many
    times as long as alone."""

    def __init__(self) -> None:
        super().__init__(SharedHost(workers=(), by_batch=((1, 1.0, 1.0),)))

    def prefill_factor(self, name: str) -> float:
        return 1.0 + self._num_others(name)

    def decode_factor(self, name: str, batch_size: int) -> float:
        return 1.0 + self._num_others(name)

    def _num_others(self, name: str) -> int:
        """That compute now."""
        others = [other for other in self._change_pace if other != name]
        return sum([self._is_computing.get(other, False) or self._batch_size.get(other, 0) > 0 for other in others])
