"""A whole router with tokens and certificates: what a client with them may do, and one without may not."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.front.server import RouterServer, server_options
from kvrelay.client import AsyncClient, KvrelayError
from kvrelay.v1 import cluster_pb2, cluster_pb2_grpc, generate_pb2
from tests.certificates import write_tls
from tests.cluster.harness import Harness, request, serving
from tests.fakes import FakeDecodeWorker, FakePrefillWorker
from worker.wire.tls import TlsFiles
from worker.wire.tokens import TokenError

pytestmark = pytest.mark.unit

TOKEN = "a-token-of-chat-0123"
ENTER = (("authorization", f"Bearer {TOKEN}"),)


def guarded(**settings: Any) -> Any:
    return server_options(port=0, auth=True, tokens=f"chat:{TOKEN}", **settings)


async def refused(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value.code()


async def test_every_call_but_health_wants_a_token() -> None:
    async with serving(options=guarded()) as h:
        status = cluster_pb2_grpc.ClusterStub(h.channel).GetStatus
        for call in (
            h.generate.GenerateOnce(request()),
            h.generate.Generate(request()).read(),
            h.generate.Tokenize(generate_pb2.TokenizeRequest(text="x")),
            status(cluster_pb2.GetStatusRequest()),
        ):
            assert await refused(call) is grpc.StatusCode.UNAUTHENTICATED
        assert (await h.generate.GenerateOnce(request(max_tokens=2), metadata=ENTER)).usage.completion_tokens == 2
        assert (await status(cluster_pb2.GetStatusRequest(), metadata=ENTER)).model == "fake"
        await health_pb2_grpc.HealthStub(h.channel).Check(health_pb2.HealthCheckRequest())
        assert h.count("requests") == 1


async def test_a_scrape_wants_a_token_too() -> None:
    async with serving(options=guarded(metrics_port=0)) as h:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            await asyncio.to_thread(scrape, h)
        assert b"kvrelay:" in await asyncio.to_thread(scrape, h, Authorization=f"Bearer {TOKEN}")


async def test_who_is_refused_is_counted_and_told_of_at_whichever_port(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(options=guarded(metrics_port=0, http_ports=(0,))) as h:
        await refused(h.generate.GenerateOnce(request()))
        for port in (h.server.http_port, h.server.metrics_port):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                await asyncio.to_thread(scrape, h, port)
        text = await asyncio.to_thread(scrape, h, Authorization=f"Bearer {TOKEN}")
    assert b'kvrelay:calls_ended_total{code="UNAUTHENTICATED",model_name="fake"} 3.0' in text
    (line,) = (record.getMessage() for record in caplog.records if "refused" in record.getMessage())
    assert line.startswith("1 calls refused: the token is missing or wrong"), "the next one in 10 s"


def scrape(h: Harness, port: int | None = None, **headers: str) -> bytes:
    asked = urllib.request.Request(f"http://127.0.0.1:{port or h.server.metrics_port}/metrics", headers=headers)
    with urllib.request.urlopen(asked, timeout=30) as answer:
        text: bytes = answer.read()
        return text


@pytest.mark.parametrize(
    "settings",
    [{"auth": True}, {"auth": True, "tokens": "# none"}, {"auth": False, "host": "0.0.0.0"}],
)
def test_no_router_starts_that_would_be_open_by_mistake(settings: dict[str, Any]) -> None:
    with pytest.raises((TokenError, ValueError), match=r"no token|auth is false"):
        RouterServer(server_options(port=0, **settings))


async def test_clients_and_members_speak_tls_each_with_authorities_of_their_own(tmp_path: Path) -> None:
    public, members = trustme.CA(), trustme.CA()
    of_router, of_members = write_tls(tmp_path, public, "127.0.0.1", stem="r"), write_tls(tmp_path, members)
    decode = FakeDecodeWorker(name="decode-0", secret="s", tls=of_members)
    prefill = FakePrefillWorker(name="prefill-0", decodes=[decode], secret="s", tls=of_members)
    tls = TlsFiles(cert=of_router.cert, key=of_router.key)
    server = RouterServer(guarded(secret="s", tls=tls, worker_tls=of_members))
    endpoint = f"127.0.0.1:{await server.start()}"
    try:
        server.set_workers([await prefill.start(), await decode.start()])
        await asyncio.wait_for(server.serving.wait(), 20)
        async with AsyncClient(endpoint, token=TOKEN, tls=TlsFiles(ca=of_router.ca)) as client:
            assert len((await client.generate([1, 2, 3], max_tokens=2)).token_ids) == 2
        for other, sentence in ((False, "hung up at once: it wants TLS"), (True, "is of no authority")):
            async with AsyncClient(endpoint, token=TOKEN, tls=other) as client:
                with pytest.raises(KvrelayError, match=sentence):
                    await client.model_info()
    finally:
        await server.stop()
        await prefill.kill()
        await decode.kill()


async def test_a_worker_without_tls_is_no_member_of_a_cluster_with_it(tmp_path: Path) -> None:
    of_members = write_tls(tmp_path, trustme.CA())
    plain = FakeDecodeWorker(name="decode-0")
    server = RouterServer(server_options(port=0, worker_tls=of_members))
    await server.start()
    try:
        server.set_workers([await plain.start()])
        (link, _, _), *_ = server.router.workers()
        async with asyncio.timeout(20):
            while "handshake" not in link.reason.lower():
                await asyncio.sleep(0.01)
        assert link.state == "connecting"
    finally:
        await server.stop()
        await plain.kill()
