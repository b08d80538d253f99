"""Circuits say what is worth a try: workers whose steps fail, or the peers that one worker cannot hand over to. They
read no clock: whoever asks passes `now`, in seconds.

    closed --failures one after another--> open --its time is over--> half_open: one request tries it
       ^                                    ^                            |  |
       +---------- it succeeds -------------|----------------------------+  |
                                            +------ it fails: open for twice as long

What is open is a last resort and never forbidden: better a try than a sure refusal. Only what has failed since it last
succeeded is kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MIN_OPEN_S, MAX_OPEN_S = 1.0, 30.0
SAME_FAILURE_S = 0.25  # one failure that is heard of twice, from an event and from a report


@dataclass(slots=True)
class Circuit:
    failures: int = 0  # one after another; those of one moment count once
    failed_s: float = 0.0  # when it failed last
    reason: str = ""  # for which it did
    opened_s: float = 0.0
    open_for_s: float = 0.0  # 0: it is closed
    trial: str = ""  # the request that tries it

    @property
    def retry_at_s(self) -> float:
        return self.opened_s + self.open_for_s

    def state(self, now: float) -> str:
        if not self.open_for_s:
            return "closed"
        return "open" if now < self.retry_at_s else "half_open"

    def lets(self, now: float) -> bool:
        """Whether a request may go there as anywhere else."""
        return not self.open_for_s or (now >= self.retry_at_s and not self.trial)


class Circuits:
    """By name. `threshold`: failures that open one."""

    def __init__(self, threshold: int) -> None:
        self._threshold = threshold
        self._by_name: dict[str, Circuit] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def items(self) -> Iterable[tuple[str, Circuit]]:
        return self._by_name.items()

    def get(self, name: str) -> Circuit | None:
        return self._by_name.get(name)

    def state(self, name: str, now: float) -> str:
        circuit = self._by_name.get(name)
        return "closed" if circuit is None else circuit.state(now)

    def lets(self, name: str, now: float) -> bool:
        circuit = self._by_name.get(name)
        return circuit is None or circuit.lets(now)

    def on_failure(self, name: str, reason: str, now: float) -> bool:
        """Whether it has opened by this. A failure of what is open says nothing new: it was sent before."""
        circuit = self._by_name.setdefault(name, Circuit())
        if circuit.failures == 0 or now > circuit.failed_s:
            circuit.failures += 1
        circuit.failed_s, circuit.reason = max(now, circuit.failed_s), reason
        if circuit.failures < self._threshold or circuit.state(now) == "open":
            return False
        circuit.opened_s, circuit.trial = now, ""
        circuit.open_for_s = min(max(MIN_OPEN_S, 2 * circuit.open_for_s), MAX_OPEN_S)
        return True

    def on_told(self, name: str, reason: str, failed_s: float) -> bool:
        """Somebody says that it failed then, which may be known. Whether it has opened by this."""
        circuit = self._by_name.get(name)
        if circuit is not None and failed_s < circuit.failed_s + SAME_FAILURE_S:
            return False
        return self.on_failure(name, reason, failed_s)

    def on_success(self, name: str) -> None:
        self._by_name.pop(name, None)

    def begin_trial(self, name: str, request_id: str, now: float) -> None:
        """The request goes there: if it is the one that tries it, others keep away meanwhile."""
        circuit = self._by_name.get(name)
        if circuit is not None and circuit.state(now) == "half_open" and not circuit.trial:
            circuit.trial = request_id

    def end_trial(self, request_id: str) -> None:
        """The request is over, whatever came of it."""
        for circuit in self._by_name.values():
            if circuit.trial == request_id:
                circuit.trial = ""

    def check_invariants(self) -> None:
        for name, circuit in self._by_name.items():
            assert circuit.failures > 0, f"{name} has never failed"
            assert 0 <= circuit.open_for_s <= MAX_OPEN_S, f"{name} is open for {circuit.open_for_s:g} s"
            assert not circuit.trial or circuit.open_for_s, f"{name} is tried, but closed"
            assert (circuit.failures >= self._threshold) == (circuit.open_for_s > 0), (
                f"{name} should be open, or closed"
            )
