"""World is a small cluster whose every step is a choice: the real router, roles, pairs and leases, and nothing else
real. Streams are queues of messages, a process is the objects that belong to it, an engine answers at once.

    choices()  what may happen now: a message arrives, half a step is done, half a segment is written, a fault
    do(choice) lets it happen, and checks what must always hold
    finish()   lets everything happen that will, time included, and checks what must hold in the end
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import grpc
import grpc.aio

from cluster.router.driver import Router
from cluster.router.links.worker_link import LinkState
from cluster.router.live.requests import NewRequest, RequestFailed
from cluster.router.live.timeline import Timeline
from cluster.router.monitoring.metrics import RouterMetrics
from cluster.router.options import RouterOptions
from cluster.router.served_model import ServedModel
from engine.pages.layout import KvLayout
from engine.pages.memory import KvMemory
from engine.types import ModelInfo, SamplingParams
from kv_transfer.decode_side.leases import LeaseKeeper
from kv_transfer.options import TransferOptions
from tests.protocol.fingerprint import fingerprint
from tests.protocol.loop import ModelLoop
from tests.protocol.process import Process, Streams, Watch, token_at
from tests.protocol.streams import Aborted, Call, RouterSide
from tests.protocol.threads import ModelSendThread
from worker.awake import AwakeClock
from worker.convert import sampling_to_proto
from worker.options import WorkerOptions

PROMPT = [7, 7, 7, 7, 7]
MAX_TOKENS = 3
MAX_CHOICES = 2_000
SETTLED_S = 400.0  # of the model's time, after which nothing may be left
DOCUMENTED = frozenset((grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.FAILED_PRECONDITION))


def answer() -> list[int]:
    return [token_at(len(PROMPT) + i) for i in range(MAX_TOKENS)]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is explored: which workers, and which faults how often in one history."""

    prefill: int = 1
    decode: int = 1
    faults: tuple[str, ...] = ()
    num_faults: int = 1
    prefix_cache: bool = False
    options: dict[str, Any] = field(default_factory=dict)


class World:
    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.numbers = itertools.count()  # in place of random ones
        self.loop = ModelLoop()
        self.faults_left = setting.num_faults
        self.queues: dict[tuple[str, str], deque[Any]] = {}
        self.processes: dict[str, Process] = {}
        self.senders: list[ModelSendThread] = []
        self.calls: list[Call] = []
        self.delivered: list[int] = []
        self.is_cancelled = False
        self._incarnations = itertools.count(1)
        self._acting: Process | None = None
        self._calling: Process | None = None
        ModelSendThread.made = staticmethod(self._on_sender)
        with self.loop.entered():
            self.router = Router("router", RouterOptions(**setting.options), clock=self.loop.time)
            for role, count in (("prefill", setting.prefill), ("decode", setting.decode)):
                for i in range(count):
                    self._start(f"{role}-{i}", role)
            sampling = sampling_to_proto(_greedy())
            request = NewRequest(id="a", prompt_ids=PROMPT, sampling=[sampling], arrived_s=0.0)
            self.submission = self.router.submit(request)
            self.loop.settle()

    # what may happen

    def choices(self) -> list[str]:
        found = [f"{source}>{target}" for (source, target), queue in self.queues.items() if queue]
        for process in self.processes.values():
            if process.is_alive and process.batch is not None:
                found.append(f"end {process.name}")
            elif process.is_alive and process.role.requests:
                found.append(f"begin {process.name}")
        for i, sender in enumerate(self.senders):
            if sender.can_move and sender.owner.is_alive:
                found.append(f"write {i}")
        return found

    def faults(self) -> list[str]:
        if not self.faults_left:
            return []
        found = []
        for kind in self.setting.faults:
            if kind == "cancel" and not self.is_cancelled:
                found.append(kind)
            elif kind in ("kill", "sever"):
                found += [f"{kind} {p.name}" for p in self.processes.values() if p.is_alive and self._is_linked(p)]
            elif kind == "cut":
                found += [f"cut {i}" for i, call in enumerate(self.calls) if _stands(call)]
            elif kind == "expire":
                found += [f"expire {i}" for i, timer in enumerate(self.loop.timers) if _is_expiry(timer)]
        return found

    def do(self, choice: str, *, is_new: bool = True) -> None:
        with self.loop.entered():
            verb, _, what = choice.partition(" ")
            if ">" in verb:
                source, _, target = verb.partition(">")
                self._deliver(source, target)
            else:
                getattr(self, f"_do_{verb}")(what)
            self.loop.settle()
            self._take_updates()
        if is_new:
            self.check()

    def _do_begin(self, name: str) -> None:
        self._act(self.processes[name]).begin_step()

    def _do_end(self, name: str) -> None:
        self._act(self.processes[name]).end_step()

    def _do_write(self, index: str) -> None:
        sender = self.senders[int(index)]
        self._act(sender.owner)
        sender.move()

    def _do_cancel(self, _: str) -> None:
        self.faults_left -= 1
        self.is_cancelled = True
        self.router.cancel(self.submission, "the client went away")

    def _do_kill(self, name: str) -> None:
        """The process is gone; each peer hears of it on its own stream, after what was sent before."""
        self.faults_left -= 1
        self._kill(self.processes[name])

    def _kill(self, process: Process) -> None:
        for call in self.calls:
            if _stands(call) and process in (call.source, call.target):
                self._break(call)
        process.is_alive = False
        for sender in self.senders:
            if sender.owner is process:
                sender.end.close()
        self._break_link(process)
        self.queues[process.name, "router"].append("up")  # Ray starts another

    def _do_sever(self, name: str) -> None:
        """The router and the worker lose each other; both live on."""
        self.faults_left -= 1
        process = self.processes[name]
        self._break_link(process)
        if process.streams.router is not None:
            process.streams.router.close()
        self.queues["router", name] = deque(["broken"])
        self.queues[name, "router"].append("up")

    def _do_cut(self, index: str) -> None:
        self.faults_left -= 1
        self._break(self.calls[int(index)])

    def _do_expire(self, index: str) -> None:
        self.faults_left -= 1
        timer = self.loop.timers[int(index)]
        self.loop.now_s = max(self.loop.now_s, timer.when())
        callback, args = timer._callback, timer._args  # type: ignore[attr-defined]
        timer.cancel()
        callback(*args)

    # streams

    def send(self, source: str, target: str, message: Any) -> None:
        sender = self.processes.get(source)
        if sender is None or sender.is_alive:
            self.queues.setdefault((source, target), deque()).append(message)

    def dial(self, source_name: str) -> Callable[[str], Any]:
        def dial(address: str) -> Any:
            name, _, incarnation = address.partition(":")
            target = self.processes.get(name)
            is_there = target is not None and target.is_alive and target.address.incarnation == incarnation
            call = Call(self, self.processes[source_name], target if is_there else None, name)
            self.calls.append(call)
            return SimpleNamespace(call=call, channel=call, close=lambda: _closed(call))

        return dial

    def watch(self) -> Watch:
        """Of the process whose pair is being opened."""
        assert self._calling is not None, "a pair is opened by nobody"
        return Watch(self._calling, self._kill)

    def _deliver(self, source: str, target: str) -> None:
        message = self.queues[source, target].popleft()
        if target == "router":
            self._to_router(source, message)
        elif source == "router":
            self._to_worker(self.processes[target], message)
        else:
            self._to_call(target, *message)

    def _to_router(self, source: str, message: Any) -> None:
        link = cast(Any, self.router._links[source])
        if message == "up":
            if not self.processes[source].is_alive:
                self._start(source, self.processes[source].options.role)
            else:
                self._join(self.processes[source])
        elif message == "broken":
            link.state = LinkState.LOST
            self.router.on_lost(link, "the stream broke", is_death=not self.processes[source].is_alive)
        elif link.state is LinkState.READY:
            self.router.on_outputs(link, message.outputs)

    def _to_worker(self, process: Process, message: Any) -> None:
        role = self._act(process).role
        if message == "broken":
            process.on_router_lost()
            return
        if process.streams.router is None:
            return  # the router has sent it on a stream of which it did not know yet that it was broken
        match message.WhichOneof("kind"):
            case "submit":
                role.on_submit(process.streams.router, message.submit)
            case "cancel":
                role.on_cancel(message.cancel.request_id, message.cancel.reason)
            case "reassign":
                role.on_reassign(message.reassign)
        process.streams.flush()

    def _to_call(self, target: str, call: Call, message: Any) -> None:
        if target == call.source.name:
            self._act(call.source)
            if isinstance(message, tuple):
                call.end(*message)
            else:
                call.heard.append(message)
                call.wake("source")
        elif call.target is None or not call.target.is_alive:
            call.end(grpc.StatusCode.UNAVAILABLE, "nobody is there")
        else:
            self._act(call.target)
            self._calling = call.source
            call.asked.append(message)
            call.wake("target")
            if call.task is None and message is not None:
                call.task = self.loop.create_task(self._serve(call))

    async def _serve(self, call: Call) -> None:
        assert call.target is not None
        servicer = call.target.role.reservations.handoffs
        ending = (grpc.StatusCode.OK, "")
        context = SimpleNamespace(write=call.context_write, abort=call.abort)
        try:
            await servicer.Connect(call.messages(), context)
        except Aborted as error:
            ending = error.args
        self.send(call.target.name, call.source.name, (call, ending))

    def _break(self, call: Call) -> None:
        """What was sent still arrives, on both ways; then each side hears that it is over."""
        assert call.target is not None
        for one, other in ((call.source, call.target), (call.target, call.source)):
            if not one.is_alive:
                continue
            ending = (grpc.StatusCode.UNAVAILABLE, "the stream broke") if other is call.source else None
            self.queues.setdefault((one.name, other.name), deque()).append((call, ending))
        call.is_cancelled = False

    def _break_link(self, process: Process) -> None:
        self.queues.pop(("router", process.name), None)
        self.queues.setdefault((process.name, "router"), deque()).append("broken")

    def _is_linked(self, process: Process) -> bool:
        return cast(Any, self.router._links[process.name]).state is LinkState.READY

    # processes

    def _start(self, name: str, role: str) -> None:
        incarnation = str(next(self._incarnations))
        process = Process(name, role, incarnation, prefix_cache=self.setting.prefix_cache, send=self.send)
        self.processes[name] = process
        if self.router._links.get(name) is None:
            self.router._links._links[name] = cast(Any, RouterSide(self, name, role))
        self._join(process)

    def _join(self, process: Process) -> None:
        link = cast(Any, self.router._links[process.name])
        if self.queues.pop(("router", process.name), None):  # the new stream is there before the old one's end
            self._act(process).on_router_lost()
        process.on_router(self.router.router_id)
        link.hello, link.state, link._seq = process.hello(), LinkState.READY, 0
        self.router.on_ready(link, link.hello)

    def _on_sender(self, sender: ModelSendThread) -> None:
        assert self._acting is not None, "a pair was opened by nobody"
        sender.owner, sender.target = self._acting, self.processes[sender.peer]
        self.senders.append(sender)

    def _act(self, process: Process) -> Process:
        self._acting = process
        return process

    # what must hold

    def _take_updates(self) -> None:
        updates, self.submission._updates = self.submission._updates, []
        for update in updates:
            self.delivered += [token.token_id for token in update.tokens]

    def check(self) -> None:
        """No token lost or doubled, no page in two places, and nothing is written but leased pages."""
        assert not self.loop.errors, self.loop.errors
        assert self.delivered == answer()[: len(self.delivered)], self.delivered
        self.router.check_invariants()
        for process in self.processes.values():
            if process.is_alive:
                process.role.check_invariants()
        for sender in self.senders:
            self._check_write(sender)

    def _check_write(self, sender: ModelSendThread) -> None:
        owner, target = sender.owner, sender.target
        segment = sender.writing
        if segment is None or not owner.is_alive or not target.is_alive or sender.end._receiver.is_closed:
            return
        table = target.role.reservations.handoffs.leases._table
        for page in segment.dst_pages:
            assert page in table._page_of, f"{owner.name} writes into page {page} of {target.name}, which is not leased"

    def finish(self) -> None:
        """Whatever comes, in any order, and all timers: then nothing is held, and the request has ended."""
        with self.loop.entered():
            while self.loop.now_s < SETTLED_S:
                self._run_out()
                if self._is_over() or not self.loop.fire_next():
                    break
                self.loop.settle()
                self._take_updates()
        self._check_end()

    def _run_out(self) -> None:
        """Until nothing changes but by time."""
        for _ in range(MAX_CHOICES):
            before = self.key
            for choice in self.choices():
                self.do(choice)
                if self.key != before:
                    break
            else:
                return
        raise AssertionError("it never comes to rest")

    def _is_over(self) -> bool:
        alive = [p for p in self.processes.values() if p.is_alive]
        return self.submission.is_over and not any(p.role.requests or p.pool.usage.held for p in alive)

    def _check_end(self) -> None:
        error = self.submission.error
        if error is None or self.faults_left == self.setting.num_faults:
            assert error is None, f"without a fault: {error}"
            assert self.submission.num_running == 0, "the request has no end"
            assert self.delivered == answer(), self.delivered
        else:
            assert isinstance(error, RequestFailed)
            assert error.code in DOCUMENTED, f"{error.code}: {error.message}"
        assert not self.router._dispatcher._live, "the router keeps a request that is over"
        for process in self.processes.values():
            if process.is_alive:
                usage = process.pool.usage
                assert not process.role.requests, f"{process.name} keeps {list(process.role.requests)}"
                assert not usage.held, f"{process.name} keeps {usage.held} pages"

    def close(self) -> None:
        """End what waits, in its own loop: left to the garbage collector it would end in another world's."""
        with self.loop.entered():
            for task in list(self.loop.tasks):
                task.cancel()
            self.loop.settle()

    @property
    def key(self) -> bytes:
        alive = [p for p in self.processes.values() if p.is_alive]
        queues = sorted((names, queue) for names, queue in self.queues.items() if queue)
        state = (self.router, queues, alive, self.senders, self.calls, self.submission, self.delivered)
        more = (self.faults_left, self.is_cancelled, list(self.loop.tasks), [t._callback for t in self.loop.timers])  # type: ignore[attr-defined]
        return fingerprint((state, more), opaque=OPAQUE)


def _greedy() -> Any:
    return SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)


async def _closed(call: Call) -> None:
    call.cancel()


def _stands(call: Call) -> bool:
    return call.ended is None and not call.is_cancelled and call.task is not None and not call.task.done()


def _is_expiry(timer: Any) -> bool:
    return isinstance(getattr(timer._callback, "__self__", None), LeaseKeeper)


OPAQUE = (
    World,
    AwakeClock,
    ModelLoop,
    KvMemory,
    KvLayout,
    SimpleNamespace,
    RouterMetrics,
    Timeline,
    ServedModel,
    Streams,
    RouterOptions,
    WorkerOptions,
    TransferOptions,
    ModelInfo,
    SamplingParams,
)  # they do not change, or nothing goes by them
