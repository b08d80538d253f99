"""A pair's own port takes the pair's sender and nobody else, whoever calls, and is closed then."""

from __future__ import annotations

import itertools
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import trustme

from kv_transfer.base import TransferError, Wire
from kv_transfer.transports import pair_socket
from kv_transfer.transports.pair_socket import MAX_CALLERS, PairListener, dial, shut
from tests.certificates import write_tls

HOST = "127.0.0.1"
WIRE = Wire(host=HOST, timeout_s=10.0)
SOON_S = 10.0


@pytest.fixture(scope="module")
def tls_wire(tmp_path_factory: pytest.TempPathFactory) -> Wire:
    return replace(WIRE, tls=write_tls(tmp_path_factory.mktemp("tls"), trustme.CA()))


@pytest.fixture(params=["in plain", "in TLS"])
def wire(request: pytest.FixtureRequest, tls_wire: Wire) -> Wire:
    return tls_wire if request.param == "in TLS" else WIRE


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as threads:
        yield threads


def accepting(pool: ThreadPoolExecutor, listener: PairListener, timeout_s: float = SOON_S) -> Future[socket.socket]:
    return pool.submit(listener.accept, "prefill-0", timeout_s)


def call(listener: PairListener) -> socket.socket:
    return socket.create_connection((HOST, int(listener.params["port"])), timeout=SOON_S)


def is_hung_up_on(caller: socket.socket) -> bool:
    with suppress(ConnectionError):
        while caller.recv(4096):
            pass  # an alert
    return True


def assert_none_is_accepted(accepted: Future[socket.socket], listener: PairListener) -> None:
    listener.abort()
    assert isinstance(accepted.exception(SOON_S), OSError)


def assert_talk(one: socket.socket, other: socket.socket) -> None:
    one.sendall(b"over here")
    assert other.recv(100) == b"over here"
    for end in (one, other):
        end.close()


def test_both_ends_meet_and_nobody_can_call_any_more(wire: Wire, pool: ThreadPoolExecutor) -> None:
    listener = PairListener(wire)
    accepted = accepting(pool, listener)
    sender = dial(listener.params, wire, "decode-0")
    receiver = accepted.result(SOON_S)
    with pytest.raises(ConnectionRefusedError):
        call(listener)
    assert isinstance(receiver, ssl.SSLSocket) == (wire.tls is not None)
    assert_talk(sender, receiver)


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + bytes(200), bytes(32), b"x" * 9000])
def test_strangers_are_hung_up_on_and_do_not_keep_the_sender_out(
    said: bytes, wire: Wire, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = PairListener(wire)
    accepted = accepting(pool, listener)
    with monkeypatch.context() as hasty, call(listener) as stranger:
        hasty.setattr(pair_socket, "CALLER_S", 0.2)
        with suppress(ConnectionError):
            stranger.sendall(said)
        assert is_hung_up_on(stranger)
    sender = dial(listener.params, wire, "decode-0")
    assert_talk(sender, accepted.result(SOON_S))


def test_callers_who_say_nothing_make_way_for_the_sender(wire: Wire, pool: ThreadPoolExecutor) -> None:
    listener = PairListener(wire)
    accepted = accepting(pool, listener)
    strangers = [call(listener) for _ in range(3 * MAX_CALLERS)]
    sender = dial(listener.params, wire, "decode-0")
    receiver = accepted.result(SOON_S)
    assert all(is_hung_up_on(stranger) for stranger in strangers)
    for stranger in strangers:
        stranger.close()
    assert_talk(sender, receiver)


def test_a_caller_is_not_slow_because_we_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process gets no core between any two looks at the clock; the caller goes on meanwhile."""
    listener = PairListener(WIRE)
    token = bytes.fromhex(listener.params["token"])
    now_s = itertools.count(step=2 * pair_socket.CALLER_S)
    parts = iter([token[at : at + 7] for at in range(0, len(token), 7)])
    with call(listener) as sender:

        def monotonic() -> float:
            sender.sendall(next(parts, b""))
            return next(now_s)

        monkeypatch.setattr(pair_socket, "time", SimpleNamespace(monotonic=monotonic))
        with listener.accept("prefill-0", 60.0):
            assert sender.recv(100).hex() == listener.params["answer"]


def test_a_sender_that_does_not_come_is_given_up_with_what_was_heard_instead(pool: ThreadPoolExecutor) -> None:
    listener = PairListener(WIRE)
    with call(listener) as stranger:
        stranger.sendall(bytes(32))
        with pytest.raises(TransferError, match=r"did not connect to us within 1 s; .*: its token is wrong$"):
            accepting(pool, listener, 1.0).result(SOON_S)


def test_a_listener_that_is_aborted_waits_no_longer(wire: Wire, pool: ThreadPoolExecutor) -> None:
    for delay_s in (0.0, 0.1):
        listener = PairListener(wire)
        threading.Timer(delay_s, listener.abort).start()
        accepted = accepting(pool, listener, 10 * SOON_S)
        assert isinstance(accepted.exception(SOON_S), OSError)
        listener.close()


def test_the_token_of_another_pair_does_not_do(wire: Wire, pool: ThreadPoolExecutor) -> None:
    listener, other = PairListener(wire), PairListener(wire)
    accepted = accepting(pool, listener)
    with pytest.raises(TransferError, match=r"^cannot open a pair with decode-0 at 127\.0\.0\.1:\d+: "):
        dial({**listener.params, "token": other.params["token"]}, wire, "decode-0")
    assert_none_is_accepted(accepted, listener)
    other.close()


def test_who_does_not_know_the_answer_is_sent_nothing(wire: Wire, pool: ThreadPoolExecutor) -> None:
    """Somebody who took the receiver's address."""
    listener = PairListener(wire)
    accepted = accepting(pool, listener)
    with pytest.raises(TransferError, match="somebody else listens there"):
        dial({**listener.params, "answer": "00" * 32}, wire, "decode-0")
    with accepted.result(SOON_S) as receiver:
        assert receiver.recv(1) == b""


@pytest.mark.parametrize("spoilt", [{"port": "9" * 30}, {"address": "x" * 70}])
def test_where_nobody_can_be_is_told(wire: Wire, spoilt: dict[str, str]) -> None:
    listener = PairListener(wire)
    with pytest.raises(TransferError, match=r"^cannot connect to decode-0 at |^cannot open a pair with decode-0 at "):
        dial({**listener.params, **spoilt}, replace(wire, timeout_s=0.2), "decode-0")
    listener.close()


def test_certificates_of_another_authority_do_not_do(tls_wire: Wire, tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    stranger = replace(WIRE, tls=write_tls(tmp_path, trustme.CA()))
    listener = PairListener(tls_wire)
    accepted = accepting(pool, listener)
    with pytest.raises(TransferError, match="certificate verify failed"):
        dial(listener.params, stranger, "decode-0")
    assert stranger.tls is not None
    context = stranger.tls.client_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # who trusts everybody is not trusted for it
    with call(listener) as caller, suppress(OSError), context.wrap_socket(caller) as wrapped:
        wrapped.sendall(bytes.fromhex(listener.params["token"]))
        with suppress(OSError):
            assert not wrapped.recv(1)
    assert_none_is_accepted(accepted, listener)


def test_a_side_in_plain_and_one_in_tls_are_told_so(tls_wire: Wire) -> None:
    for ours, theirs in ((WIRE, tls_wire), (tls_wire, WIRE)):
        listener = PairListener(theirs)
        with pytest.raises(TransferError, match="one speaks TLS and the other does not; give both the same tls"):
            dial(listener.params, ours, "decode-0")
        listener.close()


def test_a_connection_that_is_shut_wakes_who_reads(wire: Wire, pool: ThreadPoolExecutor) -> None:
    listener = PairListener(wire)
    accepted = accepting(pool, listener)
    sender = dial(listener.params, wire, "decode-0")
    receiver = accepted.result(SOON_S)
    waiting = pool.submit(receiver.recv, 1)
    threading.Timer(0.05, shut, [receiver]).start()
    with suppress(OSError):
        assert waiting.result(SOON_S) == b""
    sender.close()
    receiver.close()
