"""Splitwise's choice of workers: each pool lends to the other while that has too few, and has its workers back then."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.router.accounts import Report, RequestShape, WorkerView
from cluster.router.decisions import Assigned
from cluster.router.options import RouterOptions
from cluster.router.policy import RouterPolicy

pytestmark = pytest.mark.unit

PAGES, PAGE = 1000, 16


def view(name: str, role: str, chunk_tokens: int) -> WorkerView:
    return WorkerView(
        name=name, role=role, total_pages=PAGES, page_size=PAGE, step_tokens=2048, chunk_tokens=chunk_tokens
    )


def router(**options: Any) -> RouterPolicy:
    policy = RouterPolicy(RouterOptions(placement="splitwise", overcommit=0.0, **options))
    for index in range(2):
        policy.on_worker_up(view(f"prompts-{index}", "mixed", 2048), 0.0)
        policy.on_worker_up(view(f"answers-{index}", "mixed", 256), 0.0)
    return policy


class Cluster:
    def __init__(self) -> None:
        self.policy = router()
        self.count = 0

    def ask(self, prompt_len: int, max_tokens: int = 10) -> tuple[str, str]:
        shape = RequestShape(id=f"r{self.count}", prompt_len=prompt_len, max_tokens=max_tokens)
        self.count += 1
        decision = self.policy.assign(shape, 0.0)
        assert isinstance(decision, Assigned)
        assert "by splitwise's rules" in decision.reason
        self.policy.on_submitted(shape.id, self.count)
        return decision.prefill, decision.decode

    def end(self, *numbers: int) -> None:
        for number in numbers:
            self.policy.on_finished(f"r{number}")
        self.policy.check_invariants()


def test_prompts_and_answers_are_at_home_in_their_pools() -> None:
    cluster = Cluster()
    pairs = [cluster.ask(1000) for _ in range(4)]
    assert sorted(pairs) == [("prompts-0", "answers-0")] * 2 + [("prompts-1", "answers-1")] * 2


def test_a_worker_of_the_other_pool_is_lent_while_queues_are_long_and_goes_home() -> None:
    cluster = Cluster()
    for _ in range(4):
        cluster.ask(4000)
    lent, _ = cluster.ask(4000)
    assert lent.startswith("answers"), "both queues would pass 8,192 tokens"
    assert cluster.ask(4000)[0] == lent, "who is lent is asked before another one is"
    other = next(name for name in ("answers-0", "answers-1") if name != lent)
    assert cluster.ask(100)[1] == other, "who is at home writes"
    cluster.end(4, 5)
    cluster.policy.on_report(other, Report(made_s=1.0, available_pages=10, num_running=1), 1.0)
    assert cluster.ask(100)[1] == lent, "its prompts have ended: it is at home, and the other is full"


def test_answers_go_to_a_worker_of_prompts_where_pages_lack() -> None:
    cluster = Cluster()
    for name in ("answers-0", "answers-1"):
        cluster.policy.on_report(name, Report(made_s=1.0, available_pages=10, num_running=1), 1.0)
    _, written = cluster.ask(1000)
    assert written.startswith("prompts")
    read, again = cluster.ask(1000)
    assert (again, read != written) == (written, True), "who is lent writes on, and another one reads"


def test_a_backlog_waits_in_the_router_and_answers_stay_where_they_are() -> None:
    policy = router(max_backlog_tokens=100)
    for number in range(4):
        assert isinstance(policy.assign(RequestShape(id=f"r{number}", prompt_len=90, max_tokens=5), 0.0), Assigned)
    assert not isinstance(policy.assign(RequestShape(id="r4", prompt_len=90, max_tokens=5), 0.0), Assigned)
    busy = Report(made_s=1.0, available_pages=500, num_running=40, request_ids=frozenset({"r0", "r1", "r2", "r3"}))
    policy.on_report("answers-0", busy, 1.0)
    assert policy.leaving("answers-0", 1.0) == [], "who is at home with prompts has less to write, as it should"


def test_what_it_finds_no_place_for_waits_as_by_default() -> None:
    cluster = Cluster()
    for name in ("answers-0", "answers-1", "prompts-0", "prompts-1"):
        cluster.policy.on_report(name, Report(made_s=1.0, available_pages=10, num_running=1), 1.0)
    shape = RequestShape(id="large", prompt_len=1000, max_tokens=10)
    assert not isinstance(cluster.policy.assign(shape, 1.0), Assigned)


def test_pools_of_one_phase_lend_nobody() -> None:
    policy = RouterPolicy(RouterOptions(placement="splitwise"))
    policy.on_worker_up(view("prefill-0", "prefill", 0), 0.0)
    policy.on_worker_up(view("decode-0", "decode", 0), 0.0)
    for number in range(4):
        decision = policy.assign(RequestShape(id=f"r{number}", prompt_len=4000, max_tokens=10), 0.0)
        assert isinstance(decision, Assigned)
        assert (decision.prefill, decision.decode) == ("prefill-0", "decode-0")
