"""Which roles the workers should have: arrangements near by, what a change costs, and when it is worth it."""

from __future__ import annotations

import numpy as np
import pytest

from placement.replan.arrangements import (
    Arrangement,
    Move,
    Roles,
    Scale,
    SetRole,
    grown,
    moves,
    nearby,
    num_changes,
    resized,
    shrunk,
)
from placement.replan.policy import Decision, Played, Terms, decide

pytestmark = pytest.mark.unit

TWO_AND_TWO = {"prefill-0": "prefill", "prefill-1": "prefill", "decode-0": "decode", "decode-1": "decode"}
THREE_AND_ONE = TWO_AND_TWO | {"decode-1": "prefill"}


def played(roles: Roles, share: float) -> Played:
    """The same requests: what meets its targets in one arrangement does so in a better one, too."""
    return Played(
        arrangement=Arrangement(roles=roles), devices=len(roles), met=np.random.default_rng(0).random(1000) < share
    )


def decided(present: float, other: float, *, seen_s: float = 600.0, measured: float = 0.5) -> Decision:
    others = [played(THREE_AND_ONE, other)]
    return decide(played(TWO_AND_TWO, present), others, Terms(wanted=0.9, seen_s=seen_s, measured=measured))


def test_arrangements_near_by_compute_both_phases_and_change_the_last_ones() -> None:
    found = [near.roles for near in nearby(TWO_AND_TWO, 1)]
    assert THREE_AND_ONE in found
    assert TWO_AND_TWO | {"prefill-1": "mixed"} in found
    assert len(found) == 4
    for near in nearby(THREE_AND_ONE, 2):
        assert {"decode", "mixed"} & {*near.roles.values()}
    changes = [num_changes(TWO_AND_TWO, near.roles) for near in nearby(TWO_AND_TWO, 3)]
    assert changes == sorted(changes)
    assert 0 not in changes


def test_a_gain_that_is_worth_it_is_taken() -> None:
    decision = decided(0.5, 0.9)
    assert decision.moves == (SetRole(worker="decode-1", role="prefill"),)
    assert "with 3 prefill, 1 decode it would be 9" in decision.reason


@pytest.mark.parametrize(
    ("present", "other", "seen_s", "why"),
    [
        (0.5, 0.52, 600.0, "worth a change"),  # no more than a simulation may be wrong by
        (0.5, 0.4, 600.0, "worth a change"),
        (0.5, 0.9, 3.0, "and after 3 s no share is enough to be worth a change"),
    ],
)
def test_what_is_not_worth_it_is_left(present: float, other: float, seen_s: float, why: str) -> None:
    decision = decided(present, other, seen_s=seen_s)
    assert not decision.moves
    assert why in decision.reason


def test_where_enough_requests_meet_their_targets_all_stay() -> None:
    decision = decide(played(TWO_AND_TWO, 0.95), [], Terms(wanted=0.9, seen_s=600.0, measured=0.95))
    assert (decision.moves, decision.reason.endswith("enough")) == ((), True)
    assert decided(0.95, 1.0, measured=0.5).moves == (), "what was measured may be of another time, or of chance"


def test_a_pool_shrinks_where_fewer_would_do_by_more_than_chance() -> None:
    fewer = [near.roles for near in shrunk(TWO_AND_TWO)]
    assert fewer == [
        {name: role for name, role in TWO_AND_TWO.items() if name != gone} for gone in ("prefill-1", "decode-1")
    ]
    assert not list(shrunk({"prefill-0": "prefill", "decode-0": "decode"})), "each pool keeps a worker"
    assert not list(shrunk({"prefill-0": "prefill", "mixed-0": "mixed"})), "or it could not grow again"
    leaves = (Scale(pool="prefill", replicas=1),)
    for share, measured, spare_s, expected, is_spare in (
        (0.99, 1.0, 601.0, leaves, False),
        (0.99, 1.0, 30.0, (), True),  # not for long
        (0.92, 1.0, 601.0, (), False),  # by chance
        (0.99, 0.91, 601.0, (), False),  # played fairer than it was
    ):
        others = [played(fewer[0], share), played(fewer[1], 0.5)]
        present = played(TWO_AND_TWO, 1.0)
        decision = decide(present, others, Terms(wanted=0.9, seen_s=100.0, measured=measured, spare_s=spare_s))
        assert (decision.moves, decision.is_spare) == (expected, is_spare)
    undo = Scale(pool="prefill", replicas=2)
    missed = decide(played(fewer[0], 0.99), [], Terms(wanted=0.9, seen_s=100.0, measured=0.6, undo=undo))
    assert missed.moves == (undo,)


def test_of_what_would_do_the_fewest_devices_are_taken() -> None:
    more = [near.roles for near in grown(TWO_AND_TWO, dict.fromkeys(TWO_AND_TWO, 2), 12)]
    assert [len(roles) for roles in more] == [5, 6, 5, 6], "two devices each, of which four are left"
    assert more[-1] == {**TWO_AND_TWO, "decode-2": "decode", "decode-3": "decode"}
    present = played(TWO_AND_TWO, 0.5)

    def moves_of(*others: Played, seen_s: float = 600.0) -> tuple[Move, ...]:
        return decide(present, others, Terms(wanted=0.9, seen_s=seen_s, measured=0.5)).moves

    assert moves_of(played(THREE_AND_ONE, 0.95), played(more[-1], 1.0)) == (SetRole(worker="decode-1", role="prefill"),)
    came = (SetRole(worker="decode-2", role="decode"), SetRole(worker="decode-3", role="decode"))
    assert moves_of(played(THREE_AND_ONE, 0.6), played(more[-1], 1.0)) == (Scale(pool="decode", replicas=4), *came)
    assert moves_of(played(more[2], 1.0), played(more[3], 1.0))[0] == Scale(pool="decode", replicas=3)
    near = [played(THREE_AND_ONE, 0.91), played(more[2], 1.0)]
    decision = decide(played(TWO_AND_TWO, 0.89), near, Terms(wanted=0.9, seen_s=600.0, measured=0.5))
    assert decision.moves[0] == Scale(pool="decode", replicas=3), "the other would do, but by no more than chance"
    assert moves_of(played(THREE_AND_ONE, 0.8), played(more[2], 0.82)) == (SetRole(worker="decode-1", role="prefill"),)
    gap = [
        near.roles
        for near in grown(
            {"d-0": "decode", "d-2": "decode", "p-0": "prefill"}, dict.fromkeys(["d-0", "d-2", "p-0"], 1), 4
        )
    ]
    assert [*gap[0]] == ["d-0", "d-2", "p-0", "d-1"], "the first free number, as the controller gives it"
    assert moves_of(played(more[2], 1.0), seen_s=50.0) == (), "it would have gone before they serve"


def test_chunks_are_of_each_size_of_mixed_workers() -> None:
    roles = {"mixed-0": "mixed", "mixed-1": "mixed", "reader-0": "mixed"}
    chunks = {"mixed-0": 64, "mixed-1": 64, "reader-0": 512}
    steps = {"mixed-0": 1024, "mixed-1": 1024, "reader-0": 2048}
    found = [near.chunks for near in resized(Arrangement(roles=roles), chunks, steps)]
    assert found == [{"mixed-0": size, "mixed-1": size} for size in (16, 32, 128, 256)] + [
        {"reader-0": size} for size in (128, 256, 1024, 2048)
    ]
    assert next(resized(Arrangement(roles=roles), {"mixed-0": 0}, steps)).chunks == {"mixed-0": 32}
    wanted = Arrangement(roles=roles | {"reader-0": "prefill"}, chunks={"mixed-0": 32})
    assert moves(roles, wanted) == (
        SetRole(worker="reader-0", role="prefill"),
        SetRole(worker="mixed-0", role="mixed", chunk_tokens=32),
    )
    assert str(wanted) == "1 prefill, 2 mixed (chunks of 32)"


def test_a_phase_has_a_worker_at_every_moment() -> None:
    """The only writer changes after another one has come to write, though its name comes first."""
    roles = {"decode-0": "decode", "prefill-0": "prefill", "prefill-1": "prefill"}
    other = played(roles | {"prefill-1": "mixed", "decode-0": "mixed"}, 0.9)
    decision = decide(played(roles, 0.2), [other], Terms(wanted=0.9, seen_s=600.0, measured=0.2))
    assert decision.moves == (SetRole(worker="prefill-1", role="mixed"), SetRole(worker="decode-0", role="mixed"))


def test_the_only_reader_may_come_to_write_too_while_new_requests_wait() -> None:
    """Not the only writer, whose answers could go nowhere. And both phases are computed before and after."""
    roles = {"prefill-0": "prefill", "decode-0": "decode"}
    assert {str(near) for near in nearby(roles, 2)} == {"1 decode, 1 mixed", "2 mixed"}
    other = played({"prefill-0": "mixed", "decode-0": "mixed"}, 0.9)
    first, then = decide(played(roles, 0.2), [other], Terms(wanted=0.9, seen_s=600.0, measured=0.2)).moves
    assert first == SetRole(worker="prefill-0", role="mixed", force=True)
    assert then == SetRole(worker="decode-0", role="mixed")


def test_what_makes_all_requests_wait_costs_as_much() -> None:
    """Of four workers one that changes is a third of what is left; the only reader is all of what waits."""
    roles = {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode", "decode-2": "decode"}
    terms = Terms(wanted=0.9, seen_s=60.0, measured=0.2)
    for name, is_worth_it in (("decode-2", True), ("prefill-0", False)):
        other = played(roles | {name: "mixed"}, 0.2 + 0.1)
        assert bool(decide(played(roles, 0.2), [other], terms).moves) is is_worth_it, name
