"""Host is what workers of one machine share: while prefill and decode both compute there, each is slower than alone.

It says by how much, as was measured (SharedHost). The workers tell it what they do; when that changes for one phase it
tells the workers of the other, who carry it out. With several prefill workers, as many as were measured, decode is
slowed by the share of them that compute.
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
        self._is_computing: dict[str, bool] = {}  # by prefill worker
        self._batch_size: dict[str, int] = {}  # by decode worker
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
            for decode in self._batch_size:
                self._change_pace[decode]()

    def tell_decode(self, name: str, batch_size: int) -> None:
        if self._batch_size[name] != batch_size:
            self._batch_size[name] = batch_size
            for prefill in self._is_computing:
                self._change_pace[prefill]()

    def on_lost(self, name: str) -> None:
        """It computes no more. The others find out with their next step."""
        if name in self._is_computing:
            self._is_computing[name] = False
        else:
            self._batch_size[name] = 0

    def prefill_factor(self) -> float:
        """How many times as long as alone a prefill step takes now."""
        batch_size = sum(self._batch_size.values())
        return self._at(self._prefill, batch_size) if batch_size else 1.0

    def decode_factor(self, batch_size: int) -> float:
        computing = sum(self._is_computing.values())
        if not computing:
            return 1.0
        return 1.0 + (self._at(self._decode, batch_size) - 1.0) * computing / len(self._is_computing)

    def _at(self, factors: list[float], batch_size: int) -> float:
        """Straight between the measured sizes, level beyond the last."""
        i = bisect_right(self._sizes, batch_size) - 1
        if i == len(self._sizes) - 1:
            return factors[i]
        share = (batch_size - self._sizes[i]) / (self._sizes[i + 1] - self._sizes[i])
        return factors[i] + share * (factors[i + 1] - factors[i])
