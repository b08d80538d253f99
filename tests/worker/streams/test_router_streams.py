"""RouterStreams: what a worker keeps for a router that does not read, when a router is lost, and that no message of one
ends its stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from engine.types import InvalidRequest
from kvrelay.v1 import worker_pb2 as pb
from kvrelay.v1 import worker_pb2_grpc
from worker.awake import BEAT_S, AwakeClock
from worker.options import REPORT_GAP_S
from worker.streams import router_streams
from worker.streams.router_link import RouterLink
from worker.streams.router_streams import MAX_UNREAD, RouterStreams
from worker.wire.rpc import PROTOCOL_VERSION, bind, make_server, open_channel

WIDE = ["x" * 1000] * 1000  # ids in a report: a megabyte, so that a few fill the stream's window
DROP_AFTER_S = 10.0


class _Host:
    def __init__(self, request_ids: list[str]) -> None:
        self.request_ids = request_ids
        self.num_reports = 0
        self.is_busy = True  # no report is as the last one
        self.lost = asyncio.Event()
        self.cancelled: list[str] = []

    def hello(self) -> pb.WorkerHello:
        return pb.WorkerHello(role="prefill")

    def on_submit(self, link: RouterLink, submit: pb.Submit) -> None:
        if submit.request.request_id == "bad":
            raise InvalidRequest("prompt_ids is empty; give a token or more")
        raise ZeroDivisionError("nobody expected this")

    def on_begin(self, begin: pb.Begin) -> None: ...

    def on_cancel(self, cancel: pb.Cancel) -> None:
        if cancel.request_id == "bad":
            raise KeyError("bad")
        self.cancelled.append(cancel.request_id)

    def on_move(self, move: pb.Move) -> None: ...

    def on_drain(self, drain: pb.Drain) -> None: ...

    def on_set_role(self, wanted: pb.SetRole) -> None: ...

    def on_reassign(self, reassign: pb.Reassign) -> None:
        raise AssertionError("a bug")

    def on_router_lost(self, router_id: str) -> None:
        self.lost.set()

    def report(self) -> pb.WorkerReport:
        self.num_reports += 1
        return pb.WorkerReport(
            request_ids=self.request_ids,
            num_waiting=self.num_reports if self.is_busy else 0,
            loop_lag_ms=self.num_reports,
        )

    def add_page_news(self, report: pb.WorkerReport, told: int) -> int:
        report.found_pages = bytes([max(0, told)])
        report.pages_anew = told < 0
        return self.num_reports


class _Wall:
    now_s = 0.0


class _Served:
    def __init__(self, streams: RouterStreams, host: _Host, wall: _Wall, clock: AwakeClock, call: Any) -> None:
        self.streams, self.host, self.wall, self.clock, self.call = streams, host, wall, clock, call

    @property
    def link(self) -> RouterLink:
        link = self.streams.link("r")
        assert link is not None
        return link

    async def awake_for(self, seconds: float) -> None:
        for _ in range(round(seconds / BEAT_S)):
            self.wall.now_s += BEAT_S
            self.clock.beat()
        await self._reported()

    async def asleep_for(self, seconds: float) -> None:
        self.wall.now_s += seconds
        self.clock.beat()
        await self._reported()

    async def _reported(self) -> None:
        """Silent routers are looked for before each report."""
        before = self.host.num_reports
        while self.host.num_reports < before + 2 and not self.host.lost.is_set():
            await asyncio.sleep(0.001)

    async def send(self, **message: Any) -> None:
        await self.call.write(pb.RouterMessage(**message))

    async def next_of(self, kind: str) -> Any:
        while (message := await self.call.read()) is not grpc.aio.EOF:
            if message.HasField(kind):
                return getattr(message, kind)
        raise AssertionError("the stream has ended")


@asynccontextmanager
async def served(request_ids: list[str]) -> AsyncIterator[_Served]:
    """A stream of router r, which has read the hello."""
    host, wall = _Host(request_ids), _Wall()
    clock = AwakeClock(lambda: wall.now_s)
    streams = RouterStreams("decode-1", host, clock.now_s, report_interval_s=0.001, drop_after_s=DROP_AFTER_S)
    server = make_server()
    worker_pb2_grpc.add_WorkerServicer_to_server(streams, server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    streams.start()
    async with open_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(30):
        call: Any = worker_pb2_grpc.WorkerStub(channel).Connect()
        router = _Served(streams, host, wall, clock, call)
        await router.send(hello=pb.RouterHello(router_id="r", protocol_version=PROTOCOL_VERSION))
        await router.next_of("hello")
        yield router
        call.cancel()
    await streams.stop()
    await server.stop(0)


async def test_a_router_that_does_not_read_is_kept_no_heap_of_reports_and_is_missed_when_it_goes() -> None:
    async with served(WIDE) as router:
        while router.host.num_reports < 2 * MAX_UNREAD:
            await asyncio.sleep(0)
        assert router.link.num_unread <= MAX_UNREAD
        router.call.cancel()
        await router.host.lost.wait()


async def test_a_report_that_says_nothing_new_waits_until_one_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served([]) as router:
        router.host.is_busy = False
        said: list[pb.WorkerMessage] = []
        monkeypatch.setattr(router.link, "put", said.append)
        router.streams._send_reports()
        said.clear()
        router.streams._send_reports(is_due=False)
        assert not said
        router.streams._send_reports()
        assert [list(message.report.request_ids) for message in said] == [[]]
        router.host.request_ids = ["a"]
        router.streams._send_reports(is_due=False)
        assert [list(message.report.request_ids) for message in said] == [[], ["a"]]


async def test_of_several_routers_one_takes_the_worker_first() -> None:
    async with served([]) as router:
        assert not (await router.next_of("report")).is_others
        router.streams._links["q"] = RouterLink("q")  # of decode-1 the second of the two is the owner
        router.streams._send_reports()
        assert not (await router.next_of("report")).is_others
        router.streams._links["p"] = RouterLink("p")  # and of three, too
        router.streams._links["s"] = RouterLink("s")
        await _report_with(router, is_others=True)
        for gone in "pqs":
            del router.streams._links[gone]
        await _report_with(router, is_others=False)


async def _report_with(router: _Served, *, is_others: bool) -> None:
    while (await router.next_of("report")).is_others is not is_others:
        pass


async def test_a_change_is_told_soon_also_after_a_time_without_any_router() -> None:
    host = _Host([])
    streams = RouterStreams("decode-1", host, lambda: 0.0, report_interval_s=3600.0, drop_after_s=DROP_AFTER_S)
    streams.flush()  # nobody is there to hear it
    await asyncio.sleep(2 * REPORT_GAP_S)
    streams._links["r"] = link = RouterLink("r")
    streams.flush()
    async with asyncio.timeout(5.0):
        assert (await link.get()) is not None
    await streams.stop()


async def test_an_idle_worker_reports_all_the_same() -> None:
    async with served([]) as router:
        router.host.is_busy = False
        for _ in range(5):
            await router.next_of("report")


async def test_a_router_with_many_workers_has_fewer_reports_from_each() -> None:
    async with served([]) as router:
        for _ in range(2):  # the second one by the clock of reports
            await router.next_of("report")
        await router.send(ping=pb.Ping(report_gap_ms=3_600_000))
        await router.next_of("pong")
        before = router.host.num_reports
        router.streams.flush()
        await asyncio.sleep(0.1)
        assert router.host.num_reports == before
        await router.send(ping=pb.Ping(report_gap_ms=1))
        await router.next_of("pong")
        await router.next_of("report")


async def test_a_router_that_reads_no_tokens_is_lost_at_once_though_its_stream_cannot_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router_streams, "MAX_UNREAD_BYTES", 10 << 20)
    async with served([]) as router:
        link = router.link
        for _ in range(1000):
            link.event(pb.RequestState(request_id="a"), pb.EVENT_KIND_FAILED, reason="x" * 100_000)
            router.streams.flush()
            if link.is_closed:
                break
            assert link.unread_bytes <= 10 << 20
            await asyncio.sleep(0)
        assert link.is_closed
        assert router.host.lost.is_set()
        assert router.streams.link("r") is None
        assert link.unread_bytes == 0
        with pytest.raises(AssertionError, match=r"^the stream has ended$"):
            await router.next_of("pong")  # as soon as it reads


async def test_a_router_that_says_nothing_more_is_lost_though_its_stream_stands() -> None:
    async with served([]) as router:
        await router.awake_for(DROP_AFTER_S - 2 * BEAT_S)
        assert not router.host.lost.is_set()
        await router.awake_for(4 * BEAT_S)
        assert router.host.lost.is_set()
        with pytest.raises(AssertionError, match=r"^the stream has ended$"):
            await router.next_of("pong")


async def test_what_the_worker_slept_itself_is_no_routers_silence() -> None:
    async with served([]) as router:
        await router.asleep_for(10 * DROP_AFTER_S)
        assert not router.host.lost.is_set()
        await router.send(ping=pb.Ping(router_ns=5))
        assert (await router.next_of("pong")).router_ns == 5


@pytest.mark.parametrize(
    ("request_id", "router_id", "reason", "cause"),
    [
        ("bad", "r", "prompt_ids is empty; give a token or more", pb.FAILURE_CAUSE_REQUEST),
        ("a", "r", "ZeroDivisionError: nobody expected this", pb.FAILURE_CAUSE_STEP),
        ("a", "another", "router_id is 'another'; give 'r', as in the hello", pb.FAILURE_CAUSE_REQUEST),
    ],
)
async def test_a_request_that_cannot_be_taken_is_refused_and_the_stream_goes_on(
    request_id: str, router_id: str, reason: str, cause: pb.FailureCause
) -> None:
    """For good only where no worker could serve it."""
    async with served([]) as router:
        state = pb.RequestState(request_id=request_id, router_id=router_id, attempt=2)
        await router.send(submit=pb.Submit(seq=1, request=state))
        [event] = (await router.next_of("outputs")).events
        assert (event.kind, event.cause) == (pb.EVENT_KIND_FAILED, cause)
        assert (event.request_id, event.attempt, event.reason) == (request_id, 2, reason)
        await router.send(ping=pb.Ping(router_ns=5))
        assert (await router.next_of("pong")).router_ns == 5


async def test_no_message_ends_the_stream() -> None:
    async with served([]) as router:
        await router.send()
        await router.send(cancel=pb.Cancel(request_id="bad"))
        await router.send(reassign=pb.Reassign())
        await router.send(hello=pb.RouterHello(router_id="other"))
        await router.send(cancel=pb.Cancel(request_id="good"))
        await router.send(ping=pb.Ping(router_ns=5))
        assert (await router.next_of("pong")).router_ns == 5
        assert router.host.cancelled == ["good"]
