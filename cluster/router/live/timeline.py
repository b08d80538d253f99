"""Timeline says where the time of one request went. It reads no clock: every mark is given, on the router's clock.

    route -> prefill_queue -> prefill -> handoff -> decode_queue -> decode -> finished
      ^                                                                |
      +------------- a lost worker, a failed handoff, preemption ------+

A mark says when a phase began; the phase lasts until the next mark. Marks of one attempt come from several workers
and may arrive in any order; they are kept in the order of the phases, and a mark that would run backwards (clocks of
two hosts are matched to within a round trip only) is moved to the one before it. So no phase is negative and the
phases sum exactly to e2e. A phase that is entered again in a later attempt is counted together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Self

PHASES = ("route", "prefill_queue", "prefill", "handoff", "decode_queue", "decode")
_ORDER = {name: i for i, name in enumerate(PHASES)}


class Piece(NamedTuple):
    """A phase of one attempt, on the router's clock. `worker`: where; empty: in the router."""

    phase: str
    worker: str
    attempt: int
    begin_s: float
    end_s: float


Mark = tuple[int, float, str]  # its phase's number, when it began, the worker
Halves = tuple[list[float], list[float]]


class Timeline:
    __slots__ = ("_attempt_begins", "_halves", "_marks", "_phases", "arrived_s", "finished_s", "first_token_s")

    def __init__(self, arrived_s: float) -> None:
        self.arrived_s = arrived_s
        self.first_token_s: float | None = None
        self.finished_s: float | None = None
        self._marks: list[Mark] = [(0, arrived_s, "")]
        self._attempt_begins = 0  # index of this attempt's route mark
        self._halves: Halves | None = None  # seconds in each phase: to the first token, after it
        self._phases: dict[str, float] = {}  # in all, once they were asked for

    def state(self) -> tuple[Any, ...]:
        """All of it, without a name."""
        return self.arrived_s, self.first_token_s, self.finished_s, self._marks

    @classmethod
    def of(cls, state: tuple[Any, ...]) -> Self:
        """One that has finished."""
        timeline = cls(state[0])
        _, timeline.first_token_s, timeline.finished_s, timeline._marks = state
        return timeline

    def enter(self, phase: str, at_s: float, worker: str = "") -> None:
        """The phase began at `at_s`. `route` begins a new attempt; in one attempt a phase's first mark holds."""
        if self._halves:
            return
        order = _ORDER[phase]
        if order == 0:
            self._attempt_begins = len(self._marks)
            self._marks.append((0, at_s, worker))
            return
        at = len(self._marks)
        while at > self._attempt_begins and self._marks[at - 1][0] >= order:
            if self._marks[at - 1][0] == order:
                return
            at -= 1
        self._marks.insert(at, (order, at_s, worker))

    def first_token(self, at_s: float) -> None:
        """The first token went out to the client; later calls change nothing."""
        if self.first_token_s is None:
            self.first_token_s = max(at_s, self.arrived_s)

    def finish(self, at_s: float) -> None:
        """The last token went out, or the request ended otherwise; later calls change nothing."""
        if self.finished_s is None:
            self.finished_s = max(at_s, self.first_token_s or self.arrived_s)

    @property
    def e2e_s(self) -> float:
        """Arrival to the end. Asserts that the request has finished."""
        assert self.finished_s is not None, "the request has not finished"
        return self.finished_s - self.arrived_s

    @property
    def ttft_s(self) -> float:
        """Arrival to first token; 0 if there was none."""
        return 0.0 if self.first_token_s is None else self.first_token_s - self.arrived_s

    def tpot_s(self, num_tokens: int) -> float:
        """(e2e - ttft) / (tokens - 1), as vLLM and DistServe count it; 0 with fewer than two tokens."""
        if num_tokens < 2 or self.first_token_s is None:
            return 0.0
        return (self.e2e_s - self.ttft_s) / (num_tokens - 1)

    def phases(self) -> dict[str, float]:
        """Seconds in each phase that was entered, in the order of the request's life. Not to be changed."""
        if not self._phases:
            before, after = self.halves()
            entered = {order for order, *_ in self._marks}
            self._phases = {name: before[i] + after[i] for i, name in enumerate(PHASES) if i in entered}
        return self._phases

    def halves(self) -> Halves:
        """Seconds in each of PHASES up to the first token, and after it; up to the end where there was none. Not to be
        changed, and what is entered from now on changes nothing."""
        if self._halves is None:
            assert self.finished_s is not None, "the request has not finished"
            end_s, cut_s = self.finished_s, self.finished_s if self.first_token_s is None else self.first_token_s
            before, after = self._halves = [0.0] * len(PHASES), [0.0] * len(PHASES)
            for order, _, began_s, at_s in self._walk(end_s):
                if at_s <= cut_s:
                    before[order] += at_s - began_s
                elif began_s >= cut_s:
                    after[order] += at_s - began_s
                else:
                    before[order] += cut_s - began_s
                    after[order] += at_s - cut_s
        return self._halves

    def pieces(self) -> list[Piece]:
        """The phases one after another: from arrival to the end, without gap or overlap."""
        assert self.finished_s is not None, "the request has not finished"
        self.halves()
        return self.pieces_until(self.finished_s)

    def pieces_until(self, end_s: float) -> list[Piece]:
        """Likewise of one that may still run."""
        pieces: list[Piece] = []
        attempt = 0
        for order, worker, began_s, at_s in self._walk(end_s):
            attempt += order == 0
            pieces.append(Piece(PHASES[order], worker, attempt, began_s, at_s))
        return pieces

    def _walk(self, end_s: float) -> Iterator[tuple[int, str, float, float]]:
        """Each phase's number, its worker, when it began and when it was over: from arrival to the end."""
        order, began_s, worker = self._marks[0]
        for next_order, mark_s, next_worker in [*self._marks[1:], (0, end_s, "")]:
            at_s = end_s if mark_s > end_s else max(mark_s, began_s)
            yield order, worker, began_s, at_s
            order, began_s, worker = next_order, at_s, next_worker
