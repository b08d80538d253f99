"""Cluster is the real router, roles, pairs and leases of a small cluster, in one thread: streams are queues of
messages, a process is the objects that belong to it. It delivers, starts and breaks what it is told to and chooses
nothing.

    router-0>prefill-0      what a router has sent to a worker, and the other way
    prefill-0>decode-0/3    what a prefill worker has said in its handoff stream number 3
    decode-0>prefill-0/-3   and what it was answered

What is counted is counted for each process, so that steps of two of them lead to one state in both orders.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import grpc
import grpc.aio

from cluster.router.driver import Router
from cluster.router.links.worker_link import LinkState, WorkerEndpoint
from cluster.router.options import RouterOptions
from kvrelay.v1 import worker_pb2 as pb
from tests.protocol.loop import ModelLoop, owner
from tests.protocol.process import Link, Process, Watch
from tests.protocol.setting import Setting
from tests.protocol.streams import Aborted, Call, RouterSide
from tests.protocol.threads import ModelSendThread
from worker.roles import ROLES

BROKEN, UP = "broken", "up"  # beside messages: a stream's end is heard, a worker is dialled again


class Cluster:
    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.loop = ModelLoop()
        self.queues: dict[str, deque[Any]] = {}
        self.processes: dict[str, Process] = {}
        self.senders: dict[str, ModelSendThread] = {}
        self.calls: dict[str, Call] = {}  # by both of their ways
        self.kills = 0
        self.router_name = ""
        self.router_ids: dict[str, str] = {}  # by name
        self._counts: Counter[str] = Counter()
        self._calling: Process | None = None
        ModelSendThread.made = staticmethod(self._on_sender)

    # processes

    def start(self) -> None:
        for role in ROLES:
            for i in range(getattr(self.setting, role)):
                self._start(f"{role}-{i}", role)
        self.start_router()

    def _start(self, name: str, role: str) -> None:
        num_pages = getattr(self.setting, f"{role}_pages")
        self.processes[name] = Process(
            name, role, str(self.count(name)), num_pages=num_pages, prefix_cache=self.setting.prefix_cache
        )

    def count(self, what: str) -> int:
        self._counts[what] += 1
        return self._counts[what]

    def token(self) -> str:
        """In place of one by chance."""
        mine = getattr(owner.get(), "name", "router")
        return f"{mine}-{self.count(f'tokens of {mine}')}"

    def start_router(self) -> None:
        owner.set(None)
        self.router_name = f"router-{len(self.router_ids)}"
        self.router = Router("router", RouterOptions(**self.setting.options), clock=self.loop.time)
        self.router_ids[self.router_name] = self.router.router_id
        for process in self.processes.values():
            endpoint = WorkerEndpoint(name=process.name, role=process.options.role, address=process.name)
            self.router._links._links[process.name] = RouterSide(self, self.router, self.router_name, endpoint)
            if process.is_alive:
                self._join(process)
            else:
                self.put(f"{process.name}>{self.router_name}", UP)

    def end_router(self) -> None:
        """It is gone: what it had sent arrives, and then each worker hears of it."""
        self.loop.bury(self.router)
        for name, process in self.processes.items():
            self.link(name).state = LinkState.LOST
            self.queues.pop(f"{name}>{self.router_name}", None)
            if process.is_alive:
                self.put(f"{self.router_name}>{name}", BROKEN)

    def link(self, name: str) -> RouterSide:
        return cast(RouterSide, self.router._links[name])

    def is_linked(self, process: Process) -> bool:
        return process.is_alive and self.link(process.name).state is LinkState.READY

    def _join(self, process: Process) -> None:
        up = f"{process.name}>{self.router_name}"

        def send(message: pb.WorkerMessage) -> None:
            if process.is_alive:
                self.put(up, message)

        self.queues.pop(f"{self.router_name}>{process.name}", None)
        self.act(process).streams.join(Link(self.router.router_id, send))
        owner.set(self.router)
        self.link(process.name).on_stream(process.hello())

    def kill(self, process: Process) -> None:
        """The process is gone; each peer hears of it on its own stream, after what was sent before."""
        self.kills += 1
        for call in self.standing:
            if process in (call.source, call.target):
                self.break_call(call)
        process.is_alive, process.batch = False, None
        self.loop.bury(process)
        for sender in self.senders.values():
            if sender.owner is process:
                sender.end.close()
        self._tell_router(process)

    def sever(self, process: Process) -> None:
        """The router and the worker lose each other, and what was on its way down; both live on."""
        if (link := process.streams.link(self.router.router_id)) is not None:
            link.close()
        self.queues[f"{self.router_name}>{process.name}"] = deque([BROKEN])
        self._tell_router(process)

    def _tell_router(self, process: Process) -> None:
        """It hears that the stream broke, then it dials again; meanwhile Ray has started who had died."""
        self.queues.setdefault(f"{process.name}>{self.router_name}", deque()).extend((BROKEN, UP))

    def act(self, process: Process) -> Process:
        """Whatever is made now is made by it."""
        owner.set(process)
        return process

    def _on_sender(self, sender: ModelSendThread) -> None:
        process = owner.get()
        assert isinstance(process, Process), "a pair was opened by nobody"
        sender.owner, sender.target = process, self.processes[sender.peer]
        self.senders[f"{process.name}/{self.count(f'senders of {process.name}')}"] = sender

    @property
    def moving(self) -> dict[str, ModelSendThread]:
        """Those whose threads still run."""
        return {name: sender for name, sender in self.senders.items() if sender.owner.is_alive and not sender.is_over}

    # streams

    def put(self, way: str, message: Any) -> None:
        self.queues.setdefault(way, deque()).append(message)

    def dial(self, source_name: str) -> Callable[[str], Any]:
        def dial(address: str) -> Any:
            name, _, incarnation = address.partition(":")
            target = self.processes.get(name)
            is_there = target is not None and target.is_alive and target.address.incarnation == incarnation
            number = self.count(f"calls of {source_name}")
            call = Call(self, number, self.processes[source_name], target if is_there else None, name)
            self.calls[call.up] = self.calls[call.down] = call
            return SimpleNamespace(call=call, channel=call, close=lambda: _closed(call))

        return dial

    @property
    def standing(self) -> list[Call]:
        return [call for way, call in self.calls.items() if way == call.down and call.stands]

    def watch(self) -> Watch:
        """Of the process whose pair is being opened."""
        assert self._calling is not None, "a pair is opened by nobody"
        return Watch(self._calling, self.kill)

    def deliver(self, way: str) -> None:
        message = self.queues[way].popleft()
        if not self.queues[way]:
            del self.queues[way]
        source, _, target = way.partition(">")
        if way in self.calls:
            self._to_call(self.calls[way], way, message)
        elif target.startswith("router-"):
            self._to_router(self.processes[source], message)
        else:
            self._to_worker(self.processes[target], source, message)

    def _to_router(self, process: Process, message: Any) -> None:
        link = self.link(process.name)
        owner.set(self.router)
        if message == UP:
            if not process.is_alive:
                self._start(process.name, process.options.role)
            self._join(self.processes[process.name])
        elif message == BROKEN:
            link.on_broken(is_death=not process.is_alive)
        else:
            link.hear(message)

    def _to_worker(self, process: Process, router: str, message: Any) -> None:
        streams = self.act(process).streams
        router_id = self.router_ids[router]
        if message == BROKEN:
            streams.end(router_id)
        else:
            streams.hear(router_id, message)

    def _to_call(self, call: Call, way: str, message: Any) -> None:
        if way == call.up:
            self.act(call.source)
            if isinstance(message, tuple):
                call.end(*message)
            else:
                call.heard.append(message)
                call.wake("source")
        elif call.target is None or not call.target.is_alive:
            call.end(grpc.StatusCode.UNAVAILABLE, "nobody is there")
        else:
            self.act(call.target)
            self._calling = call.source
            call.asked.append(message)
            call.wake("target")
            if call.task is None and message is not None:
                call.task = self.loop.create_task(self._serve(call, call.target))

    async def _serve(self, call: Call, target: Process) -> None:
        servicer = target.reservations.handoffs
        ending = (grpc.StatusCode.OK, "")
        context = SimpleNamespace(write=call.context_write, abort=call.abort)
        try:
            await servicer.Connect(call.messages(), context)
        except Aborted as error:
            ending = error.args
        call.answer(ending)

    def break_call(self, call: Call) -> None:
        """What was sent still arrives, on both ways; then each side hears that it is over."""
        assert call.target is not None
        if call.source.is_alive:
            self.put(call.up, (grpc.StatusCode.UNAVAILABLE, "the stream broke"))
        if call.target.is_alive:
            self.put(call.down, None)
        call.is_cancelled = False


async def _closed(call: Call) -> None:
    call.cancel()
