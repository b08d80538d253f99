"""What a tcp pair makes of a peer that goes wrong once it is connected: a sentence, and no byte in any page."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest

from engine.pages.memory import KvMemory
from kv_transfer.base import ReceiveEnd, Segment, SendEnd, TransferError, Wire
from kv_transfer.transports.pair_socket import dial
from kv_transfer.transports.tcp import HEADER, TRANSPORT
from tests.kv_transfer.sides import DEVICE, assert_pages_moved, random_memory, snapshot

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="of CPU memory")

HASTY = Wire(host="127.0.0.1", timeout_s=1.0)
TWO_PAGES = Segment(seq=0, layers=range(3), src_pages=[], dst_pages=[4, 2])
SOON_S = 30.0
PATIENT = replace(HASTY, timeout_s=SOON_S)


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as threads:
        yield threads


def connected(pool: ThreadPoolExecutor, memory: KvMemory, wire: Wire) -> tuple[ReceiveEnd, socket.socket]:
    """A receiving end, and what a sender would write to."""
    receiver = TRANSPORT.offer(memory, peer="prefill-0", wire=wire)
    opened: Future[None] = pool.submit(receiver.open, SOON_S)
    sock = dial(receiver.params, PATIENT, "decode-0")
    opened.result(SOON_S)
    return receiver, sock


SIZE = 2 * random_memory(1).layout.page_bytes(range(3))
WRONG: dict[str, tuple[bytes, Callable[[socket.socket], None] | None, str]] = {
    "another segment": (
        HEADER.pack(7, SIZE) + bytes(SIZE),
        None,
        f"sends segment 7 of {SIZE} bytes where 0 of {SIZE} belongs",
    ),
    "too short": (
        HEADER.pack(0, SIZE - 1) + bytes(SIZE),
        None,
        f"sends segment 0 of {SIZE - 1} bytes where 0 of {SIZE} belongs",
    ),
    "huge": (HEADER.pack(0, 1 << 63), None, f"sends a segment of {1 << 63} bytes; "),
    "no header": (b"\xff" * 300, None, f"sends a segment of {(1 << 64) - 1} bytes; "),
    "half and then silence": (HEADER.pack(0, SIZE) + bytes(SIZE // 2), None, "moved nothing for 1 s or is gone"),
    "half and then its end": (HEADER.pack(0, SIZE) + bytes(SIZE // 2), socket.socket.close, "has closed it"),
    "half and then a reset": (HEADER.pack(0, SIZE) + bytes(SIZE // 2), reset, "connection with prefill-0 is lost"),
    "its end": (b"", socket.socket.close, "the connection with prefill-0 is lost: the other side has closed it"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_sender_that_goes_wrong_ends_the_pair_and_reaches_no_page(name: str, pool: ThreadPoolExecutor) -> None:
    said, then, sentence = WRONG[name]
    memory = random_memory(7)
    before = snapshot(memory)
    receiver, sock = connected(pool, memory, HASTY if "silence" in name else PATIENT)
    sock.sendall(said)
    if then is not None:
        then(sock)
    for _ in range(2):  # it stays so
        with pytest.raises(TransferError, match=sentence):
            receiver.receive(TWO_PAGES)
    assert_pages_moved(before, memory, memory, range(0), [], [])
    receiver.close()
    sock.close()


def send_without_end(sender: SendEnd) -> None:
    for seq in range(10_000):
        sender.send(Segment(seq=seq, layers=range(3), src_pages=range(500), dst_pages=range(500)))


@pytest.mark.parametrize(("then", "sentence"), [(None, "decode-0 moved nothing for 1 s"), (reset, "is lost")])
def test_a_receiver_that_takes_nothing_ends_the_pair(
    then: Callable[[socket.socket], None] | None, sentence: str, pool: ThreadPoolExecutor
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        params = {"address": "127.0.0.1", "port": str(server.getsockname()[1]), "token": "00" * 32, "answer": "11" * 32}
        memory = random_memory(500)
        wire = HASTY if then is None else PATIENT
        connecting = pool.submit(TRANSPORT.connect, memory, params, peer="decode-0", wire=wire)
        sock, _ = server.accept()
        sock.sendall(b"\x11" * 32)
        sender = connecting.result(SOON_S)
    if then is not None:
        then(sock)
    with pytest.raises(TransferError, match=sentence):
        send_without_end(sender)
    with pytest.raises(TransferError, match=sentence):
        sender.flush()
    sender.close()
    sock.close()
