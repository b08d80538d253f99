"""Meter says what one call used, as it is delivered and when it ends. It counts nothing itself: it has it counted.

Tokens count when they are handed to the transport. The prompt counts once, whatever `n` is, with the first of them, or
at the end if a worker had begun to read it. What a cache had of it counts at the end: another choice's first token may
come before that is known. So does what workers did, of all choices and attempts.
"""

from __future__ import annotations

from typing import Protocol

from cluster.router.live.requests import Submission
from cluster.router.live.timeline import PHASES
from cluster.usage.layout import Counts

WORK = [PHASES.index(name) for name in ("prefill", "handoff", "decode")]  # of workers


class Counting(Protocol):
    def count(self, key: str, added: Counts, /) -> None: ...

    def count_tokens(self, key: str, added: int, /) -> None:
        """Generated ones, and nothing else."""


class Uncounted:
    """Where nobody wants to know."""

    def count(self, key: str, added: Counts) -> None:
        pass

    def count_tokens(self, key: str, added: int) -> None:
        pass


class Meter:
    def __init__(self, submission: Submission, counting: Counting) -> None:
        self._submission = submission
        self._key = submission.choices[0].owner
        self._counting = counting
        self._has_prompt = False

    def deliver(self, num_tokens: int) -> None:
        """So many are about to be handed over."""
        if not num_tokens:
            return
        if self._has_prompt:
            self._counting.count_tokens(self._key, num_tokens)
        else:
            self._counting.count(self._key, self._with_prompt(Counts(generated_tokens=num_tokens)))

    def end(self) -> None:
        """It is over, however it ended."""
        choices = self._submission.choices
        if not self._has_prompt and not any(live.was_read for live in choices):
            return
        worked = [0, 0, 0]
        for live in choices:
            before, after = live.timeline.halves()
            for i, phase in enumerate(WORK):
                worked[i] += round((before[phase] + after[phase]) * 1e6)
        used = Counts(0, 0, choices[0].cached_tokens, 0, *worked)
        self._counting.count(self._key, used if self._has_prompt else self._with_prompt(used))

    def _with_prompt(self, used: Counts) -> Counts:
        """It goes with the first that is counted."""
        self._has_prompt = True
        return used._replace(requests=1, prompt_tokens=len(self._submission.choices[0].prompt_ids))
