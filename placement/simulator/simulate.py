"""simulate plays a workload against a SimCluster: the live policies, on a virtual clock.

    arrival -> RouterMachine(RouterPolicy) -> PrefillMachine(PrefillPolicy) -> links -> DecodeMachine(DecodePolicy)
                    ^                              reports, as late as in life                    |
                    +------ finished; or preempted, handoff failed, worker lost: sent again ------+

The same objects that serve decide here (cluster.router.policy, prefill_worker.policy, decode_worker.policy,
mixed_worker.policy, engine.pages.pool). A MixedMachine is both of the above in one; with pipeline stages each of them
has a batch in every stage. This module builds the cluster, lets requests come and workers die, drain and change their
roles; it draws no random number: one workload gives one outcome. What it leaves out beside what RouterMachine does:
generated tokens that a later prompt repeats (their pages are not cached here).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from cluster.router.accounts import WorkerView
from decode_worker.options import DecodeOptions
from decode_worker.policy import DecodePolicy
from engine.pages.pool import PagePool
from mixed_worker.options import MixedOptions
from mixed_worker.policy import MixedPolicy
from placement.simulator.clients import Clients, LoopLedger
from placement.simulator.clock import VirtualClock
from placement.simulator.cluster import Loss, RoleChange, SetupError, SimCluster, SimWorker
from placement.simulator.costs import costs_of
from placement.simulator.ledger import Ledger
from placement.simulator.machines.attempt import Decoder, Dispatcher, Prefiller
from placement.simulator.machines.decode import DecodeMachine
from placement.simulator.machines.host import Host, TimeSlices
from placement.simulator.machines.mixed import MixedMachine
from placement.simulator.machines.pipelined import PipelinedDecodeMachine, PipelinedMixedMachine
from placement.simulator.machines.prefill import PrefillMachine
from placement.simulator.machines.router import OnAssigned, RouterMachine
from placement.simulator.machines.routers import Routers
from placement.simulator.outcome import Outcome
from placement.simulator.pages import CountedPool
from placement.workload.requests import Workload
from prefill_worker.options import PrefillOptions
from prefill_worker.policy import PrefillPolicy
from worker.steps.costs import StepCosts

PING_S = 0.2  # a live router says so often that nothing of its is on the way to a worker that shall change
Machine = PrefillMachine | DecodeMachine


def simulate(cluster: SimCluster, workload: Workload) -> Outcome:
    """Every request of the workload, to its end or its rejection. Same arguments, same outcome."""
    return Simulation(cluster, workload).play()


def simulate_together(tenants: Sequence[tuple[SimCluster, Workload]]) -> list[Outcome]:
    """Clusters of several models, each with its own router, whose workers have devices in common, which each names
    (SimWorker.device): there they compute by turns. Their workers' names must differ."""
    clock, devices = VirtualClock(tenants[0][0].message_s), dict[str, Host]()
    for cluster, _ in tenants:
        devices |= {device: TimeSlices() for device in map(_device_of, cluster.workers) if device not in devices}
    playing = [Simulation(cluster, workload, None, clock, devices) for cluster, workload in tenants]
    for simulation in playing:
        simulation.begin()
    clock.run()
    return [simulation.ledger.outcome() for simulation in playing]


def _device_of(worker: SimWorker) -> str:
    return worker.device or worker.name


class Simulation:
    """`on_assigned` is told of each attempt that is sent. `clock`, `devices`: of several that are played together."""

    def __init__(
        self,
        cluster: SimCluster,
        workload: Workload,
        on_assigned: OnAssigned | None = None,
        clock: VirtualClock | None = None,
        devices: Mapping[str, Host] | None = None,
    ) -> None:
        sizes = {worker.page_size for worker in cluster.workers}
        if len(sizes) > 1:
            raise SetupError(f"page_size is {sorted(sizes)}; workers that exchange KV have one page size")
        self.cluster = cluster
        self.clock = clock if clock is not None else VirtualClock(cluster.message_s)
        self._clients = Clients(workload.loop, self.clock) if workload.loop is not None else None
        self.ledger = Ledger(workload) if self._clients is None else LoopLedger(workload, self._clients)
        self.routers = [
            RouterMachine(cluster, workload, self.clock, self.ledger, on_assigned, number)
            for number in range(cluster.num_routers)
        ]
        self._arrival_s: list[float] = workload.arrival_s.tolist()
        self.router: Dispatcher = self.routers[0] if len(self.routers) == 1 else Routers(self.routers, self._arrival_s)
        self.machines: dict[str, Machine] = {}
        self._has_prefixes = bool(workload.blocks)
        ttft_s, tpot_s = workload.targets_s(cluster.router.slo_ttft_ms / 1e3, cluster.router.slo_tpot_ms / 1e3)
        self._predicts = bool(ttft_s.any() or tpot_s.any())
        self._known_costs: list[tuple[SimWorker, StepCosts]] = []
        self._hosts = {name: host for shared in cluster.hosts for host in (Host(shared),) for name in shared.workers}
        if devices is not None:
            self._hosts |= {worker.name: devices[_device_of(worker)] for worker in cluster.workers}
        for worker in cluster.workers:
            self._up(worker)
        for machine in self.machines.values() if cluster.num_routers > 1 else ():
            machine.reporter.report_anew(self.clock.now)  # whose each is

    def play(self) -> Outcome:
        self.begin()
        self.clock.run()
        return self.ledger.outcome()

    def begin(self) -> None:
        """Have happen what is known from the first."""
        for loss in self.cluster.losses:
            self.clock.at(loss.at_s, self._lose, loss)
        for drain in self.cluster.drains:
            self.clock.at(drain.at_s, self._drain, drain.worker)
        for change in self.cluster.role_changes:
            self.clock.at(change.at_s, self._change_role, change)
        self.clock.at(self._arrival_s[0], self._arrive if self._clients is None else self._come_due, 0)

    def _arrive(self, index: int) -> None:
        if index + 1 == len(self._arrival_s):
            self.router.arrive(index, math.inf)
            return
        next_s = self._arrival_s[index + 1]
        self.router.arrive(index, next_s)
        self.clock.at(next_s, self._arrive, index + 1)

    def _come_due(self, index: int) -> None:
        """Of a closed loop: it is sent when a client is free."""
        assert self._clients is not None
        self._clients.ask(self._send, index)
        if index + 1 < len(self._arrival_s):
            self.clock.at(self._arrival_s[index + 1], self._come_due, index + 1)

    def _send(self, index: int) -> None:
        """When another one follows is not known, so the router is told that it may at any time."""
        self.ledger.on_sent(index, self.clock.now)
        self.router.arrive(index, 0.0)

    # workers

    def _up(self, worker: SimWorker) -> None:
        has_hits = worker.prefix_cache and self._has_prefixes
        pool = (PagePool if has_hits else CountedPool)(worker.num_pages, worker.page_size)
        self.router.on_worker_up(*self._made(worker, pool))

    def _made(self, worker: SimWorker, pool: PagePool) -> tuple[WorkerView, Prefiller | None, Decoder | None]:
        """The worker, from now on the one of its name; and what routers are told of it."""
        host = self._hosts.get(worker.name)
        options = worker.policy
        view = WorkerView(
            name=worker.name,
            role=worker.role,
            total_pages=worker.num_pages,
            page_size=worker.page_size,
            step_tokens=options.max_batch_tokens if isinstance(options, PrefillOptions) else 0,
            chunk_tokens=options.chunk_tokens if isinstance(options, MixedOptions) else 0,
            num_stages=worker.latency.stages,
        )
        if worker.role == "prefill":
            assert isinstance(options, PrefillOptions), worker.name
            prefill = PrefillMachine(self.router, worker, PrefillPolicy(pool, options), host)
            prefill.costs = self._costs(worker)
            self.machines[worker.name] = prefill
            return view, prefill, None
        stages = worker.latency.stages
        if worker.role == "decode":
            assert isinstance(options, DecodeOptions), worker.name
            machine = DecodeMachine if stages == 1 else PipelinedDecodeMachine
            policy = DecodePolicy(pool, options, name=worker.name, num_stages=stages)
            decode = machine(self.router, worker, policy, host)
            decode.costs = self._costs(worker)
            self.machines[worker.name] = decode
            return view, None, decode
        assert isinstance(options, MixedOptions), worker.name
        both = MixedPolicy(pool, options, name=worker.name, num_stages=stages)
        mixed: MixedMachine | PipelinedMixedMachine
        if stages == 1:
            mixed = MixedMachine(self.router, worker, both, host)
        else:
            mixed = PipelinedMixedMachine(self.router, worker, both, host)
        mixed.costs = self._costs(worker)
        self.machines[worker.name] = mixed
        return view, mixed.prompts, mixed

    def _costs(self, worker: SimWorker) -> StepCosts | None:
        """Not asked for where the router has no use for them."""
        if not self._predicts:
            return None
        for other, costs in self._known_costs:
            if other.latency is worker.latency and other.policy == worker.policy:
                return costs
        costs = costs_of(worker)
        self._known_costs.append((worker, costs))
        return costs

    def _lose(self, loss: Loss) -> None:
        machine = self.machines[loss.worker]
        if machine.is_dead:
            return
        machine.lose()
        self.ledger.counters["workers_lost"] += 1
        noticed_s = self.clock.now + self.cluster.noticed_s
        self.clock.at(noticed_s, self.router.on_worker_lost, loss.worker)
        if loss.back_s is not None:
            self.clock.at(max(loss.back_s, noticed_s), self._on_back, loss.worker)

    def _drain(self, worker: str) -> None:
        machine = self.machines[worker]
        if not machine.is_dead:
            machine.drain()
            self.router.on_drain()

    def _change_role(self, change: RoleChange) -> None:
        machine = self.machines[change.worker]
        if not machine.is_dead:
            self._drain(change.worker)
            self.clock.at(self.clock.now + PING_S, self._take_role, (machine, change))

    def _take_role(self, order: tuple[Machine, RoleChange]) -> None:
        """Once it is empty. If it dies before, its successor is what it was."""
        machine, change = order
        if machine.is_dead:
            return
        if not (machine.is_empty and self.router.has_left(change.worker)):
            self.clock.at(self.clock.now + PING_S, self._take_role, order)
            return
        self.ledger.counters["role_changes"] += 1
        machine.lose()
        view, prefill, decode = self._made(
            replace(machine.worker, role=change.role, policy=change.policy), machine.policy.pool
        )
        self.clock.tell(self._on_role_taken, (self.machines[change.worker], view, prefill, decode))

    def _on_role_taken(self, hello: tuple[Machine, WorkerView, Prefiller | None, Decoder | None]) -> None:
        machine, view, prefill, decode = hello
        if not machine.is_dead:
            self.router.on_role_changed(view, prefill, decode)
            machine.reporter.report_anew(self.clock.now)

    def _on_back(self, name: str) -> None:
        """As it was at first, whatever roles it has had."""
        self._up(next(worker for worker in self.cluster.workers if worker.name == name))
        self.router.on_worker_back()
