"""Worker is the life of a worker, whatever its role: it listens, drives one engine step by step, reports, and stops.

    make_worker --> start --> [take the role's next batch, run it in the engine's thread, tell the role] --> stop

It owns the engine's thread, the pool of the engine's pages, the streams with routers and the counters. What a step
computes, and what follows from it, is the role's (worker/role.py); which roles there are, worker/roles.py says.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import grpc.aio

from engine.engine import Engine
from engine.knobs import knobs_of
from engine.pages.pool import PageHash, PagePool, page_hashes
from engine.types import SampledToken, Step
from kv_transfer.transports.faulty import Faults
from kv_transfer.transports.registry import nccl_counters
from kvrelay.v1 import worker_pb2 as pb
from kvrelay.v1 import worker_pb2_grpc
from worker.awake import AwakeClock
from worker.convert import model_info_to_proto, page_news_to_proto, rope_to_proto, step_costs_to_proto
from worker.options import WorkerOptions, with_knobs_elsewhere, with_role
from worker.recording import record_calls
from worker.role import Role, RoleHost
from worker.role_change import Receivers, RoleChange
from worker.roles import kind_of
from worker.steps.costs import StepCosts
from worker.steps.run_ahead import BegunBatch, RunAhead
from worker.steps.watch import WatchedEngine
from worker.streams.router_link import RouterLink
from worker.streams.router_streams import RouterStreams
from worker.wire.rpc import bind, keepalive_options, make_server, secret_door, written

log = logging.getLogger(__name__)

SERVICE = "kvrelay.v1.Worker"
DRAIN_POLL_S = 0.02
CHECK_S = 0.5  # how soon an engine that breaks between two steps, or hangs in one, is noticed

RoleT = TypeVar("RoleT", bound=Role[Any])


def make_worker(options: WorkerOptions, engine: Engine, *, faults: Faults | None = None) -> Worker[Any]:
    """One of the role that `options` name. `faults` go into its handoffs. Raises ValueError for a role not known."""
    make_role = kind_of(options.role).load_driver()
    if not options.faults:
        return Worker(options, engine, make_role, faults=faults)
    from worker.faults.box import FaultBox
    from worker.faults.streams import FaultyStreams

    box = FaultBox(options.faults, options.name)
    box.install(engine)
    return Worker(options, engine, make_role, faults=box.faults, behind=(FaultyStreams(box),))


class Worker(Generic[RoleT]):
    def __init__(
        self,
        options: WorkerOptions,
        engine: Engine,
        make_role: Callable[[RoleHost], RoleT],
        *,
        faults: Faults | None = None,
        behind: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        """`behind`: interceptors of its server, for who has the secret."""
        self.options = options
        self.engine = engine
        self.faults = faults
        self.address = pb.WorkerAddress(
            name=options.name, incarnation=options.incarnation or secrets.token_hex(8), address=""
        )
        self.pool = PagePool(engine.layout.num_pages, engine.layout.page_size)
        self.counters: Counter[str] = Counter(nccl_counters(options.transfer.nccl, engine.memory, options.host))
        self.clock = AwakeClock()
        self.streams = RouterStreams(
            options.name,
            self,
            self.clock.now_s,
            report_interval_s=options.report_interval_s,
            drop_after_s=options.drop_router_after_s,
        )
        self.is_draining = False
        self.is_stopping = False
        self._is_leaving = False  # for good
        self._must_drain = False  # as an operator said: not for a role alone
        self._num_roles = 0
        self._has_stopped = False
        self._wake = asyncio.Event()
        self._step_loop: asyncio.Task[None] | None = None
        self._begin_role(make_role)
        self._watched = WatchedEngine(engine, self.clock.now_s, engine.num_stages)
        max_failed_steps = options.max_failed_steps
        self._steps: RunAhead[Any] = RunAhead(self._watched, self._step_of, max_failed_steps=max_failed_steps)
        self._change = RoleChange(self)
        keepalive = keepalive_options(options.transfer.peer_silent_s)
        self._server = make_server(secret_door(options.secret), behind=behind, options=keepalive)
        worker_pb2_grpc.add_WorkerServicer_to_server(self.streams, self._server)
        worker_pb2_grpc.add_HandoffServicer_to_server(Receivers(lambda: self.role.receiver), self._server)

    async def start(self) -> pb.WorkerAddress:
        """Listen and run. Raises OSError when the port is taken."""
        port = bind(self._server, self.options.host, self.options.port, self.options.tls)
        self.address.address = written(self.options.host, port)
        await self._server.start()
        self.clock.start()
        self.streams.start()
        self._step_loop = asyncio.get_running_loop().create_task(self._run())
        log.info("%s serves %s on %s", self.options.name, self.options.role, self.address.address)
        return self.address

    async def stop(self, grace_s: float = 0.0) -> None:
        """Take no more, let what runs end within `grace_s`, then stop."""
        self._is_leaving = True
        self._drain()
        await self._change.end()
        deadline = time.monotonic() + grace_s
        while (self.role.requests or self.streams.has_unread) and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)
        self.is_stopping = True
        for request_id in list(self.role.requests):
            self.role.on_cancel(pb.Cancel(request_id=request_id, reason="the worker stops"))
        await self.streams.stop()
        await self.role.stop_serving()
        await self._server.stop(0)
        self._has_stopped = True
        self.wake()
        if self._step_loop is not None:
            await asyncio.gather(self._step_loop, return_exceptions=True)  # a step that runs ends, and frees its pages
        await self.role.close()
        self._steps.close()
        await self.clock.stop()

    async def wait_broken(self) -> None:
        """Raises what broke the step loop, the reports, or the engine while it stood idle or hung, if ever: whoever
        keeps the worker must end it, for it serves nothing. Returns when the loop has ended."""
        assert self._step_loop is not None, "wait_broken before start"
        while not self._step_loop.done():
            self.engine.check()
            self.streams.check()
            self._change.check()
            if self.options.step_timeout_s:
                self._watched.check(self.options.step_timeout_s)
            await asyncio.wait({self._step_loop}, timeout=CHECK_S)
        if not self._step_loop.cancelled():
            self._step_loop.result()

    def check_invariants(self) -> None:
        self.role.check_invariants()

    # What routers send: WorkerHost

    def hello(self) -> pb.WorkerHello:
        return pb.WorkerHello(
            worker=self.address,
            role=self.options.role,
            model=model_info_to_proto(self.engine.info),
            rope=rope_to_proto(self.engine.info.rope),
            num_pages=self.pool.num_pages,
            page_size=self.pool.page_size,
            max_batch=self.role.max_batch,
            limits=self.options.limits,
        )

    def on_submit(self, link: RouterLink, submit: pb.Submit) -> None:
        if self._change.is_settled:  # a router that has come meanwhile: the role that would take it is ending
            why = f"{self.options.name} changes its role"
            link.event(submit.request, pb.EVENT_KIND_FAILED, reason=why, cause=pb.FAILURE_CAUSE_ROOM)
            link.flush()
            return
        self.role.on_submit(link, submit)

    def on_begin(self, begin: pb.Begin) -> None:
        self.role.on_begin(begin.request_id)

    def on_cancel(self, cancel: pb.Cancel) -> None:
        self.role.on_cancel(cancel)

    def on_reassign(self, reassign: pb.Reassign) -> None:
        self.role.on_reassign(reassign)

    def on_move(self, move: pb.Move) -> None:
        self.role.on_move(move)

    def on_drain(self, drain: pb.Drain) -> None:
        self._must_drain = not drain.undo
        if not drain.undo:
            self._change.call_off()
            self._drain()
        elif self._change.is_settled:
            self._change.call_off()  # what was to come after it
        elif not self._is_leaving:
            self._change.call_off()
            self.is_draining = False
            log.info("%s takes new requests again", self.options.name)
            self.streams.flush()

    def _drain(self) -> None:
        """Routers hear of it soon, and have what is decoded moved elsewhere."""
        if not self.is_draining:
            log.info("%s drains", self.options.name)
            self.is_draining = True
            self.streams.ask_who_has_left()
        self.streams.flush()

    @property
    def is_drained(self) -> bool:
        """Nothing runs here, or will before it takes requests again."""
        return self.is_draining and not (self.role.requests or self.pool.usage.held) and self.streams.all_have_left

    def on_set_role(self, wanted: pb.SetRole) -> None:
        if self._change.is_settled:
            self._change.then(partial(self.on_set_role, wanted))
            return
        knobs = {"chunk_tokens": wanted.chunk_tokens} if wanted.HasField("chunk_tokens") else {}
        options = with_role(self.options, wanted.role, knobs)
        if wanted.role == self.options.role:
            if knobs:
                self._take_knobs(options)
            else:
                self.on_drain(pb.Drain(undo=True))
        else:
            self._must_drain = False  # it is to work in that role
            self._change.begin(lambda: with_role(self.options, wanted.role, knobs))
            self._drain()

    def take_knobs(self, knobs: Mapping[str, Any]) -> None:
        """Those that its role has, of those that may change while it computes; another role's hold once it has that."""
        own = {name: value for name, value in knobs.items() if name in knobs_of(type(self.options.policy))}
        if own:
            self._take_knobs(with_role(self.options, self.options.role, own))
        self.options = with_knobs_elsewhere(self.options, knobs)

    def _take_knobs(self, options: WorkerOptions) -> None:
        """Those of its role that may change while it computes."""
        policy: Any = self.role.policy
        if not hasattr(options.policy, "chunk_tokens"):
            raise ValueError(f"{options.name} is a {options.role} worker, which has no chunk_tokens")
        policy.set_chunk_tokens(options.policy.chunk_tokens)
        self.options = options
        self.streams.say_hello()

    def take_role(self, options: WorkerOptions) -> None:
        """Of these options: nothing of the last one is left. Pairs with it were pairs with another worker."""
        self.options = options
        self._begin_role(kind_of(options.role).load_driver())
        self.address.incarnation = f"{self.address.incarnation.partition('.')[0]}.{self._num_roles}"
        self.is_draining = self._is_leaving or self._must_drain
        self.streams.greet_again()

    def _begin_role(self, make_role: Callable[[RoleHost], RoleT]) -> None:
        self.role = make_role(self)
        self._num_roles += 1
        if self.options.record:
            record_calls(self.role.policy, self.options.record, self.options.name, self.engine.num_stages)

    def on_router_lost(self, router_id: str) -> None:
        for request_id, request in list(self.role.requests.items()):
            if request.state.router_id == router_id:
                self.role.on_cancel(pb.Cancel(request_id=request_id, reason=f"router {router_id} is lost"))

    def report(self) -> pb.WorkerReport:
        report, usage = self.role.report(), self.pool.usage
        report.cached_pages, report.total_pages = usage.cached, usage.total
        report.draining, report.drained = self.is_draining, self.is_drained
        report.step_age_ms, report.loop_lag_ms = round(self._watched.age_s * 1e3), round(self.clock.lag_s * 1e3)
        report.num_tasks = self.clock.num_tasks
        report.prompt_share = self._watched.times.prompt_share
        if costs := self.step_costs():
            report.step_costs.CopyFrom(step_costs_to_proto(costs))
        for name, count in self.counters.items():
            report.counters[name] += count  # some count on both sides of a handoff: a worker may be on either
        report.counters["adapter_loads"] = self.engine.adapters.num_loads
        report.counters["prefix_hit_tokens"] = self.pool.hit_tokens
        report.counters["prefix_lookup_tokens"] = self.pool.lookup_tokens
        return report

    @property
    def _phases_computed(self) -> Collection[str]:
        """Of its role; a mixed worker without chunks may never read."""
        phases = kind_of(self.options.role).phases
        return phases if getattr(self.options.policy, "chunk_tokens", 1) else ("decode",)

    def add_page_news(self, report: pb.WorkerReport, told: int) -> int:
        if "prefill" in kind_of(self.options.role).phases:
            page_news_to_proto(self.pool.news_since(told), report)
        return self.pool.num_news

    # For the role: RoleHost

    def wake(self) -> None:
        self._wake.set()

    def step_costs(self) -> StepCosts | None:
        return self._watched.times.costs(self._phases_computed)

    def page_hashes(self, tokens: Sequence[int], parent: PageHash = b"") -> list[PageHash]:
        if not self.options.prefix_cache:
            return []
        return page_hashes(tokens, self.pool.page_size, salt=self.engine.info.fingerprint.encode(), parent=parent)

    # The step loop

    async def _run(self) -> None:
        if self.engine.can_overlap:
            await self._run_ahead()
            return
        while not self._has_stopped:
            batch = self.role.next_batch()
            if batch is None:
                await self._sleep()
            else:
                self._on_step(batch, await self._steps.run(batch))

    async def _run_ahead(self) -> None:
        """On a GPU the next step is prepared and begun while the last one runs, with its tokens still to come: the
        GPU never waits for what is done here. The second of two may compute a token for a request that has ended with
        the first, which nobody reads. Of an engine in pipeline stages each is kept busy with a step of its own."""
        begun: deque[BegunBatch[Any]] = deque()
        while not self._has_stopped or begun:
            if await self._begin_next(begun):
                continue
            if begun:
                first = begun.popleft()
                self._on_step(first.batch, await self._steps.finish(first))
            else:
                await self._sleep()

    async def _begin_next(self, begun: deque[BegunBatch[Any]]) -> bool:
        """Begin one more step, if there is one to begin now."""
        if self._has_stopped or len(begun) == max(2, self.engine.num_stages):
            return False
        if begun and (begun[-1].must_finish or self.role.waits_for_tokens):
            return False
        batch = self.role.next_batch()
        if batch is None:
            return False
        begun.append(await self._steps.begin(batch, begun[-1] if begun else None))
        return True

    def _step_of(self, batch: Any) -> Step:
        return self.role.step_of(batch)

    def _on_step(self, batch: object, tokens: Sequence[SampledToken]) -> None:
        self.counters["steps"] += 1
        self.role.on_step(batch, tokens)
        self.streams.flush()

    async def _sleep(self) -> None:
        """Until something has changed."""
        self._wake.clear()
        if not self._has_stopped:
            await self._wake.wait()
