"""The streams of the model: the router's with a worker, and the call of a prefill worker at a decode worker.

What one end says is put into the world's queues, and the other end hears it when the explorer says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, Protocol

import grpc
import grpc.aio

from cluster.router.links.worker_link import LinkState, WorkerEndpoint
from kvrelay.v1 import worker_pb2 as pb
from tests.protocol.loop import ModelLoop
from tests.protocol.process import Process


class Post(Protocol):
    """What a stream has of the world."""

    loop: ModelLoop

    def send(self, source: str, target: str, message: Any) -> None: ...


class RouterSide:
    """The router's link to one worker: WorkerLink without a stream."""

    def __init__(self, world: Post, name: str, role: str) -> None:
        self.worker = WorkerEndpoint(name=name, role=role, address=name)
        self.name = name
        self.state = LinkState.CONNECTING
        self.hello: pb.WorkerHello | None = None
        self.clock = SimpleNamespace(to_router_s=lambda _, now_s: now_s)
        self._world = world
        self._seq = 0

    @property
    def address(self) -> pb.WorkerAddress:
        assert self.hello is not None
        return self.hello.worker

    def submit(self, request: pb.RequestState, decode: pb.WorkerAddress) -> int:
        self._seq += 1
        self._put(pb.RouterMessage(submit=pb.Submit(seq=self._seq, request=request, decode=decode)))
        return self._seq

    def cancel(self, request_id: str, reason: str) -> None:
        self._put(pb.RouterMessage(cancel=pb.Cancel(request_id=request_id, reason=reason)))

    def reassign(self, request_id: str, decode: pb.WorkerAddress) -> None:
        self._put(pb.RouterMessage(reassign=pb.Reassign(request_id=request_id, decode=decode)))

    def _put(self, message: pb.RouterMessage) -> None:
        if self.state is LinkState.READY:
            self._world.send("router", self.name, message)


class Call:
    """A Handoff.Connect as both of its ends see it. What one end says goes through the world's queues."""

    def __init__(self, world: Post, source: Process, target: Process | None, target_name: str) -> None:
        self.source, self.target, self.target_name = source, target, target_name
        self.heard: deque[Any] = deque()  # by the source
        self.asked: deque[Any] = deque()  # of the target
        self.waiting: dict[str, Any] = {}
        self.ended: tuple[Any, str] | None = None
        self.is_cancelled = False
        self.task: Any = None
        self._world = world

    # the source's end

    async def write(self, message: pb.PrefillMessage) -> None:
        self._world.send(self.source.name, self.target_name, (self, message))

    async def done_writing(self) -> None: ...

    async def read(self) -> Any:
        while not self.heard:
            if self.ended is not None or self.is_cancelled:
                return grpc.aio.EOF
            self.waiting["source"] = self._world.loop.create_future()
            await self.waiting["source"]
        return self.heard.popleft()

    def cancel(self) -> None:
        if not self.is_cancelled and self.ended is None:
            self.is_cancelled = True
            self._world.send(self.source.name, self.target_name, (self, None))
            self.wake("source")

    async def close(self) -> None: ...

    async def code(self) -> Any:
        return self.ended[0] if self.ended else grpc.StatusCode.CANCELLED

    async def details(self) -> str:
        return self.ended[1] if self.ended else "cancelled"

    def end(self, code: Any, details: str) -> None:
        self.ended = self.ended or (code, details)
        self.wake("source")

    # the target's end

    async def messages(self) -> AsyncIterator[pb.PrefillMessage]:
        while True:
            while not self.asked:
                self.waiting["target"] = self._world.loop.create_future()
                await self.waiting["target"]
            message = self.asked.popleft()
            if message is None:
                return
            yield message

    async def context_write(self, message: pb.DecodeMessage) -> None:
        assert self.target is not None
        self._world.send(self.target.name, self.source.name, (self, message))

    async def abort(self, code: Any, details: str) -> None:
        raise Aborted(code, details)

    def wake(self, who: str) -> None:
        waiter = self.waiting.pop(who, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class Aborted(Exception):
    """A servicer has ended the call with a code and a sentence."""
