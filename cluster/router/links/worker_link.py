"""WorkerLink is the router's side of one worker: one stream, opened again for as long as the worker is the cluster's.

    connecting --hello--> ready --silence, a broken stream--> lost --backoff--> connecting ...

It owns the stream, the heartbeat and the worker's clock; it decides nothing. What comes up is handed to the LinkHost
(the router) in the event loop, in the order it came. A worker is lost when its stream ends. It answers a ping every few
beats, so silence means that it is stopped, hung or cut off, or has no core: from `dead_after_s` on the LinkHost is
asked at every beat whether that is enough. Everything sent on a broken stream is lost with it: the worker drops this
router's requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import grpc
import grpc.aio

from cluster.router.links.clock_offset import ClockOffset
from kvrelay.v1 import worker_pb2 as pb
from kvrelay.v1 import worker_pb2_grpc
from worker.awake import AwakeClock
from worker.roles import ROLES, Phase, kind_of
from worker.wire.rpc import PROTOCOL_VERSION, open_channel, secret_metadata
from worker.wire.tls import TlsError, TlsFiles

log = logging.getLogger(__name__)

MIN_BACKOFF_S, MAX_BACKOFF_S = 0.1, 1.0
HELLO_TIMEOUT_S = 5.0
BEAT_S = 0.2
BEATS_A_PING = 2
HUNG_UP = " in the TLS handshake; see whether its time of day and its tls.ca let this router's certificate pass"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEndpoint:
    """A worker that belongs to the cluster, as whoever deploys says."""

    name: str
    role: str
    address: str  # host:port
    trouble: str = field(default="", compare=False)  # what whoever deploys has against it
    is_leaving: bool = field(default=False, compare=False)  # it is drained soon, and then ended
    model: str = ""  # that it serves, as the spec names it; empty: the cluster's own


class LinkState(StrEnum):
    CONNECTING = "connecting"
    READY = "ready"
    LOST = "lost"


class WorkerRefused(Exception):
    """What answers at the address cannot be used. One sentence naming what differs."""


class LinkHost(Protocol):
    """What the router does with what comes up. Called in the event loop; must return at once."""

    def on_ready(self, link: WorkerLink, hello: pb.WorkerHello) -> None:
        """The worker has said hello. Raises WorkerRefused if it does not fit the others."""

    def on_hello_again(self, link: WorkerLink, hello: pb.WorkerHello) -> None:
        """It has another role, or other chunks. Raises WorkerRefused as on_ready does."""

    def on_outputs(self, link: WorkerLink, outputs: pb.Outputs) -> None: ...

    def on_report(self, link: WorkerLink, report: pb.WorkerReport) -> None: ...

    @property
    def report_gap_s(self) -> float:
        """Between two reports of a worker."""

    def has_left(self, link: WorkerLink) -> bool:
        """Whether it drains, and nothing is there or on its way."""

    def on_silent(self, link: WorkerLink, silent_s: float) -> str:
        """Nothing has come from it for so long. Returns why it is to be given up; empty: not yet."""

    def on_heard(self, link: WorkerLink) -> None:
        """It was silent, and is not any more."""

    def on_lost(self, link: WorkerLink, reason: str, *, is_death: bool) -> None:
        """`is_death`: its process may have died, or hangs."""


class WorkerLink:
    def __init__(
        self,
        worker: WorkerEndpoint,
        host: LinkHost,
        awake: AwakeClock,
        *,
        router_id: str,
        secret: str = "",
        tls: TlsFiles | None = None,
        dead_after_s: float = 2.0,
    ) -> None:
        self.worker = worker
        self.state = LinkState.CONNECTING
        self.hello: pb.WorkerHello | None = None
        self.reason = "not connected yet"  # why it is not ready
        self.losses = 0
        self.clock = ClockOffset()
        self.time_of_day = ClockOffset()
        self._host = host
        self._awake = awake
        self._router_id = router_id
        self._secret = secret
        self._tls = tls
        self.dead_after_s = dead_after_s
        self._outbox: asyncio.Queue[pb.RouterMessage | None] = asyncio.Queue()
        self._seq = 0
        self._order_ns = 0  # when it was told to leave, on our clock; 0: it has said since how it stands
        self._pong_ns = 0  # when the newest ping was made that it has answered
        self._heard_s = 0.0  # by the awake clock
        self._is_silent = False
        self._backoff_s = MIN_BACKOFF_S
        self._task: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.worker.name

    @property
    def role(self) -> str:
        """As it says itself: one that has changed it has another than it was started with."""
        return self.worker.role if self.hello is None else self.hello.role

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Of a request's life, that it computes."""
        return kind_of(self.role).phases

    @property
    def is_leaving(self) -> bool:
        """It is about to take nothing new, though its last report may not say so yet."""
        return self.worker.is_leaving or self._order_ns > 0

    @property
    def address(self) -> pb.WorkerAddress:
        """Where prefill workers reach it. Asserts that it has said hello."""
        assert self.hello is not None, f"{self.name} has not said hello"
        return self.hello.worker

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"link to {self.name}")

    def leave(self) -> None:
        """The worker does not belong to the cluster any more: lost at once; `close` ends the stream."""
        self._lose("it is no member any more", is_death=False, level=logging.INFO)

    async def close(self) -> None:
        self.leave()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    # what goes down; dropped when the link is not ready, because the router is told of the loss anyway

    def submit(self, write: Callable[[pb.RequestState], None], decode: pb.WorkerAddress) -> int:
        """Send a request to a prefill worker; returns the Submit's number on this stream. `write`: into the message, as
        one that were made before would be copied, prompt and all."""
        self._seq += 1
        message = pb.RouterMessage()
        submit = message.submit
        submit.seq = self._seq
        submit.decode.CopyFrom(decode)
        write(submit.request)
        self._put(message)
        return self._seq

    def cancel(self, request_id: str, reason: str, last_move: int | None = None) -> None:
        """`last_move`: it runs on elsewhere, and may come again by a later one."""
        cancel = pb.Cancel(request_id=request_id, reason=reason, last_move=last_move)
        self._put(pb.RouterMessage(cancel=cancel))

    def begin(self, request_id: str) -> None:
        self._put(pb.RouterMessage(begin=pb.Begin(request_id=request_id)))

    def reassign(self, request_id: str, decode: pb.WorkerAddress) -> None:
        self._put(pb.RouterMessage(reassign=pb.Reassign(request_id=request_id, decode=decode)))

    def move(self, request_id: str, decode: pb.WorkerAddress, number: int, *, unread: bool) -> None:
        move = pb.Move(request_id=request_id, decode=decode, number=number, unread=unread)
        self._put(pb.RouterMessage(move=move))

    def drain(self, *, undo: bool) -> None:
        self._put(pb.RouterMessage(drain=pb.Drain(undo=undo)))
        self._order_ns = 0 if undo else time.monotonic_ns()

    def set_role(self, role: str, chunk_tokens: int | None) -> None:
        if role != self.role:
            self._order_ns = time.monotonic_ns()
        elif chunk_tokens is None:  # it is taken back
            self._order_ns = 0
        self._put(pb.RouterMessage(set_role=pb.SetRole(role=role, chunk_tokens=chunk_tokens)))

    def _put(self, message: pb.RouterMessage) -> None:
        if self.state is LinkState.READY:
            self._outbox.put_nowait(message)

    # the stream

    async def _run(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        while True:
            try:
                await self._serve_once()
            except (grpc.aio.AioRpcError, WorkerRefused, TlsError, TimeoutError) as error:
                self._lose(_sentence(error, self._tls), is_death=self._tells_of_death(error))
            except Exception as error:  # our bug: it must neither end the link nor stay unseen
                log.exception("the link to %s failed", self.name)
                self._lose(f"{type(error).__name__}: {error}", is_death=False)
            if task.cancelling():  # gRPC keeps a cancel to itself that comes in the moment in which a call fails
                return
            await asyncio.sleep(self._backoff_s)
            self._backoff_s = min(self._backoff_s * 2, MAX_BACKOFF_S)

    def _tells_of_death(self, error: Exception) -> bool:
        """Not a connection that breaks when we stood still: gRPC's own pings, at either end, know of no sleep."""
        return isinstance(error, grpc.aio.AioRpcError) and not self._awake.stood_still_within(self.dead_after_s)

    async def _serve_once(self) -> None:
        channel = open_channel(self.worker.address, self._tls)
        try:
            await self._serve(channel)
        finally:
            await channel.close()

    async def _serve(self, channel: grpc.aio.Channel) -> None:
        """One stream from hello to its end, which is always an exception."""
        self._outbox = asyncio.Queue()
        self._seq = self._order_ns = self._pong_ns = 0
        self.clock, self.time_of_day = ClockOffset(), ClockOffset()
        stub = worker_pb2_grpc.WorkerStub(channel)
        call = stub.Connect(self._outgoing(), metadata=secret_metadata(self._secret))
        try:
            stream = aiter(call)
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                first = await anext(stream, None)
            self._greet(first)
            heartbeat = asyncio.get_running_loop().create_task(self._beat(call))
            try:
                await self._read(stream)
            except asyncio.CancelledError:
                if heartbeat.done() and not heartbeat.cancelled():  # it cancelled the call, nobody cancelled us
                    raise WorkerRefused(self.reason) from None
                raise
            finally:
                heartbeat.cancel()
        finally:
            self._outbox.put_nowait(None)
            call.cancel()

    def _greet(self, first: pb.WorkerMessage | None) -> None:
        if first is None or first.WhichOneof("kind") != "hello":
            raise WorkerRefused("it did not answer with a hello")
        hello = first.hello
        if hello.role not in ROLES or hello.worker.name != self.name:
            raise WorkerRefused(f"{hello.worker.name} ({hello.role}) answers at {self.worker.address}")
        self.hello = hello
        self._heard_s, self._is_silent = self._awake.now_s(), False
        before, self.state = self.state, LinkState.READY
        try:
            self._host.on_ready(self, hello)
        except WorkerRefused:
            self.state = before
            raise
        self.reason = ""
        self._backoff_s = MIN_BACKOFF_S

    async def _outgoing(self) -> AsyncIterator[pb.RouterMessage]:
        outbox = self._outbox
        yield pb.RouterMessage(hello=pb.RouterHello(router_id=self._router_id, protocol_version=PROTOCOL_VERSION))
        while (message := await outbox.get()) is not None:
            yield message

    async def _read(self, stream: AsyncIterator[pb.WorkerMessage]) -> None:
        async for message in stream:
            self._heard_s = self._awake.now_s()
            if self._is_silent:
                self._is_silent = False
                self._host.on_heard(self)
            match message.WhichOneof("kind"):
                case "outputs":
                    self._host.on_outputs(self, message.outputs)
                case "report":
                    if self._pong_ns > self._order_ns:
                        self._order_ns = 0  # it has made this one since it knows
                    self._host.on_report(self, message.report)
                case "pong":
                    self._on_pong(message.pong)
                case "hello":
                    self._host.on_hello_again(self, message.hello)
                case other:
                    log.warning("%s sent %s, which is not known here", self.name, other)
        raise WorkerRefused("it closed the stream")

    def _on_pong(self, pong: pb.Pong) -> None:
        now_ns, wall_ns = time.monotonic_ns(), time.time_ns()
        self._pong_ns = pong.router_ns
        self.clock.add(pong.router_ns, pong.worker_ns, now_ns)
        if pong.wall_ns:
            self.time_of_day.add(wall_ns - (now_ns - pong.router_ns), pong.wall_ns, wall_ns)

    async def _beat(self, call: grpc.aio.StreamStreamCall[pb.RouterMessage, pb.WorkerMessage]) -> None:
        """Ping, and end the stream of a worker that says nothing for too long, by seconds in which we could hear it."""
        for beat in itertools.count():
            has_left = self._host.has_left(self)
            if has_left or not beat % BEATS_A_PING:
                gap_ms = round(self._host.report_gap_s * 1e3)
                ping = pb.Ping(router_ns=time.monotonic_ns(), has_left=has_left, report_gap_ms=gap_ms)
                self._outbox.put_nowait(pb.RouterMessage(ping=ping))
            await asyncio.sleep(min(BEAT_S, self.dead_after_s / 4))
            silent_s = self._awake.now_s() - self._heard_s
            if silent_s < self.dead_after_s:
                continue
            self._is_silent = True
            if why := self._host.on_silent(self, silent_s):
                call.cancel()
                self._lose(why, is_death=True)
                return

    def _lose(self, reason: str, *, is_death: bool, level: int = logging.WARNING) -> None:
        self.reason = reason
        if self.state is not LinkState.READY:
            return
        self.state = LinkState.LOST
        self.losses += 1
        log.log(level, "%s is lost: %s", self.name, reason)
        try:
            self._host.on_lost(self, reason, is_death=is_death)
        except Exception:  # as above
            log.exception("the loss of %s was not dealt with", self.name)


def _sentence(error: BaseException, tls: TlsFiles | None) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        details = error.details() or "the stream broke"
        if tls is not None and details.startswith("failed to connect") and details.endswith("Socket closed"):
            details += HUNG_UP
        return f"{error.code().name}: {details}"
    if isinstance(error, TimeoutError):
        return f"it did not say hello within {HELLO_TIMEOUT_S:g} s"
    return str(error)
