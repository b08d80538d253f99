"""DraftPasses is engine/drafting.py and engine/heads.py on the virtual clock: what guesses before a step, and how long
that takes. It makes guesses and does not say which of them are right.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.types import MOST_READ, PASS_SEEN, Draft
from placement.latency.base import LatencyModel, decode_s
from placement.latency.speculation import Speculation

GUESS = 1  # the token that is always guessed


class DraftPasses:
    """`pass_s`: what a pass that guesses one more of all takes of late."""

    def __init__(self, latency: LatencyModel, speculation: Speculation) -> None:
        self.pass_s = 0.0
        self._latency = latency
        self._speculation = speculation

    def guess(self, asked: Sequence[tuple[Draft, int, bool]]) -> float:
        """`asked`: with each the request's tokens, and whether it has been in a step here. Returns seconds."""
        if not self._speculation.reads:
            return self._more(self._by_heads(asked), 0)
        going, first_s = self._read(asked)
        return first_s + self._more(going, 1)

    def _more(self, going: list[Draft], number: int) -> float:
        """Guesses behind the first `number` of those that have so many."""
        spent_s = 0.0
        while True:
            going = [draft for draft in going if len(draft.guesses) == number < draft.num_wanted]
            if not going:
                return spent_s
            spent_s += self._pass(going)
            number += 1

    def _read(self, asked: Sequence[tuple[Draft, int, bool]]) -> tuple[list[Draft], float]:
        """The first pass: what was not read of each request, the prompt at first, and a guess of those of whom that is
        all. Returns these. What was decoded meanwhile is read as rows, for it is no more than a few."""
        going: list[Draft] = []
        chunks: list[tuple[int, int]] = []
        rows = context_tokens = 0
        left = MOST_READ
        for draft, length, _ in asked:
            begin = min(draft.num_read, length - 1)
            end = min(length, begin + left + 1)
            draft.length, draft.guesses, draft.num_read = length, [], end
            left -= end - begin - (end == length)
            if end == length:
                draft.guesses = [GUESS]
                going.append(draft)
            if end - begin > self._speculation.num_tokens:
                chunks.append((end - begin, begin))
            elif end > begin:
                rows += end - begin
                context_tokens += end
        stage_s = decode_s(self._latency, rows, context_tokens) if rows else 0.0
        if chunks:
            stage_s = self._latency.mixed_s(chunks, rows, context_tokens)
        taken_s = stage_s * self._latency.stages
        if rows == len(asked):
            self._note(taken_s)
        return going, taken_s

    def _by_heads(self, asked: Sequence[tuple[Draft, int, bool]]) -> list[Draft]:
        """They guess of what the step before left, so of none that has just come."""
        going: list[Draft] = []
        for draft, length, has_run in asked:
            draft.guesses, draft.num_read, draft.length = [], 0, length
            if has_run:
                going.append(draft)
        return going

    def _pass(self, going: Sequence[Draft]) -> float:
        """One guess more of each."""
        context_tokens = 0
        for draft in going:
            draft.num_read = draft.length + len(draft.guesses)
            context_tokens += draft.num_read
            draft.guesses.append(GUESS)
        context_tokens = context_tokens if self._speculation.reads else 0
        taken_s = decode_s(self._latency, len(going), context_tokens) * self._latency.stages
        self._note(taken_s)
        return taken_s

    def _note(self, taken_s: float) -> None:
        self.pass_s += (taken_s - self.pass_s) * (PASS_SEEN if self.pass_s else 1.0)
