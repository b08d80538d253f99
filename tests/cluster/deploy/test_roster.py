"""The roster: whose word counts, when all are ready, when a worker is given up, what routers are told, and what the
next controller knows of it."""

from __future__ import annotations

import json

import pytest

from cluster.deploy.roster import MAX_LOAD_DEATHS, MAX_LOAD_DELAY_S, Newest, Roster, Version, roles_of

pytestmark = pytest.mark.unit


def roster() -> Roster:
    return Roster(roles_of([("prefill-0", "prefill"), ("decode-0", "decode")], num_routers=1))


def tell(roster: Roster, name: str, stage: str, *, life: str = "a", address: str = "", reason: str = "") -> bool:
    event = {"name": name, "incarnation": life, "stage": stage, "fraction": 0.0, "address": address, "http": ""}
    return roster.on_event(event | {"pid": 7, "host": "h", "reason": reason})


def make_ready(roster: Roster, name: str, *, life: str = "a", address: str = "h:1") -> bool:
    tell(roster, name, "started", life=life)
    return tell(roster, name, "ready", life=life, address=address)


def addresses(roster: Roster) -> list[tuple[str, ...]]:
    return [worker[:4] for worker in roster.workers()]


def test_all_are_ready_when_each_has_said_so() -> None:
    cluster = roster()
    for name in ("router-0", "prefill-0"):
        make_ready(cluster, name)
        assert not cluster.snapshot()["is_ready"]
    make_ready(cluster, "decode-0")
    assert cluster.snapshot()["is_ready"]


def test_routers_are_told_of_workers_that_are_ready_only() -> None:
    cluster = roster()
    make_ready(cluster, "router-0")
    tell(cluster, "prefill-0", "started")
    tell(cluster, "prefill-0", "weights")
    assert cluster.workers() == []
    assert tell(cluster, "prefill-0", "ready", address="h:2")
    assert addresses(cluster) == [("prefill-0", "prefill", "h:2", "a")]


def test_a_lost_worker_stays_known_until_the_next_one_is_ready() -> None:
    cluster = roster()
    make_ready(cluster, "decode-0", address="h:3")
    cluster.on_lost("decode-0", "a", "killed")
    tell(cluster, "decode-0", "started", life="b")
    assert addresses(cluster) == [("decode-0", "decode", "h:3", "a")]
    tell(cluster, "decode-0", "ready", life="b", address="h:4")
    assert addresses(cluster) == [("decode-0", "decode", "h:4", "b")]


def test_an_earlier_life_is_not_listened_to() -> None:
    cluster = roster()
    make_ready(cluster, "decode-0", life="a", address="h:3")
    make_ready(cluster, "decode-0", life="b", address="h:4")
    assert not tell(cluster, "decode-0", "ready", life="a", address="h:3")
    cluster.on_lost("decode-0", "a", "killed")
    assert cluster.member("decode-0").stage == "ready"
    assert addresses(cluster) == [("decode-0", "decode", "h:4", "b")]


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


def all_ready() -> Roster:
    cluster = roster()
    for i, name in enumerate(("router-0", "prefill-0", "decode-0")):
        make_ready(cluster, name, address=f"h:{i}")
    return cluster


def restarted(cluster: Roster) -> Roster:
    """As the next controller has it."""
    return Roster(
        roles_of([("prefill-0", "prefill"), ("decode-0", "decode")], num_routers=1),
        json.loads(json.dumps(cluster.saved)),
    )


def test_a_restarted_controller_tells_routers_of_workers_that_it_cannot_hear() -> None:
    cluster = all_ready()
    known = cluster.workers()
    again = restarted(cluster)
    assert again.workers() == known
    tell(again, "prefill-0", "ready", address="h:1")  # decode-0 says nothing
    assert again.workers() == known
    assert again.member("router-0").served_as == ("h:0", "a")  # a router's port, if it died with the controller


def test_what_a_controller_of_another_version_noted_is_read() -> None:
    cluster = all_ready()
    saved = cluster.saved
    for member in saved["members"]:
        member["mood"] = "good"
        del member["past"]
    again = Roster(roles_of([("prefill-0", "prefill"), ("decode-0", "decode")], num_routers=1), saved)
    assert again.workers() == cluster.workers()


def test_a_worker_that_was_restarted_meanwhile_is_heard() -> None:
    again = restarted(all_ready())
    assert tell(again, "decode-0", "weights", life="b")
    assert addresses(again)[1] == ("decode-0", "decode", "h:2", "a")
    assert tell(again, "decode-0", "ready", life="b", address="h:9")
    assert addresses(again)[1] == ("decode-0", "decode", "h:9", "b")
    assert not tell(again, "decode-0", "ready", life="a", address="h:2")


def test_each_controllers_word_is_newer_than_those_before() -> None:
    cluster = all_ready()
    router = Newest()
    assert router.takes(cluster.version)
    again = restarted(restarted(cluster))
    assert again.version > cluster.version
    assert router.takes(list(again.version))
    assert not router.takes(again.version)
    tell(cluster, "prefill-0", "ended")
    assert not router.takes(cluster.version)
    assert Newest().takes(Version(epoch=1))


def test_an_answer_that_says_nothing_new_is_no_change() -> None:
    cluster = all_ready()
    before = cluster.version
    assert not tell(cluster, "decode-0", "ready", address="h:2")
    assert cluster.version == before


def test_a_killed_process_is_not_believed_any_more() -> None:
    cluster = all_ready()
    cluster.on_killed("decode-0", "it gave no sign of life for 10 s")
    assert not tell(cluster, "decode-0", "ready", address="h:2")
    assert cluster.member("decode-0").stage == "lost"
    assert cluster.member("decode-0").reason == "killed: it gave no sign of life for 10 s (it was ready)"
    assert ("decode-0", "decode", "h:2", "a") in addresses(cluster)


def test_one_that_failed_is_replaced_though_the_controller_died_before_it_did_that() -> None:
    cluster = all_ready()
    failed = {"name": "decode-0", "incarnation": "b", "stage": "failed", "fraction": 0.0, "address": "", "pid": 7}
    failed |= {"http": "", "host": "h", "reason": "no memory"}
    cluster.on_event(failed)
    again = restarted(cluster)
    assert not again.on_event(failed)  # nothing new
    assert again.is_to_be_replaced(failed)
    again.on_killed("decode-0", "it failed: no memory")
    assert not again.is_to_be_replaced(failed)


def test_one_that_failed_before_all_were_ready_is_not_replaced() -> None:
    cluster = roster()
    tell(cluster, "prefill-0", "failed", reason="the model is odd")
    assert not cluster.is_to_be_replaced({"name": "prefill-0", "incarnation": "a"})
    assert not cluster.is_to_be_replaced({"name": "decode-9", "incarnation": "a"})


def test_a_cluster_that_has_served_tries_again_ever_more_slowly() -> None:
    cluster = all_ready()
    cluster.on_lost("decode-0", "a", "killed")
    delays = []
    for life in range(2 * MAX_LOAD_DEATHS):
        tell(cluster, "decode-0", "started", life=str(life))
        delays.append(cluster.load_delay_s("decode-0"))
        if life % 2:
            cluster.on_lost("decode-0", str(life), "SIGSEGV")
        else:
            tell(cluster, "decode-0", "failed", life=str(life), reason="no memory")
            cluster.on_killed("decode-0", "it failed: no memory")
    assert cluster.snapshot()["failed"] == []
    assert delays == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0]
    assert restarted(cluster).load_delay_s("decode-0") <= MAX_LOAD_DELAY_S


def test_one_that_dies_as_soon_as_it_is_ready_is_started_ever_later_until_it_has_served_well() -> None:
    cluster = all_ready()
    delays = []
    for life in "abcde":
        make_ready(cluster, "decode-0", life=life)
        cluster.on_lost("decode-0", life, "SIGSEGV")
        delays.append(cluster.load_delay_s("decode-0"))
    assert delays == [0.0, 1.0, 2.0, 4.0, 8.0]
    make_ready(cluster, "decode-0", life="z")
    assert cluster.load_delay_s("decode-0") == 8.0
    cluster.on_served_well("decode-0")
    assert cluster.load_delay_s("decode-0") == 0.0


def test_routers_are_told_why_a_worker_does_not_come_back() -> None:
    cluster = all_ready()
    cluster.on_lost("decode-0", "a", "killed")
    tell(cluster, "decode-0", "started", life="b")
    tell(cluster, "decode-0", "failed", life="b", reason="no model there")
    cluster.on_killed("decode-0", "it failed: no model there")
    tell(cluster, "decode-0", "started", life="c")
    told = {worker.name: worker.trouble for worker in cluster.workers()}
    assert told["prefill-0"] == ""
    assert told["decode-0"] == (
        "it died 2 times one after another, so that it waits 1 s before it loads; "
        "the last time: it failed: no model there (it was at failed)"
    )
    make_ready(cluster, "decode-0", life="c")
    version = cluster.version
    cluster.on_served_well("decode-0")
    assert cluster.version > version
    assert not any(worker.trouble for worker in cluster.workers())


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
