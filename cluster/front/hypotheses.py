"""unfolded makes of what a beam search has found the answers that other requests have one by one: a choice for each
hypothesis, whole."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.router.live.requests import ChoiceUpdate
from kvrelay.v1 import worker_pb2 as pb
from worker.convert import FINISH_REASON_FROM_PROTO


def unfolded(updates: Sequence[ChoiceUpdate]) -> Sequence[ChoiceUpdate]:
    """One for each hypothesis, which its details tell of. What no search brought is as it was."""
    if not updates or not updates[0].details or not updates[0].details[0].hypotheses:
        return updates
    return [_answer(number, each) for number, each in enumerate(updates[0].details[0].hypotheses)]


def _answer(number: int, found: pb.Hypothesis) -> ChoiceUpdate:
    details = pb.TokenOutput(hypotheses=[found])
    return ChoiceUpdate(number, list(found.token_ids), (details,), FINISH_REASON_FROM_PROTO[found.finish_reason])
