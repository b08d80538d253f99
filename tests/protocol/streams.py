"""The streams of the model: the router's with a worker, and the call of a prefill worker at a decode worker.

What one end says is put into the world's queues, and the other end hears it when the explorer says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, Protocol, cast

import grpc
import grpc.aio

from cluster.router.driver import Router
from cluster.router.links.worker_link import LinkState, WorkerEndpoint, WorkerLink
from kvrelay.v1 import worker_pb2 as pb
from tests.protocol.loop import ModelLoop
from tests.protocol.process import Process
from worker.awake import AwakeClock


class Post(Protocol):
    """What a stream has of the world."""

    loop: ModelLoop

    def put(self, way: str, message: Any) -> None: ...


class RouterSide(WorkerLink):
    """The router's link to one worker, without a stream: what goes down is put into the world's queue at once."""

    def __init__(self, post: Post, router: Router, router_name: str, worker: WorkerEndpoint) -> None:
        super().__init__(worker, router, AwakeClock(lambda: 0.0), router_id=router.router_id)  # it hears no silence
        # there is one clock only
        self.clock = cast(Any, SimpleNamespace(to_router_s=lambda ns, _: ns / 1e9, offset_ns=lambda ns, _: 0))
        self._post = post
        self._way = f"{router_name}>{worker.name}"

    def _put(self, message: pb.RouterMessage) -> None:
        if self.state is LinkState.READY:
            self._post.put(self._way, message)

    def on_stream(self, hello: pb.WorkerHello) -> None:
        self._seq = 0
        self._greet(pb.WorkerMessage(hello=hello))

    def on_broken(self, *, is_death: bool) -> None:
        self._lose("the stream broke", is_death=is_death)

    def hear(self, message: pb.WorkerMessage) -> None:
        if self.state is not LinkState.READY:
            return
        if message.HasField("outputs"):
            self._host.on_outputs(self, message.outputs)
        elif message.HasField("report"):
            self._host.on_report(self, message.report)


class Call:
    """A Handoff.Connect as both of its ends see it. What one end says goes through the world's queues; each call has
    its own, for nothing orders what is said in two of them."""

    def __init__(self, post: Post, number: int, source: Process, target: Process | None, target_name: str) -> None:
        self.source, self.target, self.target_name = source, target, target_name
        # and back: two decode workers may call each other
        self.down, self.up = f"{source.name}>{target_name}/{number}", f"{target_name}>{source.name}/-{number}"
        self.heard: deque[Any] = deque()  # by the source
        self.asked: deque[Any] = deque()  # of the target
        self.waiting: dict[str, Any] = {"source": None, "target": None}
        self.ended: tuple[Any, str] | None = None
        self.is_cancelled = False
        self.task: Any = None
        self._post = post

    # the source's end

    async def write(self, message: pb.PrefillMessage) -> None:
        self._say(message)

    def _say(self, message: pb.PrefillMessage | None) -> None:
        if self.source.is_alive:
            self._post.put(self.down, message)

    async def done_writing(self) -> None: ...

    async def read(self) -> Any:
        while not self.heard:
            if self.ended is not None or self.is_cancelled:
                return grpc.aio.EOF
            self.waiting["source"] = self._post.loop.create_future()
            await self.waiting["source"]
        return self.heard.popleft()

    def cancel(self) -> None:
        if not self.is_cancelled and self.ended is None:
            self.is_cancelled = True
            self._say(None)
            self.wake("source")

    async def close(self) -> None: ...

    async def code(self) -> Any:
        return self.ended[0] if self.ended else grpc.StatusCode.CANCELLED

    async def details(self) -> str:
        return self.ended[1] if self.ended else "cancelled"

    @property
    def stands(self) -> bool:
        return self.ended is None and not self.is_cancelled and self.task is not None and not self.task.done()

    def end(self, code: Any, details: str) -> None:
        self.ended = self.ended or (code, details)
        self.wake("source")

    # the target's end

    async def messages(self) -> AsyncIterator[pb.PrefillMessage]:
        while True:
            while not self.asked:
                self.waiting["target"] = self._post.loop.create_future()
                await self.waiting["target"]
            message = self.asked.popleft()
            if message is None:
                return
            yield message

    async def context_write(self, message: pb.DecodeMessage) -> None:
        self.answer(message)

    def answer(self, message: Any) -> None:
        """A message, or how it ends."""
        if self.target is not None and self.target.is_alive:
            self._post.put(self.up, message)

    async def abort(self, code: Any, details: str) -> None:
        raise Aborted(code, details)

    def wake(self, who: str) -> None:
        waiter, self.waiting[who] = self.waiting[who], None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class Aborted(Exception):
    """A servicer has ended the call with a code and a sentence."""
