"""What the router knows of each worker: its last report, and what was sent since that the report does not count yet.

Arithmetic only: these accounts decide nothing (cluster/router/policy.py does). A report is old when it arrives, so
prompt tokens sent to a prefill worker count from the moment they are sent, until a report that had seen their Submit
counts them; pages promised of a decode worker count until a report lists the request.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine.pages.news import NO_NEWS, PageHash, PageNews
from worker.steps.costs import StepCosts

DECODE_TOKENS = 64  # of prompts, for which each request counts that a worker decodes beside them
LAST_TOKENS = 1 << 40  # more than anybody has queued
ALL = 1 << 40  # of a request's tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """What does not change while a worker lives, but its chunks. `incarnation`: of its process; empty: not known."""

    name: str
    role: str
    total_pages: int
    page_size: int
    incarnation: str = ""
    step_tokens: int = 0  # of prompts that a step computes at most; 0: none, or not known
    chunk_tokens: int = 0  # of prompts in one that decodes, too
    num_stages: int = 1  # of its engine, a step in each

    @property
    def life(self) -> str:
        return f"{self.name}/{self.incarnation}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTrouble:
    """A decode worker that a prefill worker could not hand over to."""

    name: str
    failures: int  # one after another
    reason: str
    failed_s: float  # on the router's clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a worker held when it made the report, at `made_s` on the router's clock."""

    made_s: float
    last_submit_seq: int = 0  # prefill: the last of this router's Submits that it had seen
    num_waiting: int = 0
    num_running: int = 0
    waiting_tokens: int = 0
    available_pages: int = 0
    draining: bool = False
    request_ids: frozenset[str] = frozenset()  # decode: those that hold pages or a lease
    step_age_s: float = 0.0  # how long its step has been running
    loop_lag_s: float = 0.0  # by how much its event loop was late, at worst, of late
    peers: tuple[PeerTrouble, ...] = ()  # prefill
    costs: StepCosts | None = None  # of its steps; None: not known yet
    prompt_share: float = 0.0  # mixed: tokens of prompts in a step that decodes, of late
    pages: PageNews = NO_NEWS  # prefill: what of its pages can be found by hash, since the last report
    is_others: bool = False  # it is another router's, which takes it first
    is_assumed: bool = False  # it has said hello, and what it says next counts whenever that was made


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What a request's earlier attempts have met."""

    avoid: frozenset[str] = frozenset()  # workers that failed it; taken only when there is no other
    unable: frozenset[str] = frozenset()  # workers that cannot serve it, as they say
    failures: int = 0  # attempts of it that have failed
    losses: int = 0  # workers lost while it was there, computed or not
    deaths: tuple[str, ...] = ()  # WorkerView.life of those that may have died of it
    died_s: float = 0.0  # when the last of them was heard of
    died_in: str = ""  # the phase in which the last one did: it is tried there alone first, until it has passed
    is_retried: bool = False  # one died after its trial, and it may have been another's fault: the next takes longer

    def pardoned(self, life: str) -> Past:
        """That worker lives: it was only out of reach."""
        deaths = tuple(each for each in self.deaths if each != life)
        return replace(self, deaths=deaths, died_in=self.died_in if deaths else "")


FRESH = Past()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestShape:
    """A request as routing sees it. When it is sent again, `prompt_len` counts the tokens generated so far too."""

    id: str
    prompt_len: int
    max_tokens: int  # still to be generated at most
    page_hashes: Sequence[PageHash] = ()
    past: Past = FRESH
    owner: str = ""  # the client whose it is; empty: not known
    weight: float = 1.0  # of its turns in line: one of 2 gets twice what one of 1 does
    slo_ttft_s: float = 0.0  # the time to its first token that it wants; 0: the router's
    slo_tpot_s: float = 0.0  # likewise for each token after it
    priority: int = 0  # lower goes first
    pair: tuple[str, str] | None = None  # the workers that it is for, prefill and decode; None: any
    most_held: int = ALL  # tokens whose KV is kept where it is decoded
    num_beams: int = 0  # of its search, which is not moved; 0: it has none
    kind: str = ""  # what it asks of a worker's engine, in any words: who cannot serve one cannot serve another alike

    def held_len(self, num_tokens: int) -> int:
        """Of so many of its tokens, those whose KV is held where it is decoded."""
        return num_tokens if num_tokens < self.most_held else self.most_held

    @property
    def kv_len(self) -> int:
        """Tokens whose KV is handed over."""
        return self.held_len(self.prompt_len)

    @property
    def most_tokens(self) -> int:
        """Whose KV it may ever hold there, over all beams."""
        return self.held_len(self.prompt_len + self.max_tokens * max(1, self.num_beams))

    def grown(self, prompt_len: int, max_tokens: int) -> RequestShape:
        """The same, some tokens later: as `replace` has it, which costs more than all that is asked of the result."""
        return RequestShape(
            id=self.id,
            prompt_len=prompt_len,
            max_tokens=max_tokens,
            page_hashes=self.page_hashes,
            past=self.past,
            owner=self.owner,
            weight=self.weight,
            slo_ttft_s=self.slo_ttft_s,
            slo_tpot_s=self.slo_tpot_s,
            priority=self.priority,
            pair=self.pair,
            most_held=self.most_held,
            num_beams=self.num_beams,
            kind=self.kind,
        )


@dataclass(slots=True)
class RoutedRequest:
    shape: RequestShape
    past: Past  # the shape's, less what it has been pardoned since
    queued_s: float = 0.0  # since when it has waited in the router
    prefill: str = ""
    decode: str = ""
    work: int = 0  # prompt tokens that prefill is expected to compute
    pages: int = 0  # that decode must hold at first
    seq: int | None = None  # of its Submit; None until it is sent
    is_seen: bool = False  # a report of the prefill worker counts it
    has_first_token: bool = False
    is_handed_off: bool = False
    is_held: bool = False  # its decode worker computes nothing of it until it is told to begin
    is_passing: bool = False  # its decode worker is asked to read what is unread of it
    keeps_reader: bool = False  # what is unread of it cannot be read elsewhere
    renamed_from: str = ""  # the decode worker to which its reader may hand it over all the same
    moving_to: str = ""  # another decode worker, which takes its KV while it is computed
    refused_by: frozenset[str] = frozenset()  # decode workers that it could not move to
    rests_until_s: float = 0.0  # before which it does not move
    left: str = ""  # the decode worker that it has moved from, whose last tokens may not have come yet
    stays_away: dict[str, float] | None = None  # from decode workers that let its handoff wait, until when
    stalled_s: float | None = None  # since when its handoff has waited for pages
    link: tuple[str, str] | None = None  # from whom and to whom its KV is on its way, where that is counted
    is_on_link: bool = False  # all of it is read, and counted at the other end, too

    def at(self, phase: str) -> str:
        """The worker that computes it."""
        return self.prefill if phase == "prefill" else self.decode


@dataclass(slots=True)
class PrefillAccount:
    view: WorkerView
    report: Report
    waiting: dict[str, RoutedRequest] = field(default_factory=dict)  # ours without a first token, in the order assigned
    seen_tokens: int = 0  # of `waiting`, counted in the report
    unseen_tokens: int = 0  # of `waiting`, sent since
    others_tokens: int = 0  # other routers' share of the report
    prefixes: OrderedDict[PageHash, None] = field(default_factory=OrderedDict)  # sent there or told, least recent first
    holders: dict[PageHash, set[str]] = field(default_factory=dict)  # by page, the names of all that remember it
    beside: DecodeAccount | None = None  # of the same worker, if it decodes, too

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens still to compute, at most. Two bounds: what the report says, and what has not answered yet."""
        return min(self.report.waiting_tokens, self.others_tokens + self.seen_tokens) + self.unseen_tokens

    @property
    def reads_last(self) -> bool:
        """It decodes, too, and reads only while it does not: a prompt there waits for all answers that still come."""
        return self.beside is not None and not self.view.chunk_tokens

    @property
    def load(self) -> int:
        """Tokens that are computed beside a prompt or before it: by this the least loaded worker is found."""
        before = LAST_TOKENS if self.reads_last else 0
        return self.queued_tokens + before + (0 if self.beside is None else self.beside.batch * DECODE_TOKENS)

    def cached_len(self, shape: RequestShape) -> int:
        """Tokens of the prompt that are there, or on their way; at least one token is always computed."""
        pages = 0
        for page_hash in shape.page_hashes:
            if page_hash not in self.prefixes:
                break
            pages += 1
        return min(pages * self.view.page_size, shape.prompt_len - 1)

    def _remember(self, hashes: Sequence[PageHash]) -> None:
        for page_hash in hashes:
            if page_hash in self.prefixes:
                self.prefixes.move_to_end(page_hash)
            else:
                self.prefixes[page_hash] = None
                self.holders.setdefault(page_hash, set()).add(self.view.name)
        while len(self.prefixes) > self.view.total_pages:  # it cannot have kept more
            self._unhold(self.prefixes.popitem(last=False)[0])

    def _unhold(self, page_hash: PageHash) -> None:
        names = self.holders[page_hash]
        names.discard(self.view.name)
        if not names:
            del self.holders[page_hash]

    def forget_prefixes(self) -> None:
        """The worker is lost, and what it had cached."""
        for page_hash in self.prefixes:
            self._unhold(page_hash)
        self.prefixes.clear()

    def _hear(self, pages: PageNews) -> None:
        """What was sent there and is not computed yet stays known: nobody else has it sooner."""
        if pages.is_all:
            self.forget_prefixes()
            for request in self.waiting.values():
                self._remember(request.shape.page_hashes)
        self._remember(pages.found)
        for page_hash in pages.lost:
            if page_hash in self.prefixes:
                del self.prefixes[page_hash]
                self._unhold(page_hash)

    def take_report(self, report: Report) -> None:
        """Count what the report had seen as the report counts it. One older than the last is dropped, but for what it
        says of pages: nothing else says it again."""
        self._hear(report.pages)
        if report.made_s < self.report.made_s and not self.report.is_assumed:
            return
        self.report = report
        for request in self.waiting.values():
            if request.is_seen or request.seq is None or request.seq > report.last_submit_seq:
                continue
            request.is_seen = True
            self.seen_tokens += request.work
            self.unseen_tokens -= request.work
        self.others_tokens = max(0, report.waiting_tokens - self.seen_tokens)

    def add(self, request: RoutedRequest) -> None:
        self.waiting[request.shape.id] = request
        self.unseen_tokens += request.work
        self._remember(request.shape.page_hashes)

    def drop(self, request: RoutedRequest) -> None:
        """It needs no prefill any more: its first token is there, or it has gone."""
        if self.waiting.pop(request.shape.id, None) is None:
            return
        if request.is_seen:
            self.seen_tokens -= request.work
        else:
            self.unseen_tokens -= request.work

    def check_invariants(self) -> None:
        waiting = list(self.waiting.values())
        assert self.seen_tokens == sum(r.work for r in waiting if r.is_seen), self.view.name
        assert self.unseen_tokens == sum(r.work for r in waiting if not r.is_seen), self.view.name
        assert len(self.prefixes) <= self.view.total_pages, f"{self.view.name}: more prefixes than pages"


@dataclass(slots=True)
class DecodeAccount:
    view: WorkerView
    report: Report
    promised: dict[str, int] = field(default_factory=dict)  # ours that no report lists yet: pages
    promised_pages: int = 0
    listed: dict[str, int] = field(default_factory=dict)  # ours that the report lists: pages at least
    ended: int = 0  # listed ones that have ended since
    ended_pages: int = 0
    tpots_s: dict[str, float] = field(default_factory=dict)  # ours that want one: the time a token should take
    wanted: dict[float, int] = field(default_factory=dict)  # of these times, how many want each
    tightest_s: float = math.inf  # the least of them
    num_leaving: int = 0  # ours that are moving to another
    num_renamed: int = 0  # that are another's now, and may come here all the same

    @property
    def free_pages(self) -> int:
        return self.report.available_pages + self.ended_pages - self.promised_pages

    @property
    def batch(self) -> int:
        return self.report.num_running + self.report.num_waiting - self.ended + len(self.promised)

    @property
    def is_short(self) -> bool:
        """Of pages: the last of those that it computes would soon be preempted."""
        return self.batch > 1 and self.free_pages < self.batch

    def want(self, request_id: str, tpot_s: float) -> None:
        self._want_no_more(request_id)
        self.tpots_s[request_id] = tpot_s
        self.wanted[tpot_s] = self.wanted.get(tpot_s, 0) + 1
        self.tightest_s = min(self.tightest_s, tpot_s)

    def _want_no_more(self, request_id: str) -> None:
        tpot_s = self.tpots_s.pop(request_id, None)
        if tpot_s is None:
            return
        self.wanted[tpot_s] -= 1
        if not self.wanted[tpot_s]:
            del self.wanted[tpot_s]
            self.tightest_s = min(self.wanted) if self.wanted else math.inf

    def promise(self, request_id: str, pages: int) -> None:
        self.promised[request_id] = pages
        self.promised_pages += pages

    def drop(self, request_id: str) -> None:
        self._want_no_more(request_id)
        if request_id in self.promised:
            self.promised_pages -= self.promised.pop(request_id)
        elif request_id in self.listed:
            self.ended += 1
            self.ended_pages += self.listed.pop(request_id)

    def take_report(self, report: Report) -> None:
        """What the report lists is in its figures; what it does not list yet is added to them."""
        if report.made_s < self.report.made_s and not self.report.is_assumed:
            return
        is_same_list = report.request_ids is self.report.request_ids
        self.report = report
        self.ended = self.ended_pages = 0
        if is_same_list and not self.promised:
            return
        now_listed = [i for i in self.promised if i in report.request_ids]
        if not is_same_list and not report.request_ids.issuperset(self.listed):  # some that have not ended for us yet
            for request_id in [i for i in self.listed if i not in report.request_ids]:
                self.promise(request_id, self.listed.pop(request_id))
        for request_id in now_listed:
            self.listed[request_id] = pages = self.promised.pop(request_id)
            self.promised_pages -= pages

    def check_invariants(self) -> None:
        assert self.promised_pages == sum(self.promised.values()), self.view.name
        assert self.listed.keys() <= self.report.request_ids, f"{self.view.name}: listed, but not by the report"
        assert not self.promised.keys() & self.listed.keys(), f"{self.view.name}: promised and listed at once"
        assert all(i in self.promised or i in self.listed for i in self.tpots_s), f"{self.view.name}: targets of nobody"
        assert self.wanted == Counter(self.tpots_s.values()), f"{self.view.name}: targets that nobody wants"
        assert self.tightest_s == min(self.wanted, default=math.inf), f"{self.view.name}: somebody wants less"
