"""How a client finds its token and its certificates, and what it tells who is not let in."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import grpc
import pytest
import trustme

from kvrelay.cli.cluster import state
from kvrelay.cli.console import CliError
from kvrelay.client import AsyncClient, Client, KvrelayError
from kvrelay.client.access import FOUND, Access, HttpAccess, find_access, find_http_access
from kvrelay.client.failures import kvrelay_error
from kvrelay.known_clusters import ClusterState, at, directory, read, start_of
from worker.wire.tls import TlsFiles
from worker.wire.tokens import TokenError

pytestmark = pytest.mark.unit

ENDPOINT = "127.0.0.1:50051"
GIVEN, NOTED, FILED = "given-0123456789abc", "noted-0123456789abc", "filed-0123456789abc"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in [name for name in os.environ if name.startswith("KVRELAY_T")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


def running(**settings: object) -> ClusterState:
    """A cluster whose `kvrelay up` is this process."""
    of_ours = replace(state.this_process("chat", "foreground"), endpoints=(ENDPOINT,), token=NOTED)
    noted = replace(of_ours, **settings)  # type: ignore[arg-type]
    state.write(noted)
    return noted


def tokens_file(folder: Path, token: str = FILED) -> str:
    path = folder / "tokens"
    path.write_text(f"chat:{token}\nbatch:other-{token}\n")
    path.chmod(0o600)
    return str(path)


def test_the_token_of_a_cluster_of_ours_is_found_by_its_endpoint(home: Path) -> None:
    running()
    assert find_access(ENDPOINT, FOUND).metadata == (("authorization", f"Bearer {NOTED}"),)
    assert find_access("localhost:50051", FOUND).token == NOTED
    running(tokens_file=tokens_file(home), token="")
    assert find_access(ENDPOINT, FOUND).token == FILED


def test_a_token_in_plain_text_does_not_go_to_who_has_taken_the_port_of_another_localhost(home: Path) -> None:
    """localhost is ::1, too, where another user may listen."""
    assert find_access("localhost:50051", FOUND).endpoint == "localhost:50051"
    running()
    assert find_access("localhost:50051", FOUND).endpoint == ENDPOINT
    running(tls=True)
    assert find_access("localhost:50051", FOUND).endpoint == "localhost:50051"  # it must show a certificate


def test_what_is_said_comes_before_what_is_found(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running()
    monkeypatch.setenv("KVRELAY_TOKENS_FILE", tokens_file(home))
    assert find_access(ENDPOINT, FOUND).token == FILED
    monkeypatch.setenv("KVRELAY_TOKEN", GIVEN)
    assert find_access(ENDPOINT, FOUND).token == GIVEN
    assert find_access(ENDPOINT, Access(token=NOTED)).token == NOTED
    assert find_access(ENDPOINT, Access(token="")).metadata == ()


def test_a_token_goes_to_no_other_address_and_to_nobody_who_took_the_port(home: Path) -> None:
    noted = running()
    assert not find_access("127.0.0.1:50052", FOUND).token
    assert not find_access("10.0.0.1:50051", FOUND).token
    state.write(replace(noted, started=start_of(1)))  # our number was another's then
    assert not find_access(ENDPOINT, FOUND).token


def test_what_others_could_have_written_is_no_state_of_ours(home: Path) -> None:
    running()
    path = directory() / "chat.json"
    path.chmod(0o644)
    assert (read("chat"), at(ENDPOINT)) == (None, None)
    path.chmod(0o600)
    assert at(ENDPOINT) is not None
    path.write_text(json.dumps({**asdict(running()), "what a later version notes": 1}))
    assert at(ENDPOINT) is None


def test_the_folder_of_the_states_is_ours_alone(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory().mkdir(parents=True, mode=0o777)
    directory().chmod(0o777)
    running()
    assert directory().stat().st_mode & 0o777 == directory().parent.stat().st_mode & 0o777 == 0o700
    assert (directory() / "chat.json").stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(CliError, match="belongs to another user; set XDG_STATE_HOME"):
        state.make_directory()


def test_a_folder_that_a_stranger_made_into_a_link_is_refused(home: Path) -> None:
    (home / "elsewhere").mkdir()
    (home / "kvrelay").symlink_to(home / "elsewhere")
    with pytest.raises(CliError, match="belongs to another user"):
        state.make_directory()


@pytest.mark.parametrize(
    "token", ["short", "with a blank in it!", "schlüssel-mit-umlaut", "line\nbreak-0123456789", "x" * 513]
)
def test_what_is_no_token_is_told_before_anything_is_sent(token: str) -> None:
    with pytest.raises(TokenError, match="the token is no token; give 16 to 512 characters") as refused:
        find_access(ENDPOINT, Access(token=token))
    assert token not in str(refused.value)
    with pytest.raises(KvrelayError, match="INVALID_ARGUMENT: the token is no token"):
        Client(ENDPOINT, token=token)


async def test_certificates_that_cannot_be_used_are_the_clients_one_error() -> None:
    for make in (Client, AsyncClient):
        with pytest.raises(KvrelayError, match=r"the authorities '/nowhere' cannot be used: no such file"):
            make(ENDPOINT, tls=TlsFiles(ca="/nowhere"))


def test_tls_is_found_as_the_token_is(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ca = home / "ca.pem"
    ca.write_bytes(trustme.CA().cert_pem.bytes())
    running(tls=True, tls_ca=str(ca))
    assert find_access(ENDPOINT, FOUND).tls == TlsFiles(ca=str(ca))
    assert find_access(ENDPOINT, Access(tls=True)).tls == TlsFiles()
    assert find_access(ENDPOINT, Access(tls=False)).tls is None
    monkeypatch.setenv("KVRELAY_TLS_CERT", "c")
    assert find_access(ENDPOINT, FOUND).tls == TlsFiles(cert="c")
    running()
    monkeypatch.delenv("KVRELAY_TLS_CERT")
    assert find_access(ENDPOINT, FOUND).tls is None


def test_the_key_of_http_is_found_where_a_cluster_started_here_serves_it(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "http://127.0.0.1:8000"
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    running(http=(url,))
    for asked in (url, "http://localhost:8000"):
        assert find_http_access(asked) == HttpAccess(url=url, key=NOTED, tls_ca="")
    for other in ("http://127.0.0.1:8001", "https://127.0.0.1:8000", "http://api.localhost:8000", "http://[::1]:8000"):
        assert find_http_access(other) == HttpAccess(url=other, key="", tls_ca="")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-mine")
    assert find_http_access(url).key == "sk-mine"
    running(http=("https://127.0.0.1:8000",), tls=True, tls_ca="ca.pem")
    monkeypatch.delenv("OPENAI_API_KEY")
    asked = "https://localhost:8000"
    assert find_http_access(asked) == HttpAccess(url=asked, key=NOTED, tls_ca="ca.pem")


@pytest.mark.parametrize(
    ("details", "sentence"),
    [
        ("Socket closed", "hung up at once: it wants TLS"),
        ("Socket closed", "that its client_ca has signed and whose dates its clock is within"),
        ("Tls handshake failed: SSL_ERROR_SSL: WRONG_VERSION_NUMBER: Invalid", "speaks plain text, not TLS"),
        ("Tls handshake failed: CERTIFICATE_VERIFY_FAILED: unable to get", "give --tls-ca, or KVRELAY_TLS_CA"),
        ("Tls handshake failed: CERTIFICATE_VERIFY_FAILED: certificate has expired: OK", "has expired, or the clock"),
        ("Tls handshake failed: CERTIFICATE_VERIFY_FAILED: certificate is not yet valid: OK", "is not valid yet, or"),
        ("Hostname Verification Check failed.", "is another name's"),
        ("connect: Connection refused (111)", "nothing answers"),
    ],
)
def test_who_speaks_otherwise_is_told_how(details: str, sentence: str) -> None:
    said = f"failed to connect to all addresses; last error: UNKNOWN: ipv4:{ENDPOINT}: {details}"
    error = kvrelay_error(grpc.StatusCode.UNAVAILABLE, said, (), ENDPOINT)
    assert sentence in error.message
    assert ENDPOINT in error.message


def test_a_host_without_address_is_told_in_our_words() -> None:
    said = f"errors resolving {ENDPOINT}: [field:hostname lookup error:address lookup failed: Domain name not found]"
    error = kvrelay_error(grpc.StatusCode.UNAVAILABLE, said, (), ENDPOINT)
    assert error.message == f"the host of {ENDPOINT} has no address that is known here; is its name right?"


@pytest.mark.parametrize("details", ["Socket closed", "Stream removed (Socket closed)", "recvmsg:Connection reset"])
def test_a_connection_that_breaks_is_told_as_lost(details: str) -> None:
    error = kvrelay_error(grpc.StatusCode.UNAVAILABLE, details, (), ENDPOINT)
    assert error.message == f"the connection to {ENDPOINT} was lost"


def test_a_proxy_that_refuses_a_request_or_reaches_no_router_is_told_as_one() -> None:
    large = kvrelay_error(grpc.StatusCode.UNKNOWN, "Received http2 header with status: 413", (), ENDPOINT)
    assert str(large.code) == "RESOURCE_EXHAUSTED"
    assert "larger than the proxy" in str(large)
    lost = kvrelay_error(grpc.StatusCode.UNAVAILABLE, "Received http2 header with status: 502", (), ENDPOINT)
    assert str(lost.code) == "UNAVAILABLE"
    assert "a proxy that answers with HTTP 502" in str(lost)
