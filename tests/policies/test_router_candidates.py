"""The indexed choice of workers is the scan's choice: both policies, side by side, through thousands of events."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from cluster.router.accounts import Past, Report, RequestShape, WorkerView
from cluster.router.candidates.decode import DecodeCandidates
from cluster.router.candidates.prefill import PrefillCandidates
from cluster.router.candidates.ranking import Ranking
from cluster.router.decisions import Assigned, Queued, Resend
from cluster.router.options import RouterOptions
from cluster.router.policy import RouterPolicy
from engine.pages.news import NO_NEWS, PageNews
from engine.pages.pool import page_hashes
from tests.policies.scanning import ScanningPolicy

pytestmark = pytest.mark.unit

PAGE = 16
SYSTEM = list(range(3 * PAGE))  # what many prompts begin with


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """`num`: prefill and decode workers each; `mixed`: of both phases. `load`: requests sent for each that ends."""

    num: int
    mixed: int = 0
    load: float
    max_pages: int = 40
    page_sizes: tuple[int, ...] = (PAGE,)
    overcommit: float = 0.25
    failures: float = 0.02
    avoid: float = 0.1


WALKS = (
    Walk(num=3, load=1.0, page_sizes=(8, 16)),
    Walk(num=3, load=3.0, overcommit=0.0),
    Walk(num=90, load=1.2),
    Walk(num=90, load=20.0, failures=0.005),  # pages are short almost everywhere
    Walk(num=90, load=4.0, page_sizes=(8, 16, 32), failures=0.1, avoid=0.6),
    Walk(num=90, load=1.5, max_pages=400, failures=0.005, avoid=0.0),  # prefixes spread far
    Walk(num=0, mixed=4, load=2.0),
    Walk(num=3, mixed=3, load=2.0, failures=0.05),
    Walk(num=30, mixed=60, load=8.0, page_sizes=(8, 16)),
)


class Lockstep:
    """Calls both policies alike and compares what they return."""

    def __init__(self, walk: Walk, seed: int) -> None:
        options = RouterOptions(
            max_backlog_tokens=300, max_queued_requests=20, max_queued_tokens=6000, overcommit=walk.overcommit
        )
        self.indexed, self.scanning = RouterPolicy(options), ScanningPolicy(options)
        self.walk, self.rng = walk, random.Random(seed)
        self.up: dict[str, WorkerView] = {}
        self.seqs: Counter[str] = Counter()
        self.sent: dict[str, Assigned] = {}
        self.queued: dict[str, None] = {}
        self.seen: Counter[str] = Counter()
        self.shapes: dict[str, RequestShape] = {}
        self.now = 0.0
        self.prompts = [self._prompt() for _ in range(25)]
        counts = {"prefill": walk.num, "decode": walk.num, "mixed": walk.mixed}
        self.roles = {f"{role[0]}{i}": role for role, count in counts.items() for i in range(count)}
        for name in self.roles:
            self.bring_up(name)

    def both(self, name: str, *args: object, **more: object) -> object:
        answers = [getattr(policy, name)(*args, **more) for policy in (self.indexed, self.scanning)]
        assert answers[0] == answers[1], f"{name}{args} at {self.now}"
        return answers[0]

    def _prompt(self) -> list[int]:
        rng = self.rng
        head = SYSTEM[: PAGE * rng.randrange(4)]
        return head + [rng.randrange(500) for _ in range(rng.randrange(1, 200))]

    def bring_up(self, name: str) -> None:
        pages = self.rng.choice((self.walk.max_pages, self.walk.max_pages, self.walk.max_pages // 2))
        page_size = self.rng.choice(self.walk.page_sizes)
        chunks = self.rng.choice((0, 32, 32)) if self.roles[name] == "mixed" else 0
        view = WorkerView(name=name, role=self.roles[name], total_pages=pages, page_size=page_size, chunk_tokens=chunks)
        self.up[name] = view
        self.seqs[name] = 0
        for misfit in self.both("on_worker_up", view, self.now):  # type: ignore[attr-defined]
            self.queued.pop(misfit.request_id, None)

    def lose(self, name: str) -> None:
        self.up.pop(name)
        for retry in self.both("on_worker_lost", name, "it died", self.now):  # type: ignore[attr-defined]
            self.sent.pop(retry.request_id, None)
            self.queued.pop(retry.request_id, None)
            self.again(retry)
        self.seen["lost"] += 1

    def again(self, retry: object) -> None:
        """What failed comes again, more often than not, with its past."""
        if isinstance(retry, Resend) and self.rng.random() < 0.7:
            self.seen["alone"] += bool(retry.past.died_in)
            self.route(replace(self.shapes[retry.request_id], id=f"{retry.request_id}#", past=retry.past), True)

    def send(self, assigned: Assigned) -> None:
        self.sent[assigned.request_id] = assigned
        self.seqs[assigned.prefill] += 1
        self.both("on_submitted", assigned.request_id, self.seqs[assigned.prefill])
        self.seen["hit" if ", 0 of" not in assigned.reason else "miss"] += 1

    def assign(self, request_id: str) -> None:
        rng = self.rng
        tokens = rng.choice(self.prompts)
        names = rng.sample(sorted(self.up), min(3, len(self.up))) if rng.random() < self.walk.avoid else []
        if names and rng.random() < 0.1:
            names = sorted(self.up)  # all of them failed it
        shape = RequestShape(
            id=request_id,
            prompt_len=len(tokens),
            max_tokens=rng.randrange(2, 150),
            page_hashes=page_hashes(tokens, PAGE),
            past=Past(avoid=frozenset(names)),
        )
        self.route(shape, rng.random() < 0.1)

    def route(self, shape: RequestShape, is_resent: bool) -> None:
        self.shapes[shape.id] = shape
        decision = self.both("assign", shape, self.now, is_resent=is_resent)
        self.seen[type(decision).__name__] += 1
        if isinstance(decision, Assigned):
            self.send(decision)
        elif isinstance(decision, Queued):
            self.queued[shape.id] = None

    def page_news(self) -> PageNews:
        rng = self.rng
        if rng.random() < 0.7:
            return NO_NEWS
        hashes = page_hashes(rng.choice(self.prompts), PAGE)
        lost = page_hashes(rng.choice(self.prompts), PAGE)
        return PageNews(tuple(hashes), tuple(lost[rng.randrange(1 + len(lost)) :]), rng.random() < 0.1)

    def report(self, name: str) -> None:
        """As a worker might have been a while ago, or as it never was."""
        rng, view = self.rng, self.up[name]
        ours = [i for i, a in self.sent.items() if name in (a.prefill, a.decode)]
        report = Report(
            made_s=self.now - rng.choice((0.0, 0.02, 1.0)),
            last_submit_seq=max(0, self.seqs[name] - rng.randrange(3)),
            num_waiting=rng.randrange(3),
            num_running=max(0, len(ours) - rng.randrange(3)),
            waiting_tokens=rng.choice((0, rng.randrange(400))),
            available_pages=rng.choice((0, rng.randrange(view.total_pages + 1), view.total_pages)),
            draining=rng.random() < 0.03,
            step_age_s=rng.choice((0.0, 0.0, 0.1, 9.0)),
            request_ids=frozenset(i for i in ours if rng.random() < 0.8),
            pages=self.page_news(),
        )
        self.both("on_report", name, report, self.now)

    def progress(self) -> None:
        rng = self.rng
        request_id = rng.choice(list(self.sent))
        at = self.sent[request_id]
        match rng.randrange(7):
            case 0 | 1:
                self.both("on_first_token", request_id, self.now)
            case 2:
                if self.both("on_handed_off", request_id, at.decode, self.now) is not None:
                    del self.sent[request_id]
            case 3:
                moved = self.both("reassign", request_id, at.decode, self.now)
                self.seen["reassigned"] += moved is not None
            case 4:
                self.both("on_decoded", request_id, rng.choice((1, 64)))
            case 5 if rng.random() < 0.6:
                self.fail(at)
            case _ if rng.random() * self.walk.load < 1:
                self.both("on_finished", request_id)
                del self.sent[request_id]

    def fail(self, at: Assigned) -> None:
        cause = self.rng.choice(("step", "step", "peer", "room", ""))
        peer = at.decode if cause == "peer" else ""
        del self.sent[at.request_id]
        retry = self.both("on_failed", at.request_id, "no", self.now, worker=at.prefill, cause=cause, peer=peer)
        self.seen["failed"] += 1
        self.again(retry)

    def hear(self, name: str) -> None:
        match self.rng.randrange(3):
            case 0:
                self.both("on_silent", name, 2.5)
            case 1:
                self.both("on_heard", name)
            case _:
                self.both("on_stepped", name)

    def step(self, number: int) -> None:
        rng = self.rng
        self.now += 0.003
        if rng.random() < self.walk.failures:
            name = rng.choice(sorted(self.roles))
            if name in self.up:
                self.lose(name)
            else:
                self.bring_up(name)
        elif rng.random() < 0.1 and self.up:
            self.hear(rng.choice(sorted(self.up)))
        elif rng.random() < 0.3:
            self.assign(f"r{number}")
        elif rng.random() < 0.4 and self.up:
            self.report(rng.choice(sorted(self.up)))
        elif self.sent:
            self.progress()
        while (assigned := self.both("next_assignable", self.now)) is not None:
            assert isinstance(assigned, Assigned)
            del self.queued[assigned.request_id]
            self.send(assigned)
        while self.both("next_turn") is not None:
            self.seen["begun"] += 1


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("walk", WALKS, ids=str)
def test_the_indexed_choice_is_the_scans(walk: Walk, seed: int) -> None:
    lockstep = Lockstep(walk, seed)
    for number in range(1000):
        lockstep.step(number)
        if number % 100 == 0:
            lockstep.indexed.check_invariants()
    lockstep.indexed.check_invariants()
    assert min(lockstep.seen[what] for what in ("Assigned", "hit", "miss", "lost", "failed")) > 0, lockstep.seen


def test_pages_that_only_one_of_many_has_are_found() -> None:
    policy, scanning = RouterPolicy(), ScanningPolicy()
    for each in (policy, scanning):
        for i in range(500):
            for role in ("prefill", "decode"):
                view = WorkerView(name=f"{role}-{i}", role=role, total_pages=100, page_size=PAGE)
                each.on_worker_up(view, 0.0)
        for i in range(500):
            pages = 90 if i == 321 else 1
            each.on_report(f"decode-{i}", Report(made_s=1.0, num_running=5, available_pages=pages), 1.0)
        decision = each.assign(RequestShape(id="a", prompt_len=800, max_tokens=100), 1.0)
        assert isinstance(decision, Assigned)
        assert decision.decode == "decode-321"


@pytest.mark.parametrize("pages_free", [20, 60, 100])
def test_a_choice_among_a_thousand_looks_at_few(monkeypatch: pytest.MonkeyPatch, pages_free: int) -> None:
    policy, rng, looks = RouterPolicy(), random.Random(0), Counter[str]()
    for i in range(1000):
        for role in ("prefill", "decode"):
            view = WorkerView(name=f"{role}-{i}", role=role, total_pages=100, page_size=PAGE)
            policy.on_worker_up(view, 0.0)
        busy = Report(made_s=1.0, num_running=1 + rng.randrange(9), available_pages=pages_free)
        policy.on_report(f"decode-{i}", busy, 1.0)
    for candidates in (PrefillCandidates, DecodeCandidates):
        monkeypatch.setattr(candidates, "fits", _counting(candidates.fits, looks))
    for i in range(300):
        tokens = [i % 40] * rng.randrange(400, 700)
        hashes = page_hashes(tokens, PAGE)
        decision = policy.assign(RequestShape(id=f"{i}", prompt_len=len(tokens), max_tokens=9, page_hashes=hashes), 1.0)
        assert isinstance(decision, Assigned)
    assert 2 * 300 <= looks["workers"] < 10 * 300


def _counting(fits: Callable[..., bool], looks: Counter[str]) -> Callable[..., bool]:
    def counted(*args: object) -> bool:
        looks["workers"] += 1
        return fits(*args)

    return counted


def test_a_ranking_is_sorted_whatever_happens() -> None:
    rng, ranking, values = random.Random(0), Ranking(), dict[str, int]()
    for _ in range(1000):
        name = f"w{rng.randrange(50)}"
        if rng.random() < 0.2:
            ranking.drop(name)
            values.pop(name, None)
        else:
            values[name] = rng.randrange(10)
            ranking.put(name, values[name])
        ranking.check_invariants(values)
        least = rng.randrange(11)
        assert len(ranking) - ranking.least(least) == sum(value >= least for value in values.values())
