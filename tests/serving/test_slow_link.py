"""A client far away, or on a busy machine, is served like any other."""

from __future__ import annotations

import asyncio

from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from worker.wire.rpc import bind, make_server, open_channel

LATENCY_S = 0.3  # each way; one attempt to connect takes two


async def _delayed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        await asyncio.sleep(LATENCY_S)
        writer.write(data)
    writer.close()


async def test_a_connection_that_takes_long_to_come_up_is_not_given_up() -> None:
    server = make_server()
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_server = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(_delayed(reader, to_server[1]), _delayed(to_server[0], writer))

    far = await asyncio.start_server(relay, "127.0.0.1", 0)
    channel = open_channel(f"127.0.0.1:{far.sockets[0].getsockname()[1]}")
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    await channel.close()
    await server.stop(0)
    far.close()
