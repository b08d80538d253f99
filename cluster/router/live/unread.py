"""Unread counts the bytes of tokens that clients have not read yet, and says whose request must end for them.

    put -> the submission that has too much, or of all that have too much together the one with most: it ends
    take -> release, when they are written

It ends no request and knows no client.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.router.live.requests import ChoiceUpdate, Submission

TOKEN_BYTES = 256  # that a token takes while it waits, measured
LOGPROB_BYTES = 160  # and each log-probability that comes with it


@dataclass(slots=True)
class _Unread:
    token_bytes: int
    num_bytes: int = 0


class Unread:
    def __init__(self, max_bytes: int, max_total_bytes: int) -> None:
        self.total_bytes = 0
        self.max_bytes = max_bytes
        self.max_total_bytes = max_total_bytes
        self._of: dict[Submission, _Unread] = {}

    def put(self, submission: Submission, num_tokens: int) -> tuple[Submission, str] | None:
        """More tokens wait. Returns whose request ends for it, and why."""
        unread = self._of.get(submission)
        if unread is None:
            unread = self._of[submission] = _Unread(token_bytes(submission))
        num_bytes = num_tokens * unread.token_bytes
        unread.num_bytes += num_bytes
        self.total_bytes += num_bytes
        if unread.num_bytes > self.max_bytes:
            return submission, f"{unread.num_bytes} bytes of its tokens were not read, of {self.max_bytes}"
        if self.total_bytes > self.max_total_bytes:
            most = max(self._of, key=lambda each: self._of[each].num_bytes)
            all_of = f"{self.total_bytes} bytes of all requests' tokens were not read, of {self.max_total_bytes}"
            return most, f"{all_of}; most of them, {self._of[most].num_bytes}, were its own"
        return None

    def release(self, submission: Submission, updates: Sequence[ChoiceUpdate]) -> None:
        """These were read."""
        if (unread := self._of.get(submission)) is not None:
            num_bytes = sum([len(update.ids) for update in updates]) * unread.token_bytes
            unread.num_bytes -= num_bytes
            self.total_bytes -= num_bytes

    def forget(self, submission: Submission) -> None:
        """Nobody will read the rest."""
        if (unread := self._of.pop(submission, None)) is not None:
            self.total_bytes -= unread.num_bytes


def token_bytes(submission: Submission) -> int:
    sampling = submission.choices[0].sampling
    logprobs = 1 + sampling.logprobs if sampling.HasField("logprobs") else 0
    return TOKEN_BYTES + LOGPROB_BYTES * logprobs
