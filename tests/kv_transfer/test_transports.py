"""The contract of a transport (kv_transfer/base.py), on every implementation.

On CPU, cuda_ipc and NCCL run on a fake GPU (fake_gpu.py). KVRELAY_TEST_DEVICE=cuda:0 runs the same tests on a real one.
"""

from __future__ import annotations

import atexit
import errno
import gc
import itertools
import multiprocessing
import os
import random
import shutil
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
import trustme

from engine.pages.layout import LayerKv
from engine.pages.memory import KvMemory
from kv_transfer.base import ReceiveEnd, Segment, SendEnd, TransferError, Transport, Wire
from kv_transfer.checksum import Checksummer, RunningDigest
from kv_transfer.transports.registry import load_transport
from tests.certificates import write_tls
from tests.forked import fork_server
from tests.kv_transfer import fake_gpu
from tests.kv_transfer.gpu_here import SECOND_GPU, why_no_nccl
from tests.kv_transfer.sides import DEVICE, LAYERS, assert_pages_moved, random_memory, snapshot
from worker.wire.tls import TlsFiles

NCCL = pytest.param("process_group", marks=pytest.mark.skipif(bool(why_no_nccl()), reason=why_no_nccl()))
if DEVICE == "cpu":
    FAKES: dict[str, Transport] = {"cuda_ipc": fake_gpu.CUDA_IPC, "nccl": fake_gpu.NCCL}
    ONE_SIDED = ["cuda_ipc", "loopback", "shared_memory"]
    TWO_SIDED: list[Any] = ["process_group", "process_group in TLS", "nccl", "tcp", "tcp in TLS"]
    BETWEEN_PROCESSES: list[Any] = ["cuda_ipc", "process_group", "shared_memory", "tcp"]
    SIZE_CHECKED: list[Any] = ["process_group", "tcp", "tcp in TLS"]
else:
    FAKES = {}
    ONE_SIDED = ["cuda_ipc"]
    TWO_SIDED = [NCCL]
    BETWEEN_PROCESSES = ["cuda_ipc"]  # process_group: tests/gpu/test_transports.py
    SIZE_CHECKED = []  # NCCL's messages have no sizes: the control stream agrees on them
IN_TLS = " in TLS"
ALL: list[Any] = [*ONE_SIDED, *TWO_SIDED]
KILLED_SENDER = [name for name in BETWEEN_PROCESSES if name in TWO_SIDED]
SOON_S = 30.0  # what has not happened by then never will
ON_CPU = pytest.mark.skipif(DEVICE != "cpu", reason="of CPU memory")
WIDE = (LayerKv(16, 80, 64), LayerKv(16, 64, 80))  # pages of 20 KiB and 16 KiB: copied as blocks
ODD = (LayerKv(1, 3, 1),)


@dataclass
class Pair:
    source: KvMemory
    target: KvMemory
    sender: SendEnd
    receiver: ReceiveEnd
    pool: ThreadPoolExecutor = field(default_factory=ThreadPoolExecutor)
    num_segments: int = 0

    def segment(self, layers: range, src: list[int], dst: list[int]) -> Segment:
        self.num_segments += 1
        return Segment(seq=self.num_segments - 1, layers=layers, src_pages=src, dst_pages=dst)

    def move(self, *segments: Segment) -> None:
        arrived = self.pool.submit(self.take, *segments)
        send(self.sender, *segments)
        arrived.result(SOON_S)

    def take(self, *segments: Segment) -> None:
        for segment in segments:
            self.receiver.expect(segment)
        for segment in segments:
            self.receiver.receive(segment)
            self.receiver.place(segment)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        self.pool.shutdown(wait=False)


def transport_named(name: str) -> Transport:
    name = name.removesuffix(IN_TLS)
    return FAKES.get(name) or load_transport(name)


def wire_for(name: str, timeout_s: float) -> Wire:
    return Wire(host="127.0.0.1", timeout_s=timeout_s, tls=certificates() if name.endswith(IN_TLS) else None)


@cache
def certificates() -> TlsFiles:
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return write_tls(Path(folder), trustme.CA())


def send(end: SendEnd, *segments: Segment) -> None:
    for segment in segments:
        end.send(segment)
    end.flush()


def open_pair(
    name: str,
    *,
    layers: tuple[LayerKv, ...] = LAYERS,
    timeout_s: float = SOON_S,
    receiver_timeout_s: float = 0.0,
    target: KvMemory | None = None,
) -> Pair:
    """`receiver_timeout_s`: its own, if not timeout_s, once it is open."""
    source = random_memory(23, layers=layers, seed=1)
    target = target or random_memory(31, layers=layers, seed=2, device=SECOND_GPU or DEVICE)
    transport = transport_named(name)
    receiver = transport.offer(target, peer="prefill-0", wire=wire_for(name, receiver_timeout_s or timeout_s))
    with ThreadPoolExecutor(1) as pool:
        opened = pool.submit(receiver.open, timeout_s)
        sender = transport.connect(source, receiver.params, peer="decode-0", wire=wire_for(name, timeout_s))
        opened.result(SOON_S)
    return Pair(source, target, sender, receiver)


@pytest.fixture(params=ALL)
def pair(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    opened = open_pair(request.param)
    yield opened
    opened.close()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("layers", [LAYERS, WIDE, ODD], ids=["small", "wide", "odd"])
@pytest.mark.parametrize("order", ["random", "runs", "mixed"])
def test_right_bytes_in_right_pages_and_nowhere_else(name: str, layers: tuple[LayerKv, ...], order: str) -> None:
    pair, rng = open_pair(name, layers=layers), random.Random(order)
    src = {"random": rng.sample(range(23), 11), "runs": list(range(5, 16)), "mixed": [*range(2, 8), *range(18, 23)]}
    dst = {"random": rng.sample(range(31), 11), "runs": list(range(11, 22)), "mixed": [*range(9), 30, 29]}
    before = snapshot(pair.target)
    chosen = range(len(layers) // 2, len(layers))
    pair.move(pair.segment(chosen, src[order], dst[order]))
    assert_pages_moved(before, pair.source, pair.target, chosen, src[order], dst[order])
    pair.close()


def test_many_segments_arrive_in_order(pair: Pair) -> None:
    before = snapshot(pair.target)
    rounds = [pair.segment(range(3), [page, 22 - page], [4, 9]) for page in (3, 7, 1, 20, 11, 5, 14, 2)]
    pair.move(*rounds)
    assert_pages_moved(before, pair.source, pair.target, range(3), [2, 20], [4, 9])
    before = snapshot(pair.target)
    pair.move(pair.segment(range(1), [6], [4]))
    assert_pages_moved(before, pair.source, pair.target, range(1), [6], [4])


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("layers", [LAYERS, WIDE, ODD], ids=["small", "wide", "odd"])
def test_the_bytes_are_shown_in_the_order_of_the_checksum(name: str, layers: tuple[LayerKv, ...]) -> None:
    pair = open_pair(name, layers=layers)
    pages = [3, 4, 5, 6, 7, 8, 1, 22, 0]
    segment, shown = pair.segment(range(len(layers)), pages, pages[::-1]), RunningDigest()
    arrived = pair.pool.submit(pair.take, segment)
    pair.sender.send(segment, shown.see)
    arrived.result(SOON_S)
    assert shown.value == Checksummer(pair.source).digest(segment.layers, pages)
    assert shown.value == Checksummer(pair.target).digest(segment.layers, pages[::-1])
    pair.close()


def test_segments_of_many_sizes(pair: Pair) -> None:
    before, rng = snapshot(pair.target), random.Random(5)
    src, dst = rng.sample(range(23), 22), rng.sample(range(31), 22)
    cuts = [0, 1, 3, 4, 11, 12, 22]
    pair.move(*(pair.segment(range(3), src[a:b], dst[a:b]) for a, b in itertools.pairwise(cuts)))
    assert_pages_moved(before, pair.source, pair.target, range(3), src, dst)


@pytest.mark.parametrize("name", TWO_SIDED)
def test_a_large_segment_leaves_before_anybody_receives_it(name: str) -> None:
    """It is announced when it has left, and received when it was announced."""
    pair = open_pair(name, layers=(LayerKv(64, 256, 256),))
    segment = pair.segment(range(1), list(range(20)), list(range(20)))  # 10 MiB: more than sockets hold
    pair.pool.submit(pair.sender.send, segment).result(SOON_S)
    pair.take(segment)
    pair.close()


@pytest.mark.parametrize("name", TWO_SIDED)
def test_what_is_not_placed_is_dropped(name: str) -> None:
    pair = open_pair(name)
    before = snapshot(pair.target)
    unwanted, wanted = pair.segment(range(3), [1], [2]), pair.segment(range(3), [3], [4])
    pair.sender.send(unwanted)
    pair.sender.send(wanted)
    pair.receiver.receive(unwanted)
    pair.take(wanted)
    assert_pages_moved(before, pair.source, pair.target, range(3), [3], [4])
    pair.close()


def test_after_abort_every_call_raises(pair: Pair) -> None:
    pair.sender.abort()
    pair.receiver.abort()
    with pytest.raises(TransferError):
        pair.sender.send(pair.segment(range(3), [1], [2]))
    with pytest.raises(TransferError):
        pair.receiver.receive(pair.segment(range(3), [], [2]))


@pytest.mark.parametrize("name", TWO_SIDED)
def test_abort_wakes_a_receiver_that_waits(name: str) -> None:
    pair = open_pair(name, timeout_s=2 * SOON_S)
    waiting = pair.pool.submit(pair.take, pair.segment(range(3), [], [2]))
    threading.Timer(0.05, pair.receiver.abort).start()
    with pytest.raises(TransferError, match="is closed"):
        waiting.result(SOON_S)
    pair.close()


@pytest.mark.parametrize("name", TWO_SIDED)
def test_abort_wakes_a_sender_that_waits(name: str) -> None:
    pair = open_pair(name, timeout_s=2 * SOON_S, layers=WIDE)

    segments = [pair.segment(range(2), list(range(20)), list(range(20))) for _ in range(200)]
    waiting = pair.pool.submit(send, pair.sender, *segments)  # more than the sockets hold
    threading.Timer(0.05, pair.sender.abort).start()
    with pytest.raises(TransferError, match="is closed"):
        waiting.result(SOON_S)
    pair.close()


@pytest.mark.parametrize("name", TWO_SIDED)
def test_a_peer_that_sends_nothing_is_given_up(name: str) -> None:
    pair = open_pair(name, receiver_timeout_s=1.0)
    with pytest.raises(TransferError, match=r"prefill-0 moved nothing for 1 s"):
        pair.take(pair.segment(range(3), [], [2]))
    pair.close()


@pytest.mark.parametrize("name", SIZE_CHECKED)
@pytest.mark.parametrize(("num_sent", "num_expected"), [(3, 2), (2, 3)])
def test_sizes_that_disagree_raise_and_harm_nothing(name: str, num_sent: int, num_expected: int) -> None:
    pair = open_pair(name, timeout_s=1.0 if name == "process_group" else SOON_S)  # gloo waits for the bytes
    before = snapshot(pair.target)
    waiting = pair.pool.submit(pair.take, pair.segment(range(3), [], list(range(num_expected))))
    sent = pair.segment(range(3), list(range(num_sent)), list(range(num_sent)))
    with suppress(TransferError):  # or it is told by the next
        send(pair.sender, sent)
    with pytest.raises(TransferError):
        waiting.result(SOON_S)
    with pytest.raises(TransferError):
        send(pair.sender, sent)
    assert_pages_moved(before, pair.source, pair.target, range(0), [], [])
    pair.close()


@pytest.mark.parametrize("name", ALL)
def test_two_pairs_at_once_and_one_may_be_aborted(name: str) -> None:
    first = open_pair(name)
    second = open_pair(name, target=first.target)
    before = snapshot(first.target)
    moved = [p.pool.submit(p.move, p.segment(range(3), [1, 2], dst)) for p, dst in ((first, [3, 4]), (second, [8, 7]))]
    for future in moved:
        future.result(SOON_S)
    assert_pages_moved(before, first.source, first.target, range(3), [1, 2, 1, 2], [3, 4, 8, 7])
    first.sender.abort()
    first.receiver.abort()
    second.move(second.segment(range(3), [9, 5], [0, 1]))
    assert_pages_moved(before, first.source, first.target, range(3), [1, 2, 1, 2, 9, 5], [3, 4, 8, 7, 0, 1])
    first.close()
    second.close()


@pytest.mark.parametrize("name", ALL)
def test_eight_pairs_of_one_worker_move_at_once_and_outlive_one_of_them(name: str) -> None:
    first = open_pair(name)
    pairs = [first, *(open_pair(name, target=first.target) for _ in range(7))]
    before, pages = snapshot(first.target), list(range(16))
    moved = [
        p.pool.submit(p.move, p.segment(range(3), [2 * i + 1, 2], [2 * i, 2 * i + 1])) for i, p in enumerate(pairs)
    ]
    for future in moved:
        future.result(SOON_S)
    sent = [page for i in range(8) for page in (2 * i + 1, 2)]
    assert_pages_moved(before, first.source, first.target, range(3), sent, pages)
    pairs[3].receiver.abort()
    for i, p in enumerate(pairs):
        if i != 3:
            p.move(p.segment(range(3), [20], [16 + i]))
    others = [16 + i for i in range(8) if i != 3]
    assert_pages_moved(before, first.source, first.target, range(3), sent + [20] * 7, pages + others)
    for p in pairs:
        p.close()


@pytest.mark.parametrize("name", ONE_SIDED)
def test_the_receiver_sees_that_a_one_sided_sender_has_closed(name: str) -> None:
    pair = open_pair(name)
    assert not pair.receiver.sender_closed
    pair.receiver.close()
    pair.sender.close()
    assert pair.receiver.sender_closed


@ON_CPU
@pytest.mark.parametrize("name", ALL)
def test_once_a_pair_is_open_only_gloo_listens_and_on_its_own_address(name: str) -> None:
    before = listening()
    pair = open_pair(name)
    left = [address for address, port in listening() - before]
    assert left == ["127.0.0.1"] * (2 if name.startswith("process_group") else 0)
    pair.close()


def listening() -> set[tuple[str, int]]:
    ends = psutil.Process().net_connections("tcp")
    return {(end.laddr.ip, end.laddr.port) for end in ends if end.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("name", ALL)
def test_unusable_parameters_are_refused(name: str) -> None:
    with pytest.raises(TransferError):
        transport_named(name).connect(random_memory(3), {}, peer="decode-0", wire=wire_for(name, 0.2))


@ON_CPU
@pytest.mark.parametrize("key", ["nonce", "inode", "bytes", "fd"])
def test_shared_memory_is_not_taken_for_another(key: str) -> None:
    transport, target = load_transport("shared_memory"), random_memory(9)
    receiver, source = transport.offer(target, peer="prefill-0", wire=wire_for("shared_memory", 1)), random_memory(5)
    params = dict(receiver.params)
    params[key] = {"nonce": "00" * 16, "fd": params["fence_fd"]}.get(key, "4096")
    before = open_memfds()
    with pytest.raises(TransferError):
        transport.connect(source, params, peer="decode-0", wire=wire_for("shared_memory", 1))
    assert not open_memfds() - before  # one of an earlier test may have been closed meanwhile


def open_memfds() -> set[Path]:
    gc.collect()
    return {fd for fd in Path("/proc/self/fd").iterdir() if "memfd:" in str(fd.resolve())}


@ON_CPU
def test_a_closed_sender_keeps_nothing_of_the_receivers_memory() -> None:
    """Or a decode worker that died would leave its memory with every prefill worker it had."""
    before = num_maps()
    pair = open_pair("shared_memory")
    with_both = num_maps()
    pair.sender.close()
    assert (with_both - before, num_maps() - before) == (3, 2)  # the two sides' own stay
    pair.close()


def num_maps() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:kvrelay-kv")


def test_an_unknown_transport_is_named() -> None:
    names = "cuda_ipc, loopback, process_group, shared_memory, tcp"
    with pytest.raises(ValueError, match=f"transport is 'pigeon'; give one of {names}"):
        load_transport("pigeon")


def _serve_child(name: str, wire: Wire, pipe: Connection) -> None:
    end = transport_named(name).offer(random_memory(31, seed=2), peer="prefill-0", wire=wire)
    pipe.send(dict(end.params))
    end.open(SOON_S)
    pipe.recv()


def _connect_child(name: str, wire: Wire, pipe: Connection) -> None:
    pipe.send("started")
    end = transport_named(name).connect(random_memory(23), pipe.recv(), peer="decode-0", wire=wire)
    pipe.send("connected")
    pipe.recv()
    end.close()


def _in_child(target: Callable[[str, Wire, Connection], None], name: str) -> tuple[Connection, ForkServerProcess]:
    ours, theirs = multiprocessing.Pipe()
    process = fork_server().Process(target=target, args=(name, wire_for(name, SOON_S), theirs), daemon=True)
    process.start()
    return ours, process


@pytest.mark.parametrize("name", BETWEEN_PROCESSES)
def test_a_killed_receiver_is_an_error_to_the_sender(name: str) -> None:
    pipe, child = _in_child(_serve_child, name)
    sender = transport_named(name).connect(random_memory(23), pipe.recv(), peer="decode-0", wire=wire_for(name, SOON_S))
    child.kill()
    child.join()
    with pytest.raises(TransferError, match="decode-0"):
        send(sender, Segment(seq=0, layers=range(3), src_pages=[1], dst_pages=[2]))
    sender.close()


@pytest.mark.parametrize("name", KILLED_SENDER)
def test_a_killed_sender_is_an_error_to_the_receiver(name: str) -> None:
    receiver = transport_named(name).offer(random_memory(31), peer="prefill-0", wire=wire_for(name, SOON_S))
    pipe, child = _in_child(_connect_child, name)
    assert pipe.recv() == "started"  # importing torch may take longer than the receiver waits
    with ThreadPoolExecutor(1) as pool:
        opened: Future[None] = pool.submit(receiver.open, SOON_S)
        pipe.send(dict(receiver.params))
        assert pipe.recv() == "connected"
        opened.result(SOON_S)
    child.kill()
    with pytest.raises(TransferError, match="prefill-0"):
        receiver.receive(Segment(seq=0, layers=range(3), src_pages=[], dst_pages=[2]))
    receiver.close()


@ON_CPU
def test_a_pair_for_which_there_is_no_map_costs_nothing_and_another_transport_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory, transport = random_memory(4, seed=0), load_transport("shared_memory")
    process = psutil.Process()

    def no_map(*_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    before = process.num_fds()
    monkeypatch.setattr("kv_transfer.transports.pair_file.mmap.mmap", no_map)
    with pytest.raises(TransferError, match="cannot be shared by shared_memory"):
        transport.offer(memory, peer="prefill-0", wire=wire_for("shared_memory", 1))
    assert process.num_fds() == before
