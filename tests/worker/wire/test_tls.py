"""TLS between two of our processes (worker/wire/): who is let in, and what new files change."""

from __future__ import annotations

import errno
import os
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import trustme
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tests.certificates import write_tls
from worker.wire import rpc
from worker.wire.credentials import FollowedTls, follow_server_files
from worker.wire.tls import MEMBER_NAME, TlsError, TlsFiles, why_open

pytestmark = pytest.mark.unit

AUTHORITY, STRANGER = trustme.CA(), trustme.CA()
KNOCKED_AT = """
import asyncio, sys
from engine.process import set_environment

set_environment(1)
from worker.wire import rpc
from worker.wire.tls import TlsFiles

async def main():
    server = rpc.make_server()
    port = rpc.bind(server, "127.0.0.1", 0, TlsFiles(cert=sys.argv[1], key=sys.argv[2], ca=sys.argv[3]))
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"no TLS, and not a short word, either")
    try:
        await reader.read()
    except ConnectionError:
        pass
    print("hung up")
    writer.close()
    await server.stop(None)

asyncio.run(main())
"""


@asynccontextmanager
async def listening(tls: TlsFiles | None) -> AsyncIterator[str]:
    server = rpc.make_server()
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = rpc.bind(server, "127.0.0.1", 0, tls)
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def answer(address: str, tls: TlsFiles | None) -> grpc.StatusCode:
    """What a caller with these files is told."""
    stub: Any = health_pb2_grpc.HealthStub  # grpc generates no types
    async with rpc.open_channel(address, tls) as channel:
        try:
            await stub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def test_members_know_each_other_and_let_nobody_else_in(tmp_path: Path) -> None:
    member = write_tls(tmp_path, AUTHORITY, MEMBER_NAME, "127.0.0.1")
    others = {
        "plain text": None,
        "no certificate": replace(member, cert="", key=""),
        "a stranger's certificate": write_tls(tmp_path, STRANGER, "stranger", ca=AUTHORITY, stem="stranger"),
    }
    async with listening(member) as address:
        assert await answer(address, member) is grpc.StatusCode.OK
        told = {who: await answer(address, files) for who, files in others.items()}
    assert told == dict.fromkeys(others, grpc.StatusCode.UNAVAILABLE)


async def test_a_member_calls_nobody_who_only_says_to_be_one(tmp_path: Path) -> None:
    """Neither a stranger, nor a client of the cluster, whose certificate is of the same authority."""
    member = write_tls(tmp_path, AUTHORITY)
    impostors = (
        replace(write_tls(tmp_path, STRANGER, ca=AUTHORITY, stem="stranger"), server_name=""),
        write_tls(tmp_path, AUTHORITY, "some-client", stem="client"),
        None,
    )
    for files in impostors:
        async with listening(files) as address:
            assert await answer(address, member) is grpc.StatusCode.UNAVAILABLE


async def test_a_renewed_certificate_is_shown_from_the_next_connection_on(tmp_path: Path) -> None:
    old = write_tls(tmp_path, AUTHORITY)
    async with listening(old) as address:
        assert await answer(address, old) is grpc.StatusCode.OK
        (tmp_path / "member.pem").write_text("half written")
        (tmp_path / "member-ca.pem").write_bytes(STRANGER.cert_pem.bytes())
        assert await answer(address, other := write_tls(tmp_path, AUTHORITY, stem="other")) is grpc.StatusCode.OK
        renewed = write_tls(tmp_path, STRANGER)
        assert await answer(address, renewed) is grpc.StatusCode.OK
        assert await answer(address, other) is grpc.StatusCode.UNAVAILABLE


async def test_who_calls_goes_on_with_what_it_had_while_its_files_are_of_no_use(tmp_path: Path) -> None:
    member = write_tls(tmp_path, AUTHORITY)
    async with listening(write_tls(tmp_path, AUTHORITY, stem="other")) as address:
        assert await answer(address, member) is grpc.StatusCode.OK
        (tmp_path / "member.pem").write_text("half written")
        assert await answer(address, member) is grpc.StatusCode.OK
        write_tls(tmp_path, STRANGER)
        assert await answer(address, member) is grpc.StatusCode.UNAVAILABLE


def test_sockets_of_our_own_go_on_with_what_they_had_too(tmp_path: Path) -> None:
    files = write_tls(tmp_path, AUTHORITY)
    followed = FollowedTls(files)
    had = followed.server_context(), followed.client_context()
    Path(files.key).unlink()
    assert (followed.server_context(), followed.client_context()) == had
    write_tls(tmp_path, AUTHORITY)
    assert followed.server_context() is not had[0]


@pytest.mark.parametrize("is_member", [True, False])
@pytest.mark.parametrize(("days", "why"), [((-3, -1), "certificate has expired"), ((1, 3), "not yet valid")])
def test_a_certificate_out_of_its_dates_is_refused_and_does_not_replace_a_good_one(
    tmp_path: Path, is_member: bool, days: tuple[int, int], why: str
) -> None:
    good = write_tls(tmp_path, AUTHORITY)
    files = good if is_member else replace(good, ca="", server_name="")
    followed = follow_server_files(files)
    now = datetime.now(UTC)
    begins, ends = (now + timedelta(days=day) for day in days)
    leaf = AUTHORITY.issue_cert(MEMBER_NAME, not_before=begins, not_after=ends)
    Path(good.cert).write_bytes(leaf.cert_chain_pems[0].bytes())
    Path(good.key).write_bytes(leaf.private_key_pem.bytes())
    assert not followed.renew()
    for context in (files.server_context, files.client_context):
        with pytest.raises(TlsError, match=f"nobody would believe the certificate .*{why}; give another"):
            context()


def test_a_member_with_a_certificate_that_no_member_would_believe_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(TlsError, match="issuer"):
        write_tls(tmp_path, STRANGER, ca=AUTHORITY).server_context()
    with pytest.raises(TlsError, match="not valid for 'kvrelay'"):
        replace(write_tls(tmp_path, AUTHORITY, "somebody"), server_name=MEMBER_NAME).server_context()


def test_files_that_cannot_be_used_are_told_in_a_sentence(tmp_path: Path) -> None:
    good, other = write_tls(tmp_path, AUTHORITY), write_tls(tmp_path, AUTHORITY, stem="other")
    with pytest.raises(TlsError, match="belong together"):
        replace(good, key=other.key).server_context()
    with pytest.raises(TlsError, match=r"nowhere.* no such file"):
        replace(good, key="nowhere").client_context()
    with pytest.raises(TlsError, match="the key '' cannot be read"):
        replace(good, key="").server_context()
    with pytest.raises(TlsError, match="authorities"):
        replace(good, ca=good.key).client_context()
    with pytest.raises(TlsError, match=r"tls\.cert is missing"):
        TlsFiles(ca=good.ca).server_context()
    Path(other.key).chmod(0o644)
    with pytest.raises(TlsError, match=r"mode 0644\); chmod 600"):
        other.server_context()


def test_files_that_do_not_fit_are_one_line_in_the_log_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Anybody can ask for a handshake."""
    files = follow_server_files(write_tls(tmp_path, AUTHORITY))
    write_tls(tmp_path, AUTHORITY)
    with monkeypatch.context() as full:

        def no_more(*_: object) -> int:
            raise OSError(errno.EMFILE, "Too many open files")

        full.setattr(os, "open", no_more)
        assert not any(files.renew() for _ in range(5))
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert files.renew()
    assert not files.renew()


def test_sockets_of_our_own_ask_for_the_peers_certificate_too(tmp_path: Path) -> None:
    member = write_tls(tmp_path, AUTHORITY)
    assert member.server_context().verify_mode is ssl.CERT_REQUIRED
    dialling = member.client_context()
    assert (dialling.verify_mode, dialling.check_hostname) == (ssl.CERT_REQUIRED, True)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "router.example", "", "127.0.0.1.example"])
def test_no_router_is_open_to_a_network(host: str) -> None:
    files = TlsFiles(cert="c", key="k")
    for tls in (None, files):
        assert why_open(host, auth=False, tls=tls).startswith(f"auth is false and host is {host}, where anybody")
    assert not why_open(host, auth=True, tls=None)
    assert not why_open(host, auth=False, tls=replace(files, ca="a"))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost"])
def test_loopback_may_be_open(host: str) -> None:
    assert not why_open(host, auth=False, tls=None)


def test_strangers_who_fail_fill_no_log(tmp_path: Path) -> None:
    """gRPC writes to stderr by itself, past the bounds that a process's log has."""
    tls = write_tls(tmp_path, AUTHORITY, MEMBER_NAME, "127.0.0.1")
    command = [sys.executable, "-c", KNOCKED_AT, tls.cert, tls.key, tls.ca]
    environment = {key: value for key, value in os.environ.items() if key != "GRPC_VERBOSITY"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "hung up\n", "")
