"""RouterStreams is a worker's side of its streams with routers, whatever its role.

One stream for each router. Down come submits and cancels, handed to the WorkerHost (the worker) as they arrive; up go
the tokens and events that its role collects during a step, one message for each router at `flush`, and reports: soon
after a step when things changed, every `report_interval_s` otherwise, and less often while nothing changes (256 idle
workers took half a core of a router). A router whose stream ends is lost: the host drops
all of its requests. So is, at once, one that says nothing for `drop_after_s`, and one that reads nothing until
MAX_UNREAD_BYTES wait for it; their streams end when gRPC can write again. No message ends a stream, whatever is in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Protocol, Unpack

import grpc
import grpc.aio

from engine.types import InvalidRequest
from kvrelay.v1 import worker_pb2 as pb
from kvrelay.v1 import worker_pb2_grpc
from worker.options import REPORT_GAP_S, owner_of
from worker.streams.router_link import EventDetails, RouterLink
from worker.wire.rpc import PROTOCOL_VERSION

log = logging.getLogger(__name__)

HELLO_S = 5.0  # that a router may take to present itself
MAX_UNREAD = 64  # messages; a router that reads no faster gets reports again when it has caught up
QUIET_INTERVALS = 5  # after so many comes a report that says no more than the last one
MAX_UNREAD_BYTES = 64 << 20  # 64 requests with 20 logprobs make 0.25 MB a step


class WorkerHost(Protocol):
    """What a worker does with what comes down; called in the event loop, must return at once."""

    def hello(self) -> pb.WorkerHello: ...

    def on_submit(self, link: RouterLink, submit: pb.Submit) -> None:
        """Raises InvalidRequest for one that no worker could serve."""

    def on_begin(self, begin: pb.Begin) -> None: ...

    def on_cancel(self, cancel: pb.Cancel) -> None: ...

    def on_reassign(self, reassign: pb.Reassign) -> None: ...

    def on_move(self, move: pb.Move) -> None: ...

    def on_drain(self, drain: pb.Drain) -> None: ...

    def on_set_role(self, wanted: pb.SetRole) -> None: ...

    def on_router_lost(self, router_id: str) -> None: ...

    def report(self) -> pb.WorkerReport: ...

    def add_page_news(self, report: pb.WorkerReport, told: int) -> int:
        """What has come since so many were told, into the report; how many are told with it."""


class RouterStreams(worker_pb2_grpc.WorkerServicer):
    def __init__(
        self, name: str, host: WorkerHost, now_s: Callable[[], float], *, report_interval_s: float, drop_after_s: float
    ) -> None:
        """`name`: of the worker. `now_s`: a clock that stands still while this process does; what it slept is nobody's
        silence."""
        self._name = name
        self._host = host
        self._now_s = now_s
        self._report_interval_s = report_interval_s
        self._drop_after_s = drop_after_s
        self._links: dict[str, RouterLink] = {}
        self._reported_at = 0.0
        self._last = pb.WorkerReport()  # what was last said, or would have been
        self._report_soon: asyncio.TimerHandle | None = None
        self._reporter: asyncio.Task[None] | None = None

    def link(self, router_id: str) -> RouterLink | None:
        return self._links.get(router_id)

    def event(self, request: pb.RequestState, kind: pb.EventKind, **details: Unpack[EventDetails]) -> None:
        """Gather it for the request's router, if that is still there."""
        link = self._links.get(request.router_id)
        if link is not None:
            link.event(request, kind, **details)

    def start(self) -> None:
        self._reporter = asyncio.get_running_loop().create_task(self._report_forever())

    def check(self) -> None:
        """Raise what ended the reports, if anything did: no router would know what this worker holds."""
        if self._reporter is not None and self._reporter.done() and not self._reporter.cancelled():
            self._reporter.result()

    async def stop(self) -> None:
        if self._report_soon is not None:
            self._report_soon.cancel()
        if self._reporter is not None:
            self._reporter.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reporter

    def flush(self) -> None:
        """Send what was gathered, and let routers know soon what changed."""
        for link in list(self._links.values()):
            link.flush()
            if link.unread_bytes > MAX_UNREAD_BYTES:
                self._drop(link, f"it has left {link.unread_bytes >> 20} MiB unread")
        if self._report_soon is None:
            wait_s = max(0.0, self._reported_at + max(REPORT_GAP_S, self._report_gap_s) - time.monotonic())
            self._report_soon = asyncio.get_running_loop().call_later(wait_s, self._send_soon)

    @property
    def has_unread(self) -> bool:
        """Some router has not taken all that was sent to it."""
        return any(link.num_unread for link in self._links.values())

    @property
    def all_have_left(self) -> bool:
        """Whether no router has anything on its way here: asked of a worker that drains."""
        return all(link.has_left for link in self._links.values())

    def ask_who_has_left(self) -> None:
        """The worker drains from now on: what they said before was of another time."""
        for link in self._links.values():
            link.has_left = False

    def say_hello(self) -> None:
        """Routers hear what the worker is now."""
        for link in self._links.values():
            link.put(pb.WorkerMessage(hello=self._host.hello()))

    def greet_again(self) -> None:
        """The worker is of another role from now on."""
        self.say_hello()
        for link in self._links.values():
            link.pages_told, link.has_left = -1, False
        self._send_reports()

    async def Connect(
        self, requests: AsyncIterator[pb.RouterMessage], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WorkerMessage]:
        link = await self._greet(requests, context)
        reader = asyncio.get_running_loop().create_task(self._read(requests, link))
        reader.add_done_callback(lambda _: link.close())
        try:
            yield pb.WorkerMessage(hello=self._host.hello())
            yield pb.WorkerMessage(report=self._report_for(link, self._host.report()))
            while (message := await link.get()) is not None:
                yield message
        finally:
            reader.cancel()
            _check_reader(reader, link.router_id)
            self._drop(link, "its stream has ended", logging.INFO)

    def _drop(self, link: RouterLink, why: str, level: int = logging.WARNING) -> None:
        """Now, and not when its stream ends: gRPC may be writing to a router that never reads."""
        link.close()
        if self._links.get(link.router_id) is link:
            del self._links[link.router_id]
            log.log(level, "router %s is gone: %s; its requests are dropped", link.router_id, why)
            self._host.on_router_lost(link.router_id)

    async def _greet(self, requests: AsyncIterator[pb.RouterMessage], context: grpc.aio.ServicerContext) -> RouterLink:
        hello = await _hello_of(requests)
        if not hello.router_id:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be a hello with a router_id")
        if hello.protocol_version != PROTOCOL_VERSION:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the router speaks protocol {hello.protocol_version}, this worker {PROTOCOL_VERSION}: upgrade one",
            )
        if (old := self._links.get(hello.router_id)) is not None:
            self._drop(old, "it has opened another stream")
        link = RouterLink(hello.router_id, self._now_s())
        self._links[hello.router_id] = link
        return link

    async def _read(self, requests: AsyncIterator[pb.RouterMessage], link: RouterLink) -> None:
        async for message in requests:
            if link.is_closed:
                return
            link.heard_s = self._now_s()
            try:
                self._on_message(link, message)
            except Exception as error:  # of one message; the router's other requests are none the worse for it
                log.exception("a message of router %s cannot be taken", link.router_id)
                if message.HasField("submit"):  # out of memory, say: another worker may take it
                    reason = f"{type(error).__name__}: {error}"
                    self._refuse(link, message.submit.request, reason, pb.FAILURE_CAUSE_STEP)

    def _on_message(self, link: RouterLink, message: pb.RouterMessage) -> None:
        match message.WhichOneof("kind"):
            case "submit":
                self._on_submit(link, message.submit)
            case "begin":
                self._host.on_begin(message.begin)
            case "cancel":
                self._host.on_cancel(message.cancel)
            case "reassign":
                self._host.on_reassign(message.reassign)
            case "move":
                self._host.on_move(message.move)
            case "drain":
                self._host.on_drain(message.drain)
            case "set_role":
                self._host.on_set_role(message.set_role)
            case "ping":
                link.has_left = message.ping.has_left
                link.report_gap_s = message.ping.report_gap_ms / 1e3
                link.put(pb.WorkerMessage(pong=_pong_to(message.ping)))
            case other:
                log.warning("router %s sent %s, which is not known here", link.router_id, other)

    def _on_submit(self, link: RouterLink, submit: pb.Submit) -> None:
        link.last_submit_seq = submit.seq
        try:
            if submit.request.router_id != link.router_id:
                given = submit.request.router_id
                raise InvalidRequest(f"router_id is {given!r}; give {link.router_id!r}, as in the hello")
            self._host.on_submit(link, submit)
        except InvalidRequest as error:
            self._refuse(link, submit.request, str(error), pb.FAILURE_CAUSE_REQUEST)

    def _refuse(self, link: RouterLink, request: pb.RequestState, reason: str, cause: pb.FailureCause) -> None:
        link.event(request, pb.EVENT_KIND_FAILED, reason=reason, cause=cause)
        link.flush()

    async def _report_forever(self) -> None:
        while True:
            await asyncio.sleep(self._report_interval_s)
            self._drop_silent_links()
            passed_s = time.monotonic() - self._reported_at
            intervals = passed_s / self._report_interval_s
            if intervals >= 0.5 and passed_s >= self._report_gap_s:
                self._send_reports(is_due=intervals >= QUIET_INTERVALS - 0.5)

    def _drop_silent_links(self) -> None:
        """A router behind a cut cable: its requests hold pages, and TCP would take minutes to say so."""
        for link in list(self._links.values()):
            if self._now_s() - link.heard_s > self._drop_after_s:
                self._drop(link, f"it said nothing for {self._drop_after_s:g} s")

    @property
    def _report_gap_s(self) -> float:
        """As long as the router with most workers wants."""
        return max((link.report_gap_s for link in self._links.values()), default=0.0)

    def _send_soon(self) -> None:
        self._report_soon = None  # also where no router is there to hear it: the next change is told soon again
        self._send_reports()

    def _send_reports(self, *, is_due: bool = True) -> None:
        """One that is not due goes if it says something new."""
        if not self._links:
            return
        report = self._host.report()
        last, self._last = self._last, report
        last.loop_lag_ms, last.num_tasks = report.loop_lag_ms, report.num_tasks  # no news, and never the same twice
        if not is_due and report == last:
            return
        if self._report_soon is not None:
            self._report_soon.cancel()
            self._report_soon = None
        self._reported_at = time.monotonic()
        for link in self._links.values():
            if link.num_unread < MAX_UNREAD:
                link.put(pb.WorkerMessage(report=self._report_for(link, report)))

    def _report_for(self, link: RouterLink, report: pb.WorkerReport) -> pb.WorkerReport:
        mine = pb.WorkerReport()
        mine.CopyFrom(report)
        mine.made_ns = time.monotonic_ns()
        mine.last_submit_seq = link.last_submit_seq
        mine.is_others = link.router_id != sorted(self._links)[owner_of(self._name, len(self._links))]
        link.pages_told = self._host.add_page_news(mine, link.pages_told)
        return mine


def _pong_to(ping: pb.Ping) -> pb.Pong:
    return pb.Pong(router_ns=ping.router_ns, worker_ns=time.monotonic_ns(), wall_ns=time.time_ns())


async def _hello_of(requests: AsyncIterator[pb.RouterMessage]) -> pb.RouterHello:
    """An empty one where none comes."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(HELLO_S):
            return (await anext(aiter(requests), pb.RouterMessage())).hello
    return pb.RouterHello()


def _check_reader(reader: asyncio.Task[None], router_id: str) -> None:
    """Say why a stream's reader ended, unless it was the stream's own end."""
    if reader.done() and not reader.cancelled():
        error = reader.exception()
        if error is not None and not isinstance(error, grpc.aio.AioRpcError):
            log.error("the stream from router %s failed", router_id, exc_info=error)
