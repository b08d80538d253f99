"""The replanner beside a cluster: what it waits for, what it has changed, what it gives up, and what it writes down."""

from __future__ import annotations

import errno
import math
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.router.options import RouterOptions
from engine.knobs import as_text
from kvrelay.cli.cluster.replan import lines_of
from kvrelay.client.types import ClusterStatus, EndedRequest, KvrelayError, PendingWorker, RouterLoad, WorkerState
from kvrelay.replan import carrying, watching
from kvrelay.replan.journal import Entry, Journal, journal_at, journal_of, last_journal_at
from kvrelay.replan.options import Asked
from kvrelay.replan.replanner import NotYet, Replanner, begin
from kvrelay.replan.watching import ReplanThread
from placement.plan import Slo
from placement.replan.arrangements import Arrangement, Scale
from worker.roles import kind_of

pytestmark = pytest.mark.unit

READS = {"fixed_s": 0.004, "prompt_token_s": 0.0005, "request_s": 0.0, "context_token_s": 0.0, "both_s": 0.0}
ACTS = Asked(slo=Slo(ttft_s=1.0), acts=True)
WRITES = READS | {"prompt_token_s": 0.0, "request_s": 0.0005, "context_token_s": 1e-7}


def state(name: str, role: str, costs: dict[str, float]) -> WorkerState:
    return WorkerState(
        name=name,
        role=role,
        address="h:1",
        state="ready",
        num_waiting=0,
        num_running=0,
        waiting_tokens=0,
        cached_pages=0,
        leased_pages=0,
        available_pages=2000,
        total_pages=2000,
        report_age_s=0.1,
        losses=0,
        reason="",
        page_size=16,
        limits=as_text(kind_of(role).load_options()()),
        step_costs=costs,
    )


def ended(index: int, *, prompt: int, output: int, rate: float, ttft_s: float) -> EndedRequest:
    return EndedRequest(
        age_s=100.0 - index / rate,
        prompt_tokens=prompt,
        cached_tokens=0,
        output_tokens=output,
        ttft_s=ttft_s,
        tpot_s=0.01,
        handoff_s=0.001,
        failed=False,
    )


class FakeCluster:
    """One reader of prompts and two writers, with prompts for two readers."""

    def __init__(self, ttft_s: float = 3.0, endpoint: str = "h:1", cluster_id: str = "chat-0123abcd") -> None:
        self.endpoint, self.cluster_id = endpoint, cluster_id
        self.workers = [state("prefill-0", "prefill", READS)]
        self.workers += [state(f"decode-{i}", "decode", WRITES) for i in range(2)]
        self.requests = [ended(i, prompt=800, output=10, rate=3.5, ttft_s=ttft_s) for i in range(300)]
        self.whole_s = math.inf
        self.asked: list[Any] = []
        self.refusal = ""
        self.obeys = True
        self.pending: list[PendingWorker] = []
        self.told: list[tuple[str, str, str, bool]] = []

    def note_decision(self, by: str, what: str, reason: str, *, acted: bool) -> None:
        self.told.append((by, what, reason, acted))

    def status(self) -> ClusterStatus:
        limits = as_text(RouterOptions())
        return ClusterStatus(
            router_id="router-0",
            model="m",
            uptime_s=1.0,
            num_queued=0,
            num_in_flight=0,
            workers=tuple(self.workers),
            limits=limits,
            cluster_id=self.cluster_id,
        )

    def load(self, window_s: float) -> RouterLoad:
        return RouterLoad(requests=tuple(self.requests), whole_s=min(window_s, self.whole_s))

    def set_role(self, name: str, role: str, chunk_tokens: int | None, *, force: bool = False) -> None:
        self.asked.append((name, role) if chunk_tokens is None else (name, role, chunk_tokens))
        if self.refusal:
            raise KvrelayError("FAILED_PRECONDITION", self.refusal)
        if self.obeys:
            limits = as_text(kind_of(role).load_options()())
            if chunk_tokens is not None:
                limits["chunk_tokens"] = str(chunk_tokens)
            self.workers = [replace(w, role=role, limits=limits) if w.name == name else w for w in self.workers]

    def scale(self, pool: str, replicas: int = 0, *, look: bool = False) -> list[PendingWorker]:
        if look:
            return self.pending
        self.asked.append((pool, replicas))
        names = [worker.name for worker in self.workers if worker.name.startswith(f"{pool}-")]
        if self.obeys:
            self.workers = [worker for worker in self.workers if worker.name not in names[replicas:]]
            self.workers += [state(f"{pool}-{i}", pool, READS) for i in range(len(names), replicas)]
        else:
            self.pending = [PendingWorker(name=f"{pool}-1", stage="waiting", reason="wants GPU 1 of Ray")]
        return self.pending

    def drain(self, name: str, *, undo: bool = False, remove: bool = False, force: bool = False) -> None:
        self.asked.append((name, "remove" if remove else "undo" if undo else "drain"))
        self.pending = []


def made(
    cluster: FakeCluster, folder: Path, *, acts: bool = True, most_changes: int = 1, **more: Any
) -> tuple[Replanner, Journal]:
    clients: Any = [cluster]
    journal = Journal(folder / "kvrelay" / "decisions" / "here.jsonl")
    asked = Asked(slo=Slo(ttft_s=1.0, tpot_s=0.05), acts=acts, most_changes=most_changes, window_s=300.0, **more)
    return Replanner(clients, asked, journal), journal


def test_a_worker_changes_where_it_is_worth_it_and_all_is_written_down(tmp_path: Path) -> None:
    cluster = FakeCluster()
    replanner, journal = made(cluster, tmp_path)
    entry = replanner.look()
    assert [(change.worker, change.failure) for change in entry.changes] == [("decode-1", "")], entry.reason
    assert cluster.asked[0][:2] == ("decode-1", entry.changes[0].role)
    (kept,) = journal.last(5)
    assert (kept["mode"], kept["measured"], kept["requests"]) == ("act", 0.0, 300)
    assert "0% of the requests met their targets" in kept["reason"]
    assert len(kept["tried"]) > 2
    [(by, what, reason, acted)] = cluster.told
    assert (by, reason, acted) == ("planner", entry.reason, True)
    assert what.startswith(f"decode-1 becomes a {entry.changes[0].role} worker")


def test_what_several_routers_tell_counts_for_as_long_as_all_of_them_know(tmp_path: Path) -> None:
    clusters = [FakeCluster(), FakeCluster()]
    clusters[1].whole_s = 30.0
    journal = Journal(tmp_path / "kvrelay" / "decisions" / "here.jsonl")
    clients: Any = clusters
    asked = Asked(slo=Slo(ttft_s=1.0, tpot_s=0.05), acts=False, window_s=300.0)
    replanner = Replanner(clients, asked, journal)
    seen = replanner._see()
    assert seen.cluster(Arrangement(roles=seen.roles)).num_routers == 2, "as many share what is played"
    entry = replanner.look()
    each = sum(request.age_s <= 30.0 for request in clusters[0].requests)
    assert entry.requests == 2 * each
    assert entry.rate == pytest.approx(2 * 3.5, rel=0.05)


def test_pools_grow_and_shrink_within_the_devices_that_they_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = FakeCluster()
    cluster.workers.pop()
    replanner, _ = made(cluster, tmp_path, most_devices=4, most_changes=0)
    scaled, came = replanner.look().changes
    assert (scaled.pool, scaled.replicas, scaled.failure) == ("prefill", 2, "")
    assert (came.worker, came.role, came.failure) == ("prefill-1", "prefill", "")
    cluster = FakeCluster(ttft_s=0.1)
    cluster.requests = [ended(i, prompt=40, output=10, rate=0.4, ttft_s=0.1) for i in range(300)]
    assert made(cluster, tmp_path)[0].look().changes == [], "nobody said that workers may go"
    replanner, _ = made(cluster, tmp_path, most_devices=4)
    first = replanner.look()
    assert (first.changes, "for 0 s so far" in first.reason) == ([], True)
    replanner._spare_since_s = -math.inf
    replanner._spare_looked_s = -math.inf
    (change,) = replanner.look().changes
    assert (change.pool, change.replicas, len(cluster.workers)) == ("decode", 1, 2)
    names = [each.name for each in cluster.workers]
    replanner._carrier.carry_out((), [])
    assert replanner._carrier.undo_at(names) == Scale(pool="decode", replicas=2), "also when all is well for a while"
    assert replanner._carrier.undo_at([*names, "decode-8"]) is None, "an operator has changed it since"
    assert not replanner._bounds(time.monotonic()).may_shrink, "it is not looked for at each look"


def test_a_growth_for_which_there_is_no_place_is_taken_back_by_name_and_left_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carrying, "CHANGE_TIMEOUT_S", 0.0)
    cluster = FakeCluster()
    cluster.workers.pop()
    cluster.obeys = False
    replanner, _ = made(cluster, tmp_path, most_devices=3, most_changes=0)
    scaled, came = replanner.look().changes
    assert scaled.failure == "given up: prefill-1 waiting (wants GPU 1 of Ray)"
    assert came.failure == "not begun"
    assert cluster.asked == [("prefill", 2), ("prefill-1", "remove")]
    replanner._carrier.changed_s = -math.inf
    assert replanner.look().changes == [], "the same would be in vain again"
    cluster.pending = [PendingWorker(name="prefill-1", stage="weights", reason="")]
    with pytest.raises(NotYet, match="prefill-1 is weights"):
        replanner.look()


def test_as_distserve_does_it_searches_again_when_what_comes_has_shifted(tmp_path: Path) -> None:
    cluster = FakeCluster()
    replanner, _ = made(cluster, tmp_path, policy="distserve")
    cluster.requests = [ended(i, prompt=800, output=10, rate=3.5, ttft_s=0.1) for i in range(300)]
    assert [change.worker for change in replanner.look().changes] == ["decode-1"], "though all meet their targets"
    for reason in ("best for what comes now", "has not shifted"):
        replanner._carrier.changed_s = -math.inf
        entry = replanner.look()
        assert (entry.changes, reason in entry.reason) == ([], True), "it goes on until it finds nothing better"
    cluster.requests = [ended(i, prompt=800, output=40, rate=3.5, ttft_s=0.1) for i in range(300)]
    assert "best for what comes now" in replanner.look().reason


def test_advice_changes_nothing(tmp_path: Path) -> None:
    cluster = FakeCluster()
    entry = made(cluster, tmp_path, acts=False)[0].look()
    assert (entry.mode, [change.worker for change in entry.changes], cluster.asked) == ("advise", ["decode-1"], [])


def test_where_targets_are_met_nothing_else_is_played(tmp_path: Path) -> None:
    entry = made(FakeCluster(ttft_s=0.1), tmp_path)[0].look()
    assert (entry.changes, len(entry.tried), entry.reason.endswith("enough")) == ([], 1, True)


def test_each_is_judged_by_the_targets_that_it_asked_for(tmp_path: Path) -> None:
    cluster = FakeCluster(ttft_s=0.1)
    cluster.requests = [replace(each, slo_ttft_s=0.05) if i % 2 else each for i, each in enumerate(cluster.requests)]
    assert made(cluster, tmp_path, acts=False)[0].look().measured == 0.5
    cluster.requests = [replace(each, ttft_s=3.0, slo_ttft_s=5.0) for each in cluster.requests]
    assert made(cluster, tmp_path, acts=False)[0].look().measured == 1.0


def test_too_little_is_said_so(tmp_path: Path) -> None:
    cluster = FakeCluster()
    replanner, journal = made(cluster, tmp_path)
    cluster.requests = cluster.requests[:10]
    with pytest.raises(NotYet, match="10 requests have come and gone in 300 s; 60 must"):
        replanner.look()
    cluster = FakeCluster()
    cluster.workers = [replace(worker, step_costs={}) for worker in cluster.workers]
    with pytest.raises(NotYet, match="no worker's steps of prefill were measured yet"):
        made(cluster, tmp_path)[0].look()
    assert journal.last(1) == []


def test_after_a_change_it_waits_for_what_came_since(tmp_path: Path) -> None:
    cluster = FakeCluster()
    replanner, _ = made(cluster, tmp_path)
    replanner.look()
    with pytest.raises(NotYet, match="0 requests have come and gone since the last change"):
        replanner.look()


def test_what_is_refused_or_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster()
    cluster.refusal = "decode-1 is the only worker for decode that takes requests"
    entry = made(cluster, tmp_path)[0].look()
    assert [change.failure for change in entry.changes] == [cluster.refusal]
    cluster = FakeCluster()
    cluster.workers[2] = replace(cluster.workers[2], state="lost")
    with pytest.raises(NotYet, match="decode-1 is lost"):
        made(cluster, tmp_path)[0].look()
    monkeypatch.setattr(carrying, "CHANGE_TIMEOUT_S", 0.0)
    cluster = FakeCluster()
    cluster.obeys = False
    entry = made(cluster, tmp_path)[0].look()
    assert "stays as it is" in entry.changes[0].failure
    assert cluster.asked[-1] == ("decode-1", "undo")


def test_a_worker_that_is_lost_while_it_changes_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes back as the spec has it, and would be waited for in vain."""
    cluster = FakeCluster()
    cluster.obeys = False

    def set_role(name: str, *_: object, **__: object) -> None:
        cluster.workers = [replace(w, losses=w.losses + (w.name == name)) for w in cluster.workers]

    monkeypatch.setattr(cluster, "set_role", set_role)
    (change,) = made(cluster, tmp_path)[0].look().changes
    assert change.failure == "decode-1 was lost meanwhile; it comes back as the spec has it"
    assert cluster.asked == [("decode-1", "undo")]


def watched(cluster: FakeCluster, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    monkeypatch.setattr(watching, "Client", lambda endpoint: nullcontext(cluster))
    monkeypatch.setattr(watching, "EVERY_S", 0.01)
    monkeypatch.setattr("os.nice", lambda by: by)


def test_a_thread_looks_on_whatever_a_look_comes_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster, looks = FakeCluster(), threading.Event()
    troubles = iter([KvrelayError("UNAVAILABLE", "it is away"), ZeroDivisionError()])
    cluster_of = cluster.status

    def status() -> ClusterStatus:
        if error := next(troubles, None):
            raise error
        return cluster_of()

    monkeypatch.setattr(cluster, "status", status)
    watched(cluster, tmp_path, monkeypatch)
    thread = ReplanThread(["h:1"], ACTS, lambda entry: looks.set())
    thread.start()
    assert looks.wait(30)
    thread.stop()
    assert {asked[:2] for asked in cluster.asked} & {("decode-1", "prefill"), ("decode-1", "mixed")}
    assert "roles stay as they are" in caplog.text


def test_what_is_refused_for_good_is_told_once_and_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster, asked = FakeCluster(), threading.Semaphore(0)
    why = "the token of 'chat' may not change workers; show one named `operator`, or one without a name"

    def load(window_s: float) -> RouterLoad:
        asked.release()
        raise KvrelayError("PERMISSION_DENIED", why)

    monkeypatch.setattr(cluster, "load", load)
    watched(cluster, tmp_path, monkeypatch)
    thread = ReplanThread(["h:1"], ACTS, lambda entry: None)
    thread.start()
    assert all(asked.acquire(timeout=30) for _ in range(3))
    thread.stop()
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [
        f"replan is act, and nothing can be looked at: {why}"
    ]
    (entry,) = last_journal_at("h:1").last(5)
    assert list(lines_of(entry)) == [f"{entry['at']}  nothing can be looked at: {why}"]


def test_one_process_has_the_workers_change(tmp_path: Path) -> None:
    path = tmp_path / "kvrelay" / "decisions" / "x.jsonl"
    first = Journal(path)
    assert first.hold()
    assert not Journal(path).hold(), "as in another process: a lock belongs to the opened file"
    del first
    assert Journal(path).hold()


def test_where_no_lock_or_journal_can_be_had_it_is_said_in_a_sentence(tmp_path: Path) -> None:
    (folder := tmp_path / "decisions").touch()
    journal = Journal(folder / "x.jsonl")
    for ask, what in ((journal.hold, f"{folder}/x.lock, by which"), (lambda: journal.last(1), f"{folder}/x.jsonl")):
        with pytest.raises(KvrelayError, match=f"^FAILED_PRECONDITION: .*{what}.* give another XDG_STATE_HOME$"):
            ask()


def test_a_cluster_has_one_journal_and_one_lock_whichever_router_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    first, second = (FakeCluster(endpoint=f"127.0.0.1:5005{i}") for i in (1, 2))
    clients: Any = [first]
    others: Any = [second]
    journal = journal_at(clients)
    assert journal.hold()
    assert not journal_at(others).hold(), "they would undo each other's changes"
    Replanner(clients, Asked(slo=Slo(ttft_s=1.0), acts=False, window_s=300.0), journal).look()
    for endpoint in (first.endpoint, second.endpoint, "localhost:50052"):
        assert len(last_journal_at(endpoint).last(5)) == 1, "also when no router is there any more"
    first.cluster_id = "chat-4567cdef"
    assert journal_at(clients).last(5) == [], "another cluster on the same port begins its own"
    assert last_journal_at(first.endpoint).last(5) == []
    assert len(journal.last(5)) == 1
    assert journal_of(replace(first.status(), cluster_id="../../.ssh/x"), "")._path.parent == journal._path.parent


def test_a_journal_that_cannot_be_written_keeps_nobody_from_deciding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = FakeCluster()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    clients: Any = [cluster]
    replanner = begin(clients, ACTS)
    assert replanner is not None

    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("kvrelay.replan.journal.write_private", fill)
    monkeypatch.setattr(Path, "open", fill)
    assert begin(clients, replace(ACTS, acts=False)) is not None
    assert replanner.look().changes
    assert len(cluster.told) == 1
    told = [record.getMessage() for record in caplog.records]
    assert all(each.endswith(".jsonl cannot be written: No space left on device") for each in told), told
    assert len(told) == 2, "where it is, and what was decided"


def test_a_torn_line_of_the_journal_is_passed_over(tmp_path: Path) -> None:
    replanner, journal = made(FakeCluster(), tmp_path)
    replanner.look()
    with journal._path.open("a") as file:
        file.write('{"at": "2026-')
    assert [entry["mode"] for entry in journal.last(5)] == ["act"]
    for reason in ("the next", "the last"):
        journal.add(Entry(reason=reason, mode="act"))
    assert [entry["reason"] for entry in journal.last(2)] == ["the next", "the last"]
