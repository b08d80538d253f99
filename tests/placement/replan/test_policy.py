"""Which roles the workers should have: arrangements near by, what a change costs, and when it is worth it."""

from __future__ import annotations

import numpy as np
import pytest

from placement.replan.policy import Decision, Played, Roles, candidates, decide, num_changes

pytestmark = pytest.mark.unit

TWO_AND_TWO = {"prefill-0": "prefill", "prefill-1": "prefill", "decode-0": "decode", "decode-1": "decode"}
THREE_AND_ONE = TWO_AND_TWO | {"decode-1": "prefill"}


def played(roles: Roles, share: float) -> Played:
    """The same requests: what meets its targets in one arrangement does so in a better one, too."""
    return Played(roles=roles, met=np.random.default_rng(0).random(1000) < share)


def decided(present: float, other: float, *, seen_s: float = 600.0, measured: float = 0.5) -> Decision:
    others = [played(THREE_AND_ONE, other)]
    return decide(played(TWO_AND_TWO, present), others, wanted=0.9, seen_s=seen_s, change_s=5.0, measured=measured)


def test_arrangements_near_by_compute_both_phases_and_change_the_last_ones() -> None:
    found = candidates(TWO_AND_TWO, 1)
    assert THREE_AND_ONE in found
    assert TWO_AND_TWO | {"prefill-1": "mixed"} in found
    assert len(found) == 4
    for roles in candidates(THREE_AND_ONE, 2):
        assert {"decode", "mixed"} & {*roles.values()}
    changes = [num_changes(TWO_AND_TWO, roles) for roles in candidates(TWO_AND_TWO, 3)]
    assert changes == sorted(changes)
    assert 0 not in changes


def test_a_gain_that_is_worth_it_is_taken() -> None:
    decision = decided(0.5, 0.9)
    assert decision.changes == (("decode-1", "prefill"),)
    assert "with 3 prefill, 1 decode it would be 9" in decision.reason


@pytest.mark.parametrize(
    ("present", "other", "seen_s", "why"),
    [
        (0.5, 0.52, 600.0, "worth a change"),  # no more than a simulation may be wrong by
        (0.5, 0.4, 600.0, "worth a change"),
        (0.5, 0.9, 3.0, "worth a change"),  # seen for no longer than the change would take
    ],
)
def test_what_is_not_worth_it_is_left(present: float, other: float, seen_s: float, why: str) -> None:
    decision = decided(present, other, seen_s=seen_s)
    assert not decision.changes
    assert why in decision.reason


def test_where_enough_requests_meet_their_targets_all_stay() -> None:
    decision = decided(0.95, 1.0, measured=0.95)
    assert (decision.changes, decision.reason.endswith("enough")) == ((), True)
    assert decided(0.95, 1.0, measured=0.5).changes == (), "what was measured may be of another time, or of chance"


def test_a_phase_has_a_worker_at_every_moment() -> None:
    """The only writer changes after another one has come to write, though its name comes first; and it stays where
    there is no such order."""
    roles = {"decode-0": "decode", "prefill-0": "prefill", "prefill-1": "prefill"}
    other = Played(roles=roles | {"prefill-1": "mixed", "decode-0": "mixed"}, met=played(roles, 0.9).met)
    decision = decide(played(roles, 0.2), [other], wanted=0.9, seen_s=600.0, change_s=5.0, measured=0.2)
    assert decision.changes == (("prefill-1", "mixed"), ("decode-0", "mixed"))
    assert candidates({"prefill-0": "prefill", "decode-0": "decode"}, 2) == []
