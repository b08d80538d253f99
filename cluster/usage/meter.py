"""Meter says what one call used, as it is delivered and when it ends. It counts nothing itself: it calls `count`.

Tokens count when they are handed to the transport. The prompt counts once, whatever `n` is, with the first of them, or
at the end if a worker had begun to read it. What a cache had of it counts at the end: another choice's first token may
come before that is known. So does what workers did, of all choices and attempts.
"""

from __future__ import annotations

from collections.abc import Callable

from cluster.router.live.requests import Submission
from cluster.router.live.timeline import PHASES
from cluster.usage.layout import Counts

Count = Callable[[str, Counts], None]
ONE = Counts(generated_tokens=1)
WORK = [PHASES.index(name) for name in ("prefill", "handoff", "decode")]  # of workers


class Meter:
    def __init__(self, submission: Submission, count: Count) -> None:
        self._submission = submission
        self._key = submission.choices[0].owner
        self._count = count
        self._has_prompt = False

    def deliver(self, num_tokens: int) -> None:
        """So many are about to be handed over."""
        if num_tokens:
            used = ONE if num_tokens == 1 else Counts(generated_tokens=num_tokens)
            self._count(self._key, used if self._has_prompt else self._with_prompt(used))

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
        self._count(self._key, used if self._has_prompt else self._with_prompt(used))

    def _with_prompt(self, used: Counts) -> Counts:
        """It goes with the first that is counted."""
        self._has_prompt = True
        return used._replace(requests=1, prompt_tokens=len(self._submission.choices[0].prompt_ids))
