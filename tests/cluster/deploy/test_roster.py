"""The roster: whose word counts, when all are ready, when a worker is given up, what routers are told."""

from __future__ import annotations

import pytest

from cluster.deploy.roster import MAX_LOAD_DEATHS, Roster, roles_of

pytestmark = pytest.mark.unit


def roster() -> Roster:
    return Roster(roles_of([("prefill-0", "prefill"), ("decode-0", "decode")], num_routers=1))


def tell(roster: Roster, name: str, stage: str, *, life: str = "a", address: str = "", reason: str = "") -> bool:
    event = {"name": name, "incarnation": life, "stage": stage, "fraction": 0.0, "address": address}
    return roster.on_event(event | {"pid": 7, "host": "h", "reason": reason})


def make_ready(roster: Roster, name: str, *, life: str = "a", address: str = "h:1") -> bool:
    tell(roster, name, "started", life=life)
    return tell(roster, name, "ready", life=life, address=address)


def test_all_are_ready_when_each_has_said_so() -> None:
    cluster = roster()
    for name in ("router-0", "prefill-0"):
        make_ready(cluster, name)
        assert not cluster.snapshot()["is_ready"]
    make_ready(cluster, "decode-0")
    assert cluster.snapshot()["is_ready"]


def test_routers_are_told_of_workers_that_are_ready_only() -> None:
    cluster = roster()
    assert make_ready(cluster, "router-0")
    assert not tell(cluster, "prefill-0", "started")
    assert not tell(cluster, "prefill-0", "weights")
    assert cluster.workers() == []
    assert tell(cluster, "prefill-0", "ready", address="h:2")
    assert cluster.workers() == [("prefill-0", "prefill", "h:2", "a")]


def test_a_lost_worker_stays_known_until_the_next_one_is_ready() -> None:
    cluster = roster()
    make_ready(cluster, "decode-0", address="h:3")
    cluster.on_lost("decode-0", "a", "killed")
    tell(cluster, "decode-0", "started", life="b")
    assert cluster.workers() == [("decode-0", "decode", "h:3", "a")]
    tell(cluster, "decode-0", "ready", life="b", address="h:4")
    assert cluster.workers() == [("decode-0", "decode", "h:4", "b")]


def test_an_earlier_life_is_not_listened_to() -> None:
    cluster = roster()
    make_ready(cluster, "decode-0", life="a", address="h:3")
    make_ready(cluster, "decode-0", life="b", address="h:4")
    assert not tell(cluster, "decode-0", "ready", life="a", address="h:3")
    cluster.on_lost("decode-0", "a", "killed")
    assert cluster.member("decode-0").stage == "ready"
    assert cluster.workers() == [("decode-0", "decode", "h:4", "b")]


def test_one_that_says_why_it_failed_is_quoted() -> None:
    cluster = roster()
    tell(cluster, "prefill-0", "started")
    tell(cluster, "prefill-0", "failed", reason="the model is odd")
    assert cluster.snapshot()["failed"] == ["prefill-0: the model is odd"]


def test_one_that_dies_while_loading_is_given_up_after_some_times() -> None:
    cluster = roster()
    for death in range(1, MAX_LOAD_DEATHS + 1):
        assert cluster.snapshot()["failed"] == []
        tell(cluster, "decode-0", "started", life=str(death))
        tell(cluster, "decode-0", "weights", life=str(death))
        cluster.on_lost("decode-0", str(death), "SIGSEGV")
    assert cluster.snapshot()["failed"] == [f"decode-0: it died {MAX_LOAD_DEATHS} times while loading: SIGSEGV"]


def test_deaths_that_nobody_saw_count_too() -> None:
    cluster = roster()
    for life in range(MAX_LOAD_DEATHS + 1):
        tell(cluster, "decode-0", "started", life=str(life))
    assert len(cluster.snapshot()["failed"]) == 1


def test_one_that_was_ready_may_be_lost_as_often_as_it_likes() -> None:
    cluster = roster()
    for life in range(3 * MAX_LOAD_DEATHS):
        make_ready(cluster, "decode-0", life=str(life))
        cluster.on_lost("decode-0", str(life), "killed")
    assert cluster.snapshot()["failed"] == []


def test_every_change_is_a_new_version() -> None:
    cluster = roster()
    seen = [cluster.version]
    for act in (
        lambda: tell(cluster, "decode-0", "started"),
        lambda: tell(cluster, "decode-0", "ready", address="h:1"),
        lambda: cluster.on_lost("decode-0", "a", "killed"),
        lambda: cluster.on_failed("decode-0", "gone"),
    ):
        act()
        seen.append(cluster.version)
    assert seen == sorted(set(seen))


def test_strangers_are_ignored() -> None:
    cluster = roster()
    assert not make_ready(cluster, "decode-9")
    assert "decode-9" not in cluster.worker_names()
