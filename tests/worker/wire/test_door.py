"""Who a server lets in, whatever is sent instead of a token (worker/wire/door.py, cluster/front/authentication.py)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc._cython.cygrpc import ExecuteBatchError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from cluster.front.authentication import client_door
from tests.worker.wire.raw_http2 import raw_call
from worker.wire import door, rpc
from worker.wire.door import CALLER
from worker.wire.tokens import Keyring

pytestmark = pytest.mark.unit

TOKEN = "a-token-of-chat-0123"
SECRET = "the-secret-of-this-cluster"
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED


async def whoami(_: bytes, context: Any) -> bytes:
    return CALLER.get().encode()


async def echo(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for _ in requests:
        yield CALLER.get().encode()


class Called:
    """A server with a door, a channel to it, and its one service with a unary and a streaming method."""

    def __init__(self, port: int, channel: grpc.aio.Channel, the_door: door.Door) -> None:
        self.port = port
        self.channel = channel
        self.door = the_door

    async def answer(self, *metadata: tuple[str, str | bytes], method: str = "/t.Test/WhoAmI") -> Any:
        """The method's, or the status."""
        try:
            return await self.channel.unary_unary(method)(b"", metadata=metadata, timeout=30)
        except grpc.aio.AioRpcError as error:
            return error.code()


@asynccontextmanager
async def serving(the_door: door.Door, **unary: Any) -> AsyncIterator[Called]:
    server = rpc.make_server(the_door)
    handlers = {
        "WhoAmI": grpc.unary_unary_rpc_method_handler(whoami),
        "Echo": grpc.stream_stream_rpc_method_handler(echo),
        **{name: grpc.unary_unary_rpc_method_handler(behaviour) for name, behaviour in unary.items()},
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.Test", handlers),))
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    reflection.enable_server_reflection(("t.Test", reflection.SERVICE_NAME), server)
    port = rpc.bind(server, "127.0.0.1", 0)
    await server.start()
    async with rpc.open_channel(f"127.0.0.1:{port}") as channel:
        yield Called(port, channel, the_door)
    await server.stop(None)


def public() -> door.Door:
    return client_door(Keyring(text=f"chat:{TOKEN}\nbatch:other-{TOKEN}"))


async def test_who_has_a_token_is_known_by_its_name() -> None:
    async with serving(public()) as h:
        assert await h.answer(("authorization", f"Bearer {TOKEN}")) == b"chat"
        assert await h.answer(("authorization", f"bearer  other-{TOKEN}")) == b"batch"
        call = h.channel.stream_stream("/t.Test/Echo")(iter([b""]), metadata=(("authorization", f"Bearer {TOKEN}"),))
        assert [answer async for answer in call] == [b"chat"]


@pytest.mark.parametrize(
    "metadata",
    [
        [],
        [("authorization", "")],
        [("authorization", "Bearer")],
        [("authorization", "Bearer ")],
        [("authorization", TOKEN)],
        [("authorization", f"Basic {TOKEN}")],
        [("authorization", f"Bearer {TOKEN[:-1]}")],
        [("authorization", f"Bearer {TOKEN} {TOKEN}")],
        [("authorization", "Bearer wrong"), ("authorization", f"Bearer {TOKEN}")],
        [("authorization", f"Bearer {TOKEN}"), ("authorization", f"Bearer {TOKEN}")],
        [("authorization-bin", f"Bearer {TOKEN}".encode())],
        [("proxy-authorization", f"Bearer {TOKEN}")],
        [("kvrelay-secret", SECRET)],
        [("authorization", "Bearer " + "x" * 7000)],
    ],
)
async def test_what_is_no_token_is_refused(metadata: list[tuple[str, str | bytes]]) -> None:
    async with serving(public()) as h:
        assert await h.answer(*metadata) is UNAUTHENTICATED


async def test_every_service_but_health_is_behind_the_door() -> None:
    async with serving(public()) as h:
        stub: Any = health_pb2_grpc.HealthStub  # grpc generates no types
        await stub(h.channel).Check(health_pb2.HealthCheckRequest())
        stub = reflection_pb2_grpc.ServerReflectionStub
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        call = stub(h.channel).ServerReflectionInfo(iter([ask]))
        assert await call.code() is UNAUTHENTICATED
        for method in ("//WhoAmI", "/t.Test//WhoAmI", "/grpc.health.v1.Health/../t.Test/WhoAmI", "t.Test/WhoAmI", "/"):
            assert await h.answer(method=method) is grpc.StatusCode.UNIMPLEMENTED


async def test_bytes_that_are_no_text_are_a_wrong_token_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    """What a client of gRPC's own cannot send: another can."""
    for the_door, key in ((public(), b"authorization"), (rpc.secret_door(SECRET), b"kvrelay-secret")):
        assert the_door is not None
        async with serving(the_door) as h:
            for value in (b"Bearer \xff\xfe", b"Bearer schl\xc3\xbcssel", b"\xe9" * 40, b"\x80"):
                status = await raw_call(h.port, b"/t.Test/WhoAmI", [(key, value)])
                assert status is None or status == UNAUTHENTICATED.value[0], value  # None: gRPC resets the stream
            assert await h.answer() is UNAUTHENTICATED
            assert not [record for record in caplog.records if record.name != door.log.name]


async def test_a_client_that_leaves_while_it_is_answered_leaves_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    has_left = asyncio.Event()

    async def leave(_: bytes, context: Any) -> bytes:
        """As gRPC tells a handler of it."""
        has_left.set()
        raise ExecuteBatchError("Failed execute_batch")

    async with serving(public(), Leave=leave) as h:
        call = h.channel.unary_unary("/t.Test/Leave")(b"", metadata=(("authorization", f"Bearer {TOKEN}"),))
        await has_left.wait()
        call.cancel()
    assert caplog.text == ""


@pytest.mark.parametrize("method", ["WhoAmI", "Echo"])
async def test_who_says_nothing_is_refused_soon(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """A unary call, too, may be left open without a message."""
    monkeypatch.setattr(door, "FIRST_MESSAGE_S", 0.05)
    async with serving(public()) as h:
        silent = h.channel.stream_stream(f"/t.Test/{method}")(metadata=(("authorization", "Bearer no"),), timeout=30)
        assert await silent.code() is UNAUTHENTICATED


async def test_only_so_many_strangers_are_heard_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may send a message as large as the server takes, and stop before its end."""
    monkeypatch.setattr(door, "FIRST_MESSAGE_S", 60.0)
    monkeypatch.setattr(door, "MAX_HEARD", 2)
    async with serving(public()) as h:
        silent = [h.channel.stream_stream("/t.Test/Echo")(timeout=30) for _ in range(3)]
        done, heard = await asyncio.wait(
            [asyncio.ensure_future(call.code()) for call in silent], return_when=asyncio.FIRST_COMPLETED
        )
        assert [task.result() for task in done] == [UNAUTHENTICATED]
        assert len(heard) == 2
        for call in silent:
            call.cancel()


async def test_a_flood_of_wrong_tokens_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now = [0.0]
    keyring = Keyring(text=f"chat:{TOKEN}")
    the_door = door.Door(lambda _: keyring.name_of(b"wrong"), "no", clock=lambda: now[0])
    async with serving(the_door) as h:
        await asyncio.gather(*(h.answer(("authorization", "Bearer wrong-wrong")) for _ in range(50)))
        now[0] += door.LOG_GAP_S
        await h.answer()
    assert the_door.num_refused == 51
    assert [record.getMessage().partition(";")[0] for record in caplog.records if record.name == door.log.name] == [
        "1 calls refused: no",
        "50 calls refused: no",
    ]
    assert "wrong-wrong" not in caplog.text
