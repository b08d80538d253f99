"""A request that names its workers has these two, at once, or is refused; and is tried once."""

from __future__ import annotations

import pytest

from cluster.router.accounts import RequestShape
from cluster.router.decisions import GiveUp, Rejected
from cluster.router.options import RouterOptions
from cluster.router.policy import RouterPolicy
from tests.policies.test_router_policy import CAUSES, assigned, cluster

pytestmark = pytest.mark.unit


def named(id: str, prefill: str, decode: str, prompt_len: int = 32, priority: int = 0) -> RequestShape:
    return RequestShape(id=id, prompt_len=prompt_len, max_tokens=8, pair=(prefill, decode), priority=priority)


def refused(policy: RouterPolicy, shape: RequestShape) -> str:
    decision = policy.assign(shape, 0.0)
    assert isinstance(decision, Rejected), decision
    return decision.reason


def test_it_goes_to_the_pair_that_it_names_however_busy_others_are() -> None:
    policy = cluster("p0", "p1", "d0", "d1")
    for number, pair in enumerate((("p1", "d1"), ("p1", "d1"), ("p0", "d1"))):
        placed = assigned(policy.assign(named(f"r{number}", *pair), 0.0))
        assert (placed.prefill, placed.decode) == pair
    policy.check_invariants()


def test_a_pair_that_failed_is_tried_when_it_is_named() -> None:
    policy = cluster("p0", "d0", "d1", options=RouterOptions(max_attempts=3))
    for number in range(3):
        assigned(policy.assign(named(f"r{number}", "p0", "d0"), 0.0))
        retry = policy.on_failed(f"r{number}", "no route", 0.0, worker="p0", cause="peer", peer="d0")
        assert isinstance(retry, GiveUp)
        assert retry.reason == "no route"
    assert policy.health.pairs("p0")


@pytest.mark.parametrize("cause", CAUSES)
def test_it_is_not_tried_again(cause: str) -> None:
    policy = cluster("p0", "p1", "d0", "d1")
    assigned(policy.assign(named("a", "p0", "d0"), 0.0))
    retry = policy.on_failed("a", "it broke", 0.0, worker="p0", cause=cause, peer="d0")  # type: ignore[arg-type]
    assert isinstance(retry, GiveUp)
    policy.check_invariants()


def test_it_waits_for_nothing() -> None:
    policy = cluster("p0", "d0", "d1", pages=10)
    assigned(policy.assign(named("a", "p0", "d0", prompt_len=140), 0.0))
    assert "d0 takes no new requests, or has no pages" in refused(policy, named("b", "p0", "d0", prompt_len=140))
    assert policy.num_queued == 0
    assert policy.reassign("a", "d0", 0.0) is None  # nor does another take its place


def test_workers_that_are_not_there_are_named() -> None:
    policy = cluster("p0", "d0")
    assert refused(policy, named("a", "p0", "d7")) == "decode_worker is 'd7'; of those that are ready give one of d0"
    assert "prefill_worker is 'd0'" in refused(policy, named("a", "d0", "d0"))
    policy.on_worker_lost("d0", "gone", 0.0)
    assert refused(policy, named("a", "p0", "d0")) == "decode_worker is 'd0'; none is ready"
