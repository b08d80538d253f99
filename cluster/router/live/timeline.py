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

PHASES = ("route", "prefill_queue", "prefill", "handoff", "decode_queue", "decode")
_ORDER = {name: i for i, name in enumerate(PHASES)}


class Timeline:
    __slots__ = ("_attempt_begins", "_marks", "_phases", "arrived_s", "finished_s", "first_token_s")

    def __init__(self, arrived_s: float) -> None:
        self.arrived_s = arrived_s
        self.first_token_s: float | None = None
        self.finished_s: float | None = None
        self._marks: list[tuple[int, float]] = [(0, arrived_s)]  # (phase, when it began)
        self._attempt_begins = 0  # index of this attempt's route mark
        self._phases: dict[str, float] = {}  # once they were asked for

    def enter(self, phase: str, at_s: float) -> None:
        """The phase began at `at_s`. `route` begins a new attempt; in one attempt a phase's first mark holds."""
        order = _ORDER[phase]
        if order == 0:
            self._attempt_begins = len(self._marks)
            self._marks.append((0, at_s))
            return
        at = len(self._marks)
        while at > self._attempt_begins and self._marks[at - 1][0] >= order:
            if self._marks[at - 1][0] == order:
                return
            at -= 1
        self._marks.insert(at, (order, at_s))

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
        """Seconds in each phase that was entered, in the order of the request's life. Not to be changed; what is
        entered after they were asked for changes nothing."""
        if not self._phases:
            self._phases = self._summed()
        return self._phases

    def _summed(self) -> dict[str, float]:
        assert self.finished_s is not None, "the request has not finished"
        seconds: dict[str, float] = {}
        began, current = self.arrived_s, 0
        for phase, mark_s in [*self._marks[1:], (0, self.finished_s)]:
            at_s = min(max(mark_s, began), self.finished_s)
            seconds[PHASES[current]] = seconds.get(PHASES[current], 0.0) + (at_s - began)
            began, current = at_s, phase
        return {name: seconds[name] for name in PHASES if name in seconds}
