"""LiveMoves: what a worker says of a move counts for that move alone."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest

from cluster.router.live.moves import LiveMoves
from cluster.router.live.prompt_hashes import PromptHashes
from cluster.router.live.requests import LiveRequest
from cluster.router.live.timeline import Timeline
from kvrelay.v1 import generate_pb2
from kvrelay.v1 import worker_pb2 as pb

pytestmark = pytest.mark.unit


def moving(number: int) -> LiveRequest:
    """From decode-0 to decode-1, by the move of this number."""
    live = LiveRequest(
        id="r",
        call_id="c",
        choice=0,
        prompt_ids=[1],
        sampling=generate_pb2.SamplingParams(max_tokens=4),
        hashes=PromptHashes([1], ""),
        timeline=Timeline(0.0),
    )
    live.decode, live.moving_to, live.is_handed_off, live.last_move = "decode-0", "decode-1", True, number
    return live


def failed(number: int) -> pb.RequestEvent:
    return pb.RequestEvent(request_id="r", kind=pb.EVENT_KIND_MOVE_FAILED, peer="decode-1", move=number, reason="no")


@pytest.mark.parametrize(("told", "is_over"), [(1, False), (2, True)])
def test_a_failure_ends_no_later_move_to_the_same_worker(told: int, is_over: bool) -> None:
    policy, links, live = MagicMock(), MagicMock(), moving(2)
    moves = LiveMoves(policy, links, MagicMock(), {"r": live}.get, lambda: 1.0)
    moves.on_failed(live, "decode-0", failed(told), "peer")
    assert (live.moving_to == "") is is_over
    assert policy.on_move_failed.called is is_over
    links.cancel.assert_called_once_with("decode-1", "r", "it has not moved", told)
