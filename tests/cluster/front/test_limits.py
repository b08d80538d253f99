"""What clients may take of a router: past each bound they get a documented code, and others are served on."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import sys
from collections import Counter
from typing import Any

import grpc
import pytest
from grpc._cython.cygrpc import ExecuteBatchError
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.front.bounds import limits
from cluster.front.generation import Generation
from cluster.front.grpc import GenerateService
from cluster.front.health import Health
from cluster.front.options import FrontOptions
from cluster.front.server import server_options
from cluster.router.live.requests import Submission
from kvrelay.v1 import generate_pb2, generate_pb2_grpc
from tests.cluster.front.test_tokenizer import stuck_codec
from tests.cluster.harness import WAIT_S, Harness, request, serving
from worker.wire.rpc import open_channel

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


class Aborted(Exception):
    pass


class DeafContext:
    """The call of a client that reads nothing: what is written never leaves."""

    def __init__(self) -> None:
        self.refusal: tuple[grpc.StatusCode, str, dict[str, str]] | None = None

    async def write(self, message: object) -> None:
        await asyncio.get_running_loop().create_future()

    async def abort(self, code: grpc.StatusCode, details: str, trailers: Any = ()) -> None:
        self.refusal = (code, details, dict(trailers))
        raise Aborted

    def time_remaining(self) -> float | None:
        return None

    def set_trailing_metadata(self, trailers: object) -> None: ...

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()


class PastContext(DeafContext):
    """A call that is over, as by its deadline, and of which nobody here has heard yet."""

    async def abort(self, code: grpc.StatusCode, details: str, trailers: Any = ()) -> None:
        raise ExecuteBatchError("Failed grpc_call_start_batch")


async def refused(call: Any) -> tuple[str, dict[str, str]]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    assert error.value.code() is EXHAUSTED, error.value
    return error.value.details() or "", dict(error.value.trailing_metadata() or ())


def service_of(h: Harness, options: FrontOptions) -> GenerateService:
    calls = limits.CallLimit(options.max_calls, options.max_stall_s, h.router.turns)
    return GenerateService(Generation(h.server.catalog, options=options, calls=calls))


async def deaf(h: Harness, max_stall_s: float, **sampling: Any) -> DeafContext:
    """How the call of a client that reads nothing ends."""
    context = DeafContext()
    service = service_of(h, FrontOptions(max_stall_s=max_stall_s))
    with pytest.raises(Aborted):
        await service.generate(request(**sampling), context)
    return context


async def test_a_message_that_is_too_large_is_refused_unread() -> None:
    async with serving(options=server_options(port=0, max_message_bytes=100_000)) as h:
        details, _ = await refused(h.generate.GenerateOnce(request([5] * 150_000)))
        assert "larger than max" in details
        assert (await h.generate.GenerateOnce(request(max_tokens=2))).usage.completion_tokens == 2


async def test_thousands_of_calls_at_once_are_all_answered() -> None:
    """gRPC drops some of more than 1000 new ones by itself, as CANCELLED."""
    async with serving() as h:
        channels = [open_channel(f"127.0.0.1:{h.server.port}") for _ in range(3)]
        stubs = [generate_pb2_grpc.GenerateStub(channel) for channel in channels]
        calls = [stub.GetModelInfo(generate_pb2.GetModelInfoRequest()) for _ in range(700) for stub in stubs]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert Counter(type(answer) for answer in answers) == {generate_pb2.GetModelInfoResponse: 2100}
        for channel in channels:
            await channel.close()


async def test_calls_beyond_the_limit_are_refused_and_health_answers_on() -> None:
    async with serving(options=server_options(port=0, max_calls=2)) as h:
        h.prefill().is_holding = True
        held = [h.generate.GenerateOnce(request()) for _ in range(2)]
        await h.prefill().wait_for(lambda: len(h.prefill().held) == 2)
        details, trailers = await refused(h.generate.GenerateOnce(request()))
        assert details == "2 calls run at this router, of 2"
        assert 1000 <= int(trailers["retry-after-ms"]) <= 1500
        assert h.router.metrics.codes == {"RESOURCE_EXHAUSTED": 1}
        check = health_pb2_grpc.HealthStub(h.channel).Check(health_pb2.HealthCheckRequest())
        assert (await check).status == health_pb2.HealthCheckResponse.SERVING
        h.prefill().release()
        await asyncio.gather(*held)
        assert (await h.generate.GenerateOnce(request(max_tokens=2))).usage.completion_tokens == 2


async def test_grpcs_own_retries_come_again_when_they_are_told_to() -> None:
    policy = {"maxAttempts": 2, "initialBackoff": "0.01s", "maxBackoff": "0.01s", "backoffMultiplier": 1}
    retries = {"name": [{}], "retryPolicy": policy | {"retryableStatusCodes": ["RESOURCE_EXHAUSTED"]}}
    async with serving(options=server_options(port=0, max_calls=1)) as h:
        h.prefill().is_holding = True
        held = h.generate.GenerateOnce(request(max_tokens=2))
        await h.prefill().wait_for(lambda: len(h.prefill().held) == 1)
        config = (("grpc.service_config", json.dumps({"methodConfig": [retries]})),)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{h.server.port}", options=config) as channel:
            again = generate_pb2_grpc.GenerateStub(channel).GenerateOnce(request(max_tokens=2))
            await h.until(lambda: h.router.metrics.codes == {"RESOURCE_EXHAUSTED": 1})
            h.prefill().release()
            assert [(await call).usage.completion_tokens for call in (held, again)] == [2, 2]
        assert h.router.metrics.codes == {"RESOURCE_EXHAUSTED": 1, "OK": 2}


async def test_one_clients_calls_leave_room_for_anothers() -> None:
    tokens = {"flood": "flood-0123456789abcdef", "other": "other-0123456789abcdef"}
    lines = "\n".join(f"{name}:{token}" for name, token in tokens.items())
    headers = {name: (("authorization", f"Bearer {token}"),) for name, token in tokens.items()}
    async with serving(options=server_options(port=0, max_calls=16, auth=True, tokens=lines)) as h:
        silent = h.channel.stream_unary("/kvrelay.v1.Generate/GenerateOnce")
        held = [silent(metadata=headers["flood"]) for _ in range(14)]
        await h.until(lambda: h.server._calls.running == 14)
        details, _ = await refused(h.generate.GenerateOnce(request(), metadata=headers["flood"]))
        assert details == "14 of 14 calls that run at this router are this client's: its share"
        answer = await h.generate.GenerateOnce(request(max_tokens=2), metadata=headers["other"])
        assert answer.usage.completion_tokens == 2
        for call in held:
            call.cancel()


async def test_a_request_counts_for_each_of_its_choices() -> None:
    async with serving(options=server_options(port=0, max_calls=5)) as h:
        h.prefill().is_holding = True
        held = h.generate.GenerateOnce(request(n=4, max_tokens=2))
        await h.until(lambda: h.server._calls.running == 4)
        details, trailers = await refused(h.generate.GenerateOnce(request(n=2)))
        assert details == "5 calls run at this router, of 5, and 2 choices are as many calls"
        assert "retry-after-ms" in trailers
        other = h.generate.GenerateOnce(request(max_tokens=2))
        await h.until(lambda: h.server._calls.running == 5)
        h.prefill().release()
        assert [(await call).usage.completion_tokens for call in (held, other)] == [8, 2]
        await h.until(lambda: h.server._calls.running == 0)
        answer = await h.generate.GenerateOnce(request(n=8, max_tokens=2))  # more than the limit, and nobody is there
        assert answer.usage.completion_tokens == 16


async def test_watchers_of_health_are_bounded_and_none_of_them_holds_up_the_others() -> None:
    """gRPC's own servicer writes under the lock that a change of the status needs."""
    health = Health(("kvrelay.v1.Generate",), max_watches=2, max_stall_s=0.05)
    mute, late = DeafContext(), DeafContext()
    request_ = health_pb2.HealthCheckRequest()
    deaf_watch = asyncio.ensure_future(health.watch(request_, mute))
    async with serving(options=server_options(port=0, max_watches=1)) as h:
        watch = health_pb2_grpc.HealthStub(h.channel).Watch(request_)
        states = aiter(watch)
        assert (await anext(states)).status == health_pb2.HealthCheckResponse.SERVING
        details, trailers = await refused(health_pb2_grpc.HealthStub(h.channel).Watch(request_).read())
        assert details == "1 watch this router's health, of 1; ask with Check"
        assert "retry-after-ms" in trailers
        watch.cancel()
    with pytest.raises(Aborted):
        await deaf_watch
    assert mute.refusal is not None
    assert mute.refusal[:2] == (EXHAUSTED, "its client took nothing for 0.05 s")
    assert health.num_watches == 0
    other = asyncio.ensure_future(health.watch(request_, late))
    await asyncio.sleep(0)
    health.set(is_serving=True)
    assert (await health.check(request_, late)).status == health_pb2.HealthCheckResponse.SERVING
    other.cancel()


@pytest.mark.parametrize("method", ["generate", "generate_once"])
async def test_a_request_that_waits_does_not_keep_its_message(method: str) -> None:
    """Four MiB of fields that nobody knows cost a client no prompt tokens, by which the queue is bounded."""
    async with serving() as h:
        h.prefill().is_holding = True
        service = service_of(h, FrontOptions())
        message = request(max_tokens=2)
        references = sys.getrefcount(message)
        call = asyncio.ensure_future(getattr(service, method)(message, DeafContext()))
        await h.prefill().wait_for(lambda: bool(h.prefill().held))
        assert sys.getrefcount(message) == references
        call.cancel()
        h.prefill().release()
        await asyncio.wait([call])


async def test_a_client_that_takes_nothing_is_given_up_after_a_while() -> None:
    async with serving() as h:
        h.decode().max_steps = 3
        context = await deaf(h, 0.05, max_tokens=50)
        assert context.refusal is not None
        assert context.refusal[:2] == (EXHAUSTED, "its client took nothing for 0.05 s")
        await h.until(lambda: not h.decode().running)


async def test_tokens_that_nobody_reads_end_their_request_at_a_bound() -> None:
    async with serving(options=server_options(port=0, max_unread_bytes=65_536)) as h:
        call = asyncio.ensure_future(deaf(h, WAIT_S, max_tokens=400))
        await h.until(lambda: h.count("failed") == 1)
        await h.until(lambda: not h.decode().running)
        assert h.router.unread.total_bytes == 0
        call.cancel()


async def test_an_answer_in_one_message_has_a_bound_too() -> None:
    async with serving(options=server_options(port=0, max_unread_bytes=65_536)) as h:
        details, trailers = await refused(h.generate.GenerateOnce(request(max_tokens=400)))
        assert details.startswith("its client is too slow: 65792 bytes of its tokens were not read, of 65536")
        assert "retry-after-ms" in trailers
        streamed = [r async for r in h.generate.Generate(request(max_tokens=400))]
        assert streamed[-1].usage.completion_tokens == 400
        assert h.router.unread.total_bytes == 0


async def ended(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value.code(), error.value.details() or ""


async def test_no_request_outlives_the_routers_own_deadline() -> None:
    async with serving(options=server_options(port=0, max_request_s=0.2)) as h:
        h.decode().max_steps = 1
        wanted = (
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "the request has lived 0.2 s, the most that this router allows",
        )
        assert await ended(h.generate.GenerateOnce(request(max_tokens=9))) == wanted
        assert await ended(h.generate.GenerateOnce(request(max_tokens=9), timeout=WAIT_S)) == wanted
        await h.until(lambda: not h.decode().running)
        assert h.decode().cancels


async def test_a_call_that_was_refused_leaves_nothing_to_the_garbage_collector() -> None:
    """gRPC keeps the error that ended it, and the error's traceback would keep the call."""
    async with serving(options=server_options(port=0, max_request_s=0.1)) as h:
        h.prefill().is_holding = True
        gc.collect()
        gc.disable()
        try:
            await ended(h.generate.GenerateOnce(request()))
            await h.until(lambda: not any(type(each) is Submission for each in gc.get_objects()))
        finally:
            gc.enable()


async def test_the_deadline_holds_while_a_text_is_tokenised() -> None:
    backend, codec = stuck_codec()
    async with serving(codec=codec, options=server_options(port=0, max_request_s=0.2)) as h:
        text = generate_pb2.GenerateRequest(text="x" * 2000)
        assert (await ended(h.generate.GenerateOnce(text)))[0] is grpc.StatusCode.DEADLINE_EXCEEDED
        assert not h.prefill().submits
        backend.go_on.set()


async def test_who_has_waited_too_long_in_the_queue_is_sent_away() -> None:
    async with serving(options=server_options(port=0, max_backlog_tokens=10, max_queue_s=0.2)) as h:
        h.prefill().is_holding = True
        first = h.generate.GenerateOnce(request([5] * 9))
        await h.prefill().wait_for(lambda: bool(h.prefill().held))
        details, trailers = await refused(h.generate.GenerateOnce(request([5] * 9)))
        waited = re.fullmatch(r"it waited (\S+) s for a worker, the most that this router allows", details)
        assert waited is not None, details
        assert float(waited[1]) >= 0.2
        assert "retry-after-ms" in trailers
        assert h.count("rejected") == 1
        h.prefill().release()
        await first  # was with a worker, and is not held to it


@pytest.mark.parametrize("method", ["/grpc.health.v1.Health/Check", "/kvrelay.v1.Generate/GenerateOnce"])
async def test_a_call_whose_message_does_not_come_counts_and_ends(method: str) -> None:
    """gRPC waits for it without end, before any of our own code runs."""
    async with serving(options=server_options(port=0, max_calls=3, max_stall_s=0.2)) as h:
        silent = [h.channel.stream_unary(method)(timeout=WAIT_S) for _ in range(3)]
        if "Generate" in method:
            await h.until(lambda: h.server._calls.running == 3)
            assert (await refused(h.generate.GenerateOnce(request())))[0] == "3 calls run at this router, of 3"
        for call in silent:
            wanted = (grpc.StatusCode.DEADLINE_EXCEEDED, "the call's message did not come within 0.2 s")
            assert await ended(call) == wanted
        assert h.server._calls.running == 0
        assert (await h.generate.GenerateOnce(request(max_tokens=2))).usage.completion_tokens == 2


@pytest.mark.parametrize("method", ["Check", "Watch"])
async def test_bytes_that_are_no_message_are_refused_by_what_is_not_ours_too(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Health is open to strangers: none of them writes a traceback into the log."""
    async with serving() as h:
        path = f"/grpc.health.v1.Health/{method}"
        assert (await ended(h.channel.unary_unary(path)(b"\xff\xff")))[0] is grpc.StatusCode.INVALID_ARGUMENT
        no_message = h.channel.stream_unary(path)(iter(()))
        assert (await ended(no_message))[0] is grpc.StatusCode.INVALID_ARGUMENT
        reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        call = h.channel.stream_stream(reflection)(iter([b"\xff\xff"]))
        assert (await ended(call.read()))[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert "Traceback" not in caplog.text


async def test_a_client_behind_a_cut_cable_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing ends its connection: only pings tell."""
    monkeypatch.setattr(limits, "PING_TIMEOUT_S", 0.5)
    async with serving(options=server_options(port=0, keepalive_s=1)) as h:
        cable = Cable(h.server.port)
        channel = open_channel(f"127.0.0.1:{await cable.start()}")
        h.decode().max_steps = 3
        call = generate_pb2_grpc.GenerateStub(channel).Generate(request(max_tokens=50))
        await h.until(lambda: bool(h.decode().running))
        cable.cut()
        await h.until(lambda: not h.decode().running)
        assert h.count("cancelled") == 1
        call.cancel()
        await channel.close()
        await cable.close()


class Cable:
    """Carries bytes between a client and a server, until it is cut: then they vanish."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._tasks: list[asyncio.Task[None]] = []
        self._ends: list[asyncio.StreamWriter] = []
        self._is_cut = False

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def cut(self) -> None:
        self._is_cut = True

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        for end in self._ends:
            end.close()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._ends += [writer, far_writer]
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            self._tasks.append(asyncio.get_running_loop().create_task(self._carry(source, sink)))

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65_536):
            if not self._is_cut:
                sink.write(data)


async def test_a_refusal_that_comes_after_the_calls_end_is_no_error() -> None:
    """Else gRPC writes a traceback into the router's log."""
    with pytest.raises(asyncio.CancelledError):
        await limits.refuse(PastContext(), grpc.StatusCode.DEADLINE_EXCEEDED, "it took too long")


class LeftContext(DeafContext):
    """A call whose client has taken nothing, and leaves."""

    async def write(self, message: object) -> None:
        raise ExecuteBatchError("Failed execute_batch")


async def test_a_slow_client_that_leaves_has_cancelled_and_is_no_defect() -> None:
    """UNKNOWN pages whoever is on call."""
    async with serving() as h:
        with pytest.raises(asyncio.CancelledError):
            await service_of(h, FrontOptions()).generate(request(), LeftContext())
        assert +h.router.metrics.codes == {"CANCELLED": 1}
        await h.until(lambda: h.router.num_in_flight == 0)
