"""Workers are those that a router can use now: what each has been sent, what stands against it, and since when a phase
of requests has had none. It takes notes and answers; which request goes where is chosen by `placing`, and what becomes
of requests is the policy's (cluster/router/policy.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from cluster.router.accounts import DecodeAccount, PrefillAccount, Report, RoutedRequest, WorkerView
from cluster.router.candidates.decode import DecodeCandidates
from cluster.router.candidates.prefill import PrefillCandidates
from cluster.router.health.health import LATE_LOOP_S, Health
from cluster.router.health.isolation import DECODE, PREFILL
from cluster.router.moving.moving import REST_S, Moving
from cluster.router.moving.passing import Passing
from cluster.router.options import RouterOptions
from cluster.router.placing.handoff_times import HandoffTimes
from cluster.router.placing.placing import Placed, Placing
from cluster.router.takers import alone_in
from worker.roles import kind_of
from worker.steps.costs import StepCosts


class Workers:
    def __init__(
        self,
        options: RouterOptions,
        prefill: PrefillCandidates | None = None,
        decode: DecodeCandidates | None = None,
    ) -> None:
        self.prefill = prefill or PrefillCandidates()
        self.decode = decode or DecodeCandidates(options.overcommit)
        self.health = Health()
        self.handoff_times = HandoffTimes()
        self.placing = Placing(self.prefill, self.decode, self.health, self.handoff_times, options)
        may_balance = _may_balance(options)
        is_better, could_gain = self.placing.is_better, self.placing.could_gain
        self.moving = Moving(self.decode, self.health, is_better, could_gain, may_balance=may_balance)
        self.passing = Passing(self.prefill, self.decode, self.health)
        self.absent_s: float | None = 0.0  # since when a phase has had no worker
        self._lost_s: dict[str, dict[str, float]] = {PREFILL: {}, DECODE: {}}  # by phase: when, of those not back since
        self.members: dict[str, frozenset[str]] = {}  # by phase: who belongs to the cluster, as far as that is told
        self._costs: dict[str, StepCosts] = {}  # by role: what one of them told last
        self._options = options

    def take_options(self, options: RouterOptions) -> None:
        """Go by these from now on."""
        self._options = options
        self.decode.set_overcommit(options.overcommit)
        self.placing.take_options(options)
        self.moving.may_balance = _may_balance(options)

    # who is there

    @property
    def missing_phase(self) -> str:
        """A phase that no worker computes now; empty if there is none."""
        if not self.prefill.is_open:
            return "prefill"
        return "" if self.decode.is_open else "decode"

    @property
    def takers(self) -> dict[str, dict[str, bool]]:
        """Who takes new requests, as their last reports say: see cluster/router/takers.py."""
        by_phase = {PREFILL: self.prefill.open_names, DECODE: self.decode.open_names}
        return {phase: {name: not self.health.is_stuck(name) for name in names} for phase, names in by_phase.items()}

    def has_left(self, name: str) -> bool:
        """It drains, and nothing of ours is there or on its way."""
        prefill, decode = self.prefill.accounts.get(name), self.decode.accounts.get(name)
        if prefill is not None and prefill.waiting:
            return False
        if decode is not None and (decode.promised or decode.listed or decode.num_renamed):
            return False
        account = prefill or decode
        return account is not None and account.report.draining

    def up(self, view: WorkerView, now: float) -> None:
        assert not self._is_known(view.name), f"{view.name} is up already"
        costs = self._costs.get(view.role)
        empty = Report(made_s=now, available_pages=view.total_pages, is_assumed=True, costs=costs)
        for lost in self._lost_s.values():
            lost.pop(view.name, None)
        phases = kind_of(view.role).phases
        decode = DecodeAccount(view, empty) if "decode" in phases else None
        if "prefill" in phases:
            self.prefill.up(PrefillAccount(view, empty, beside=decode))
        if decode is not None:
            self.decode.up(decode)
        self._note_absence(now)

    def lost(self, name: str, now: float) -> PrefillAccount | DecodeAccount | None:
        """Its account, if it was known."""
        prefill, decode = self.prefill.lost(name), self.decode.lost(name)
        self.health.forget(name)
        self.handoff_times.forget(name)
        self._note_absence(now)
        for phase, account in ((PREFILL, prefill), (DECODE, decode)):
            if account is not None:
                self._lost_s[phase][name] = now
        return prefill or decode

    def _is_known(self, name: str) -> bool:
        return name in self.prefill.accounts or name in self.decode.accounts

    def _note_absence(self, now: float) -> None:
        if not self.missing_phase:
            self.absent_s = None
        elif self.absent_s is None:
            self.absent_s = now

    def set_chunk_tokens(self, name: str, tokens: int) -> None:
        for account in (self.prefill.accounts.get(name), self.decode.accounts.get(name)):
            if account is not None:
                account.view = replace(account.view, chunk_tokens=tokens)
        self.prefill.note(name)
        self.decode.note(name)

    def is_awaited(self, phase: str) -> bool:
        """One that belongs to the cluster is not there."""
        known = self.prefill.accounts if phase == PREFILL else self.decode.accounts
        return not self.members.get(phase, frozenset()) <= known.keys()

    def last_lost_s(self, phase: str) -> float:
        """When the last one was that is not back."""
        return max(self._lost_s[phase].values(), default=-math.inf)

    def is_lost(self, name: str) -> bool:
        """There is none of this name."""
        return bool(name) and not self._is_known(name)

    def is_stopping(self, decode: str) -> bool:
        """It is there, and takes no new requests."""
        account = self.decode.accounts.get(decode)
        return account is not None and account.report.draining

    # what they say, or do not

    def take_report(self, name: str, report: Report, now: float) -> None:
        prefill, decode = self.prefill.accounts.get(name), self.decode.accounts.get(name)
        if (known := prefill or decode) is None:
            return
        has_turned = known.report.draining != report.draining
        report = self._with_costs(known.view.role, report)
        if prefill is not None:
            self.prefill.take_report(prefill, report)
        if decode is not None:
            self.decode.take_report(decode, report)
        self.health.on_step_age(name, report.step_age_s, self._options.slow_step_s)
        self.health.on_loop_lag(name, report.loop_lag_s, self._peers_lag_s(name, report.loop_lag_s), now)
        for peer in report.peers:
            if peer.name in self.decode.accounts:
                self.health.on_pair_told(name, peer)
        if has_turned:
            self._note_absence(now)

    def _with_costs(self, role: str, report: Report) -> Report:
        """Until a worker has measured its steps, they are taken to cost what those of another of its role do: one that
        is new, or idle since it came, would keep all others from being predicted."""
        if report.costs is None:
            return replace(report, costs=self._costs[role]) if role in self._costs else report
        if role not in self._costs:
            accounts: list[PrefillAccount | DecodeAccount] = [*self.prefill.accounts.values()]
            accounts += self.decode.accounts.values()
            for account in accounts:
                if account.view.role == role and account.report.costs is None:
                    account.report = replace(account.report, costs=report.costs)
                    self.decode.note(account.view.name)
        self._costs[role] = report.costs
        return report

    def _peers_lag_s(self, name: str, own_s: float) -> float:
        """The middle one of its peers'; its own, if that is nothing to speak of, or if there are none."""
        if own_s <= LATE_LOOP_S:
            return own_s
        prefill, decode = self.prefill.accounts, self.decode.accounts
        peers = prefill.values() if name in prefill else decode.values()
        lags_s = sorted(account.report.loop_lag_s for account in peers if account.view.name != name)
        return lags_s[len(lags_s) // 2] if lags_s else own_s

    def why_lost(self, name: str, silent_s: float) -> str:
        """Why one that says nothing is to be given up; empty: not yet."""
        if not self._is_known(name):
            return ""
        self.health.on_silent(name, f"it has said nothing for {silent_s:.1f} s")
        bound_s = self._options.dead_after_s
        if alone_in((name,), self.takers):
            bound_s = max(bound_s, self._options.lost_after_s)
        return f"it said nothing for {bound_s:g} s" if silent_s >= bound_s else ""

    def on_pair_failed(self, prefill: str, decode: str, reason: str, now: float) -> None:
        if prefill in self.prefill.accounts and decode in self.decode.accounts:
            self.health.on_pair_failed(prefill, decode, reason, now)

    # who goes where

    def take(self, request: RoutedRequest, placed: Placed, now: float) -> None:
        """The request, in which the workers are noted, goes to them."""
        self.prefill.add(placed.prefill, request)
        self.moving.note_priority(request.shape.priority)
        self._promise(placed.decode, request)
        self._count_on_link(request)
        self.health.on_placed(request, now)

    def move(self, request: RoutedRequest, to: DecodeAccount, now: float) -> None:
        """It belongs to another decode worker from now on."""
        self.health.on_over(request)
        self._drop(request)
        request.decode, request.moving_to = to.view.name, ""
        self._promise(to, request)
        self._count_on_link(request)
        self.health.on_placed(request, now)

    def rename(self, request: RoutedRequest, to: DecodeAccount, now: float) -> None:
        """It belongs to another decode worker, unless its reader has begun to hand it over."""
        source = self.decode.accounts[request.decode]
        self.move(request, to, now)
        request.renamed_from = source.view.name
        source.num_renamed += 1

    def end_renaming(self, request: RoutedRequest) -> None:
        """It is known to whom it is handed over, or over."""
        if request.renamed_from:
            self.decode.accounts[request.renamed_from].num_renamed -= 1
            request.renamed_from = ""

    def begin_move(self, request: RoutedRequest, to: DecodeAccount, pages: int) -> None:
        """It goes on where it is, and the other worker holds pages for it, too."""
        request.moving_to, request.pages = to.view.name, pages
        self.decode.accounts[request.decode].num_leaving += 1
        self._promise(to, request)

    def on_moved(self, request: RoutedRequest, now: float) -> None:
        self.health.on_over(request)
        self._end_move(request)
        source = request.decode
        self.decode.arrive(request)
        self.prefill.note(source)
        request.rests_until_s = now + REST_S
        self.health.on_pair_works(source, request.decode)

    def on_stays(self, request: RoutedRequest, rests_until_s: float) -> None:
        self._end_move(request)
        self.prefill.note(request.moving_to)
        self.decode.stay(request)
        request.rests_until_s = rests_until_s

    def pass_on(self, request: RoutedRequest, to: PrefillAccount, num_read: int, now: float) -> None:
        """It is read by another worker from now on, but for `num_read` tokens."""
        self.end_renaming(request)
        self.health.on_over(request)
        self.handoff_times.end(request)
        self.prefill.drop(request)
        source, request.prefill = request.prefill, to.view.name
        request.seq, request.is_seen, request.is_passing = 0, False, False
        request.work = max(0, request.shape.prompt_len - num_read)
        self.prefill.add(to, request)
        self.health.on_placed(request, now)
        self.health.on_pair_works(source, request.prefill)

    def on_handed_off(
        self, request: RoutedRequest, to: DecodeAccount, num_tokens: int, taken_s: float, now: float
    ) -> None:
        """It holds the request's KV: so many tokens' have come, in so long."""
        self.end_renaming(request)
        if request.prefill != to.view.name and self.prefill.has_both:
            self.handoff_times.note(request.prefill, to.view.name, num_tokens, taken_s, now)
        self.handoff_times.end(request)

    def release(self, request: RoutedRequest) -> None:
        """It is over."""
        self.end_renaming(request)
        self.handoff_times.end(request)
        self.health.on_over(request)
        self.prefill.drop(request)
        self._drop(request)

    def _promise(self, to: DecodeAccount, request: RoutedRequest) -> None:
        self.decode.promise(to, request)
        if tpot_s := self.placing.target_of(request.shape).tpot_s:
            to.want(request.shape.id, tpot_s)
        self.prefill.note(to.view.name)

    def _count_on_link(self, request: RoutedRequest) -> None:
        """Where it is asked who may stay where they are read."""
        self.handoff_times.end(request)
        if self.prefill.has_both and not request.is_handed_off:
            self.handoff_times.begin(request)

    def _end_move(self, request: RoutedRequest) -> None:
        source = self.decode.accounts.get(request.decode)
        if request.moving_to and source is not None:
            source.num_leaving -= 1

    def _drop(self, request: RoutedRequest) -> None:
        self._end_move(request)
        self.decode.drop(request)
        self.prefill.note(request.decode)
        self.prefill.note(request.moving_to)

    def check_invariants(self, requests: Mapping[str, RoutedRequest]) -> None:
        """Assert that the accounts hold these requests, each where it is, and nothing else."""
        self.prefill.check_invariants()
        self.decode.check_invariants()
        self.health.check_invariants(requests)
        self.handoff_times.check_invariants(requests.values())
        for p in self.prefill.accounts.values():
            assert all(requests.get(i) is r and not r.has_first_token for i, r in p.waiting.items())
        for d in self.decode.accounts.values():
            leaving = [r for r in requests.values() if r.moving_to and r.decode == d.view.name]
            assert d.num_leaving == len(leaving), f"{d.view.name}: {d.num_leaving} leave, not {len(leaving)}"
            renamed = [r for r in requests.values() if r.renamed_from == d.view.name]
            assert d.num_renamed == len(renamed), f"{d.view.name}: {d.num_renamed} are another's, not {len(renamed)}"
            for request_id in (*d.promised, *d.listed):
                at = (requests[request_id].decode, requests[request_id].moving_to)
                assert d.view.name in at, f"{request_id} is not at {d.view.name}"
        for request_id, request in requests.items():
            if request.decode:
                for name in filter(None, (request.decode, request.moving_to)):
                    there = self.decode.accounts[name]
                    assert (request_id in there.promised) != (request_id in there.listed), (
                        f"{request_id} has lost its pages"
                    )


def _may_balance(options: RouterOptions) -> bool:
    return options.placement == "predicted"
