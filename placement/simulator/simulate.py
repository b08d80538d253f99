"""simulate plays a workload against a SimCluster: the live policies, on a virtual clock.

    arrival -> RouterPolicy -> PrefillMachine(PrefillPolicy) -> links -> DecodeMachine(DecodePolicy) -> finished
                    ^                reports, as late as in life                    |
                    +------ preempted, handoff failed, worker lost: sent again -----+

The same objects that serve decide here (cluster.router.policy, prefill_worker.policy, decode_worker.policy,
engine.pages.pool); this module is the router's driver, cluster/router/driver.py without its sockets, and decides
nothing. It draws no random number: one workload gives one outcome. What it leaves out: clients that cancel, several
routers, generated tokens that a later prompt repeats (their pages are not cached here), and the end of waiting for a
role that has no worker: requests wait until one is back.
"""

from __future__ import annotations

import math

from cluster.router.accounts import RequestShape, WorkerView
from cluster.router.policy import Assigned, Queued, RouterPolicy, Unavailable
from cluster.router.retry import GiveUp, Retry
from engine.pages.pool import PagePool
from placement.simulator.clock import VirtualClock
from placement.simulator.cluster import Loss, SetupError, SimCluster, SimWorker
from placement.simulator.decode_machine import DecodeMachine
from placement.simulator.host import Host
from placement.simulator.ledger import PREFILL_QUEUE, ROUTE, Ledger, Live
from placement.simulator.outcome import Outcome
from placement.simulator.pages import CountedPool, block_hashes
from placement.simulator.prefill_machine import PrefillMachine
from placement.simulator.reporting import Reporter
from placement.workload.requests import Workload


def simulate(cluster: SimCluster, workload: Workload) -> Outcome:
    """Every request of the workload, to its end or its rejection. Same arguments, same outcome."""
    simulation = Simulation(cluster, workload)
    simulation.play()
    return simulation.ledger.outcome()


class Simulation:
    def __init__(self, cluster: SimCluster, workload: Workload) -> None:
        self.cluster = cluster
        self.workload = workload
        self.message_s = cluster.message_s
        self.clock = VirtualClock()
        self.policy = RouterPolicy(cluster.router)
        self.ledger = Ledger(workload)
        self.prefills: dict[str, PrefillMachine] = {}
        self.decodes: dict[str, DecodeMachine] = {}
        self._arrival: list[float] = workload.arrival_s.tolist()
        self._prompt_len: list[int] = workload.prompt_len.tolist()
        self._output_len: list[int] = workload.output_len.tolist()
        self._next_arrival = self._arrival[0]
        self._live: dict[str, Live] = {}
        self._stalled: dict[str, Live] = {}
        self._parked: list[Live] = []  # a role has no worker
        self.next_decision_s = self._arrival[0]  # when the router will next look at reports, but for failures
        self._watched_s = 0.0  # when the last report that is an event arrives
        self._taken_tick = -1  # whose reports have been taken
        self._next_reports_s = 0.0  # when others arrive
        self._reporters: dict[Reporter, None] = {}  # that may have something for the router
        self._hosts = {name: host for shared in cluster.hosts for host in (Host(shared),) for name in shared.workers}
        self._page_size = self._common_page_size()
        for worker in cluster.workers:
            self._up(worker)

    def play(self) -> None:
        for loss in self.cluster.losses:
            self.clock.at(loss.at_s, self._lose, loss)
        self.clock.at(self._arrival[0], self._arrive, 0)
        self.clock.run()

    def _common_page_size(self) -> int:
        sizes = {worker.page_size for worker in self.cluster.workers}
        if len(sizes) > 1:
            raise SetupError(f"page_size is {sorted(sizes)}; workers that exchange KV have one page size")
        return sizes.pop()

    def _up(self, worker: SimWorker) -> None:
        has_hits = worker.prefix_cache and bool(self.workload.blocks)
        pool = (PagePool if has_hits else CountedPool)(worker.num_pages, worker.page_size)
        host = self._hosts.get(worker.name)
        if worker.role == "prefill":
            prefill = self.prefills[worker.name] = PrefillMachine(self, worker, pool)
            if host is not None:
                prefill.host = host
                host.prefills[worker.name] = prefill
        else:
            decode = self.decodes[worker.name] = DecodeMachine(self, worker, pool)
            if host is not None:
                decode.host = host
                host.decodes[worker.name] = decode
        view = WorkerView(name=worker.name, role=worker.role, total_pages=worker.num_pages, page_size=worker.page_size)
        self.policy.on_worker_up(view, self.clock.now)

    # requests

    def _arrive(self, index: int) -> None:
        self._route(self._attempt(index, 1, 0, 0, frozenset()))
        self._next_arrival = math.inf
        if index + 1 < len(self._arrival):
            self._next_arrival = self._arrival[index + 1]
            self.clock.at(self._next_arrival, self._arrive, index + 1)
        self._note_decision()

    def _note_decision(self) -> None:
        """While somebody waits in the router or for pages, every report may decide."""
        is_waiting = self._stalled or self.policy.num_queued
        self.next_decision_s = 0.0 if is_waiting else self._next_arrival

    def _attempt(self, index: int, attempt: int, made: int, failures: int, avoid: frozenset[str]) -> Live:
        """The request anew, `made` tokens of its output behind its prompt."""
        num_tokens = self._prompt_len[index] + made
        hashes = []
        if self.workload.blocks:
            hashes = block_hashes(
                self.workload.blocks[index], self.workload.block_len, self._prompt_len[index], self._page_size
            )
        live = Live(index, attempt, num_tokens, self._output_len[index] - made, hashes, failures, avoid)
        self._live[live.id] = live
        return live

    def _route(self, live: Live) -> None:
        self._take_reports()
        shape = RequestShape(
            id=live.id,
            prompt_len=live.num_tokens,
            max_tokens=live.left,
            page_hashes=live.hashes,
            avoid=live.avoid,
            failures=live.failures,
        )
        decision = self.policy.assign(shape, self.clock.now, is_resent=live.attempt > 1)
        if isinstance(decision, Assigned):
            self._send(live, decision)
        elif isinstance(decision, Queued):
            self._watch_reports()
        elif isinstance(decision, Unavailable):
            self._parked.append(live)
        else:
            self.ledger.counters["rejected"] += 1
            self._drop(live)

    def _send(self, live: Live, assigned: Assigned) -> None:
        now = self.clock.now
        live.prefill, live.decode = self.prefills[assigned.prefill], self.decodes[assigned.decode]
        live.prefill.next_seq += 1
        live.seq = live.prefill.next_seq
        self.policy.on_submitted(live.id, live.seq)
        self.ledger.enter(live.index, PREFILL_QUEUE, now)
        self.clock.at(now + self.message_s, live.prefill.submit, live)

    def _pump(self) -> None:
        """Send what may go now."""
        if not self._stalled and not self.policy.num_queued:
            return
        self._take_reports()
        while self.policy.num_queued and (assigned := self.policy.next_assignable(self.clock.now)):
            self._send(self._live[assigned.request_id], assigned)
        self._note_decision()

    def _retry(self, live: Live, retry: Retry) -> None:
        """Another attempt, with the tokens made so far, or none. The policy has forgotten the last one."""
        self._drop(live)
        if isinstance(retry, GiveUp):
            self.ledger.counters["failed"] += 1
            return
        self.ledger.counters["retries"] += 1
        self.ledger.enter(live.index, ROUTE, self.clock.now)
        made = self._output_len[live.index] - live.left
        self.ledger.counters["recomputed_tokens"] += live.num_tokens + live.max_new - live.left
        again = self._attempt(live.index, live.attempt + 1, made, retry.failures, retry.avoid)
        if retry.after_s:
            self.clock.at(self.clock.now + retry.after_s, self._route, again)
        else:
            self._route(again)

    def _drop(self, live: Live) -> None:
        live.is_gone = True
        del self._live[live.id]
        self._stalled.pop(live.id, None)

    # what workers say

    def on_first_token(self, live: Live) -> None:
        if live.is_gone:
            return
        self.ledger.on_first_token(live.index, self.clock.now)
        self.policy.on_first_token(live.id, self.clock.now)
        if live.left:
            self._pump()
        else:
            self.on_finished(live)

    def on_handed_off(self, live: Live) -> None:
        if live.is_gone:
            return
        assert live.prefill is not None
        assert live.decode is not None
        retry = self.policy.on_handed_off(live.id, live.decode.name)
        live.prefill.on_receipt(live)
        if retry is not None:
            self._retry(live, retry)

    def on_finished(self, live: Live) -> None:
        if live.is_gone:
            return
        self.policy.on_finished(live.id)
        self.ledger.on_finished(live.index, self.clock.now)
        self._drop(live)
        self._pump()

    def on_preempted(self, live: Live) -> None:
        if live.is_gone:
            return
        self.ledger.counters["preempted"] += 1
        self._retry(live, self.policy.on_preempted(live.id))

    def on_handoff_failed(self, live: Live) -> None:
        if live.is_gone:
            return
        if live.prefill is not None:
            self.clock.at(self.clock.now + self.message_s, live.prefill.end, live)
        self._retry(live, self.policy.on_failed(live.id, "no decode worker could ever hold it"))

    def on_stalled(self, live: Live) -> None:
        if not live.is_gone and not live.granted:
            self._stalled[live.id] = live
            self._take_reports()
            if live.id in self._stalled:
                self._move(live)
            self._watch_reports()
            self._note_decision()

    def _move_stalled(self) -> None:
        """A decode worker has told what it holds: it may have pages for those that another one lets wait."""
        if len(self.decodes) < 2:
            return
        most = self.policy.most_free_pages
        for live in list(self._stalled.values()):
            if live.granted:
                del self._stalled[live.id]
            elif live.num_tokens < most * self._page_size:
                self._move(live)
                most = self.policy.most_free_pages

    def _move(self, live: Live) -> None:
        assert live.prefill is not None
        assert live.decode is not None
        better = self.policy.reassign(live.id, live.decode.name)
        if better is not None:
            del self._stalled[live.id]
            self.clock.at(self.clock.now + self.message_s, live.prefill.move, (live, self.decodes[better]))

    # reports

    def mark(self, reporter: Reporter) -> None:
        """The worker has changed, and will say so."""
        reporter.mark(self.clock.now)
        self._reporters[reporter] = None
        if self.policy.num_queued or self._stalled:
            self._watch(reporter)

    def _watch_reports(self) -> None:
        """Requests wait in the router: from now on every report is an event."""
        for reporter in self._reporters:
            self._watch(reporter)

    def _watch(self, reporter: Reporter) -> None:
        arrives_s = reporter.arrives_s(self.clock.now)
        if arrives_s > self._watched_s:  # all workers report at the same ticks
            self._watched_s = arrives_s
            self.clock.at(arrives_s, self._on_report, 0)

    def _on_report(self, _: int) -> None:
        self._pump()

    def _take_reports(self) -> None:
        """Those that have arrived. All workers report at the same ticks, so between two arrivals there is nothing."""
        now, gap_s = self.clock.now, self.cluster.report_gap_s
        tick = int(max(0.0, now - self.message_s) / gap_s)
        if tick == self._taken_tick and now < self._next_reports_s:
            return
        self._taken_tick = tick if tick * gap_s + self.message_s <= now else -1  # rounding: they arrive right after now
        self._next_reports_s = (tick + 1) * gap_s + self.message_s
        quiet = []
        has_decode = False
        for reporter in self._reporters:
            report = reporter.take(now)
            if report is not None:
                self.policy.on_report(reporter.name, report, now)
                has_decode |= reporter.name in self.decodes
            if reporter.is_quiet:
                quiet.append(reporter)
        for reporter in quiet:
            del self._reporters[reporter]
        if has_decode and self._stalled:
            self._move_stalled()

    # losses

    def _lose(self, loss: Loss) -> None:
        machine = self.prefills.get(loss.worker) or self.decodes.get(loss.worker)
        if machine is None or machine.is_dead:
            return
        if isinstance(machine, DecodeMachine):
            machine.lose()
        machine.is_dead = True
        self._reporters.pop(machine.reporter, None)
        self.clock.at(self.clock.now + self.cluster.noticed_s, self._on_lost, machine)
        if loss.back_s is not None:
            self.clock.at(max(loss.back_s, self.clock.now + self.cluster.noticed_s), self._on_back, machine)

    def _on_lost(self, machine: PrefillMachine | DecodeMachine) -> None:
        self.ledger.counters["workers_lost"] += 1
        for retry in self.policy.on_worker_lost(machine.name, "it died"):
            live = self._live[retry.request_id]
            for other in (live.prefill, live.decode):
                if isinstance(other, PrefillMachine) and other is not machine:
                    self.clock.at(self.clock.now + self.message_s, other.end, live)
                elif isinstance(other, DecodeMachine) and other is not machine:
                    self.clock.at(self.clock.now + self.message_s, other.cancel, live)
            self._retry(live, retry)
        self._pump()

    def _on_back(self, machine: PrefillMachine | DecodeMachine) -> None:
        self._up(machine.worker)
        parked, self._parked = self._parked, []
        for live in parked:
            self._route(live)
        self._pump()
