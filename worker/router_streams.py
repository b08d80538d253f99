"""RouterStreams is a worker's side of its streams with routers, whatever its role.

One stream for each router. Down come submits and cancels, handed to the WorkerHost (the worker) as they arrive; up go
the tokens and events that its role collects during a step, one message for each router at `flush`, and reports:
every `report_interval_s`, and soon after a step when things changed. A stream's end means that router is lost: the
host drops all of its requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator
from typing import Protocol

import grpc
import grpc.aio

from kvrelay.v1 import generate_pb2, worker_pb2_grpc
from kvrelay.v1 import worker_pb2 as pb
from worker.options import REPORT_GAP_S
from worker.rpc import PROTOCOL_VERSION

log = logging.getLogger(__name__)

MAX_UNREAD = 64  # messages; a router that reads no faster gets reports again when it has caught up
ROUTER_DEAD_AFTER_S = 10.0


class WorkerHost(Protocol):
    """What a worker does with what comes down; called in the event loop, must return at once."""

    def hello(self) -> pb.WorkerHello: ...

    def on_submit(self, link: RouterLink, submit: pb.Submit) -> None: ...

    def on_cancel(self, cancel: pb.Cancel) -> None: ...

    def on_reassign(self, reassign: pb.Reassign) -> None: ...

    def on_router_lost(self, router_id: str) -> None: ...

    def report(self) -> pb.WorkerReport: ...


class RouterLink:
    """The way up to one router. Tokens and events are gathered until `flush` sends them as one message."""

    def __init__(self, router_id: str) -> None:
        self.router_id = router_id
        self.last_submit_seq = 0
        self.heard_s = time.monotonic()  # routers ping several times a second
        self.outbox: asyncio.Queue[pb.WorkerMessage | None] = asyncio.Queue()  # None: the stream has ended
        self._outputs = pb.Outputs()

    def token(self, output: pb.TokenOutput) -> None:
        self._outputs.tokens.append(output)

    def event(
        self,
        request: pb.RequestState,
        kind: pb.EventKind,
        *,
        reason: str = "",
        retryable: bool = False,
        cause: pb.FailureCause = pb.FAILURE_CAUSE_UNSPECIFIED,
        peer: str = "",
        in_doubt: bool = False,
        receipt: generate_pb2.HandoffReceipt | None = None,
        cached_tokens: int = 0,
        decode_worker: str = "",
        at_ns: int = 0,
    ) -> None:
        self._outputs.events.append(
            pb.RequestEvent(
                request_id=request.request_id,
                attempt=request.attempt,
                kind=kind,
                at_ns=at_ns or time.monotonic_ns(),
                reason=reason,
                retryable=retryable,
                cause=cause,
                peer=peer,
                in_doubt=in_doubt,
                receipt=receipt,
                cached_tokens=cached_tokens,
                decode_worker=decode_worker,
            )
        )

    def flush(self) -> None:
        if self._outputs.tokens or self._outputs.events:
            self.outbox.put_nowait(pb.WorkerMessage(outputs=self._outputs))
            self._outputs = pb.Outputs()


class RouterStreams(worker_pb2_grpc.WorkerServicer):
    def __init__(self, host: WorkerHost, *, report_interval_s: float) -> None:
        self._host = host
        self._report_interval_s = report_interval_s
        self._links: dict[str, RouterLink] = {}
        self._reported_at = 0.0
        self._report_soon: asyncio.TimerHandle | None = None
        self._reporter: asyncio.Task[None] | None = None

    def link(self, router_id: str) -> RouterLink | None:
        return self._links.get(router_id)

    def event(
        self,
        request: pb.RequestState,
        kind: pb.EventKind,
        *,
        reason: str = "",
        retryable: bool = False,
        cause: pb.FailureCause = pb.FAILURE_CAUSE_UNSPECIFIED,
        peer: str = "",
        receipt: generate_pb2.HandoffReceipt | None = None,
    ) -> None:
        """Gather it for the request's router, if that is still there."""
        link = self._links.get(request.router_id)
        if link is not None:
            link.event(request, kind, reason=reason, retryable=retryable, cause=cause, peer=peer, receipt=receipt)

    def start(self) -> None:
        self._reporter = asyncio.get_running_loop().create_task(self._report_forever())

    async def stop(self) -> None:
        if self._report_soon is not None:
            self._report_soon.cancel()
        if self._reporter is not None:
            self._reporter.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reporter

    def flush(self) -> None:
        """Send what was gathered, and let routers know soon what changed."""
        for link in self._links.values():
            link.flush()
        if self._report_soon is None:
            gap = max(0.0, self._reported_at + REPORT_GAP_S - time.monotonic())
            self._report_soon = asyncio.get_running_loop().call_later(gap, self._send_reports)

    async def Connect(
        self, requests: AsyncIterator[pb.RouterMessage], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WorkerMessage]:
        link = await self._greet(requests, context)
        reader = asyncio.get_running_loop().create_task(self._read(requests, link))
        reader.add_done_callback(lambda _: link.outbox.put_nowait(None))
        try:
            yield pb.WorkerMessage(hello=self._host.hello())
            yield pb.WorkerMessage(report=self._report_for(link, self._host.report()))
            while (message := await link.outbox.get()) is not None:
                yield message
        finally:
            reader.cancel()
            _check_reader(reader, link.router_id)
            if self._links.get(link.router_id) is link:
                del self._links[link.router_id]
                log.info("router %s is gone; its requests are dropped", link.router_id)
                self._host.on_router_lost(link.router_id)

    async def _greet(self, requests: AsyncIterator[pb.RouterMessage], context: grpc.aio.ServicerContext) -> RouterLink:
        first = await anext(aiter(requests), pb.RouterMessage())
        hello = first.hello
        if not hello.router_id:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be a hello with a router_id")
        if hello.protocol_version != PROTOCOL_VERSION:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the router speaks protocol {hello.protocol_version}, this worker {PROTOCOL_VERSION}: upgrade one",
            )
        if hello.router_id in self._links:  # its old stream broke and we have not noticed yet
            del self._links[hello.router_id]
            self._host.on_router_lost(hello.router_id)
        link = RouterLink(hello.router_id)
        self._links[hello.router_id] = link
        return link

    async def _read(self, requests: AsyncIterator[pb.RouterMessage], link: RouterLink) -> None:
        async for message in requests:
            link.heard_s = time.monotonic()
            match message.WhichOneof("kind"):
                case "submit":
                    link.last_submit_seq = message.submit.seq
                    self._host.on_submit(link, message.submit)
                case "cancel":
                    self._host.on_cancel(message.cancel)
                case "reassign":
                    self._host.on_reassign(message.reassign)
                case "ping":
                    pong = pb.Pong(router_ns=message.ping.router_ns, worker_ns=time.monotonic_ns())
                    link.outbox.put_nowait(pb.WorkerMessage(pong=pong))
                case other:
                    log.warning("router %s sent %s, which is not known here", link.router_id, other)

    async def _report_forever(self) -> None:
        while True:
            await asyncio.sleep(self._report_interval_s)
            self._end_silent_links()
            if time.monotonic() - self._reported_at >= self._report_interval_s / 2:
                self._send_reports()

    def _end_silent_links(self) -> None:
        """A router behind a cut cable: its requests hold pages, and TCP would take minutes to say so."""
        for link in list(self._links.values()):
            if time.monotonic() - link.heard_s > ROUTER_DEAD_AFTER_S:
                log.warning("router %s said nothing for %g s", link.router_id, ROUTER_DEAD_AFTER_S)
                link.outbox.put_nowait(None)
                link.heard_s = math.inf  # told once

    def _send_reports(self) -> None:
        if self._report_soon is not None:
            self._report_soon.cancel()
            self._report_soon = None
        self._reported_at = time.monotonic()
        if not self._links:
            return
        report = self._host.report()
        for link in self._links.values():
            if link.outbox.qsize() < MAX_UNREAD:
                link.outbox.put_nowait(pb.WorkerMessage(report=self._report_for(link, report)))

    def _report_for(self, link: RouterLink, report: pb.WorkerReport) -> pb.WorkerReport:
        mine = pb.WorkerReport()
        mine.CopyFrom(report)
        mine.made_ns = time.monotonic_ns()
        mine.last_submit_seq = link.last_submit_seq
        return mine


def _check_reader(reader: asyncio.Task[None], router_id: str) -> None:
    """Say why a stream's reader ended, unless it was the stream's own end."""
    if reader.done() and not reader.cancelled():
        error = reader.exception()
        if error is not None and not isinstance(error, grpc.aio.AioRpcError):
            log.error("the stream from router %s failed", router_id, exc_info=error)
