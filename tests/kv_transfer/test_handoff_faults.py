"""Peers that die, break the protocol, or change their minds: pages come back, and the servicer serves on."""

from __future__ import annotations

import asyncio
import errno
import gc
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from subprocess import PIPE
from typing import Any

import grpc
import grpc.aio
import pytest
import torch

from kv_transfer.handshake import PROTOCOL_VERSION, host_id
from kv_transfer.lease import Granted, Queued
from kv_transfer.options import TransferOptions
from kv_transfer.prefill_side.connect import connect as connect_pair
from kv_transfer.prefill_side.errors import HandoffDenied, HandoffFailed, HandoffLost
from kv_transfer.prefill_side.pair import PrefillPair
from kv_transfer.transports.faulty import Faults
from kvrelay.v1 import worker_pb2, worker_pb2_grpc
from tests.forked import fork_server
from tests.kv_transfer.sides import SECRET, DecodeSide, connect, decode_side, random_memory, request, send_all, snapshot
from worker.wire.rpc import handoff_dial, open_channel, secret_metadata

NUM_PAGES = 37


async def _hold_in_send(address: bytes, transport: str, pipe: Connection) -> None:
    """A prefill worker that is caught in the middle of writing a segment."""

    def hold(_: object) -> None:
        pipe.send("writing")
        time.sleep(600)

    peer = await connect_pair(
        worker_pb2.WorkerAddress.FromString(address),
        me=worker_pb2.WorkerAddress(name="prefill-0", incarnation="p1"),
        model_fingerprint="m",
        memory=random_memory(50, seed=1),
        dial=handoff_dial(SECRET, silent_s=5.0),
        options=TransferOptions(transports=(transport,), connect_timeout_s=30.0),
        host="127.0.0.1",
        faults=Faults(before_send=hold),
    )
    handoff = peer.reserve(request("a", 30), on_stalled=print)
    send_all(handoff, peer.memory, list(range(8)))
    await handoff.commit(token_id=1, num_tokens=30, computed_ns=0)


def _prefill_child(address: bytes, transport: str, pipe: Connection) -> None:
    asyncio.run(_hold_in_send(address, transport, pipe))


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
async def test_a_killed_sender_gives_the_pages_back(transport: str) -> None:
    options = TransferOptions(transports=(transport,), connect_timeout_s=60.0, timeout_s=60.0)
    async with decode_side(options) as decode:
        ours, theirs = multiprocessing.Pipe()
        child = fork_server().Process(
            target=_prefill_child, args=(decode.address.SerializeToString(), transport, theirs), daemon=True
        )
        child.start()
        theirs.close()  # so that its end is noticed
        assert await asyncio.to_thread(ours.recv) == "writing"
        assert decode.servicer.leases.leased_pages == 8
        child.kill()
        await decode.host.until(lambda: len(decode.host.free) == NUM_PAGES)
        assert decode.host.released == [("a", 1, "prefill-0 is gone")]
        assert not decode.host.committed
        await asyncio.to_thread(child.join)


class RawPeer:
    """Speaks the protocol word by word, wrongly if asked to."""

    def __init__(self, decode: DecodeSide) -> None:
        self._channel = open_channel(decode.address.address)
        stub: Any = worker_pb2_grpc.HandoffStub(self._channel)
        self._call = stub.Connect(metadata=secret_metadata(SECRET))

    async def say(self, **kind: Any) -> None:
        await self._call.write(worker_pb2.PrefillMessage(**kind))

    async def hello(self, decode: DecodeSide, transport: str = "loopback", pid: int = 0) -> dict[str, str]:
        """What the decode side says of how its pages are reached."""
        await self.say(
            hello=worker_pb2.HandoffHello(
                worker=worker_pb2.WorkerAddress(name="prefill-9", incarnation="x"),
                protocol_version=PROTOCOL_VERSION,
                model_fingerprint="m",
                layout=decode.memory.layout.signature,
                tensor_parallel=1,
                pipeline_parallel=1,
                transports=[transport],
                host_id=host_id(),
                pid=pid,
            )
        )
        answer = await self.hear()
        assert answer.WhichOneof("kind") == "welcome"
        return dict(answer.welcome.transport_params)

    async def hear(self) -> worker_pb2.DecodeMessage:
        message: worker_pb2.DecodeMessage = await asyncio.wait_for(self._call.read(), 10)
        return message

    async def refusal(self) -> tuple[grpc.StatusCode, str]:
        try:
            while await self.hear() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError:
            pass
        return await self._call.code(), await self._call.details()

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()


@pytest.fixture
async def decode() -> AsyncIterator[DecodeSide]:
    async with decode_side(TransferOptions(transports=("loopback",))) as side:
        yield side


async def test_a_stream_that_does_not_begin_with_hello(decode: DecodeSide) -> None:
    raw = RawPeer(decode)
    await raw.say(reserve=worker_pb2.Reserve(lease_id=1))
    assert await raw.refusal() == (grpc.StatusCode.INVALID_ARGUMENT, "the first message must be a hello")
    await raw.close()


@pytest.mark.parametrize("side", ["kv-receive", "kv-send"])
async def test_pairs_for_which_no_thread_can_be_started_leave_nothing_behind(
    side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, start = TransferOptions(transports=("shared_memory",)), threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(side):
            raise RuntimeError("can't start new thread")
        start(thread)

    async with decode_side(options) as decode:
        memory = random_memory(8)
        await (await connect(decode, options, memory)).close()
        before, attempts = len(os.listdir("/proc/self/fd")), 8
        with monkeypatch.context() as limited:
            limited.setattr(threading.Thread, "start", refuse)
            for _ in range(attempts):
                with pytest.raises((HandoffLost, RuntimeError), match="can't start new thread"):
                    await connect(decode, options, memory)
        await (await connect(decode, options, memory)).close()
        async with asyncio.timeout(5.0):
            while decode.servicer.counters["pairs_closed"] < decode.servicer.counters["pairs_opened"]:
                await asyncio.sleep(0.01)
            while len(os.listdir("/proc/self/fd")) >= before + attempts:
                gc.collect()  # what an exception's frames held; gRPC closes its sockets when it comes to it
                await asyncio.sleep(0.01)


ANNOUNCE = {"lease_id": 1, "layer_end": 1, "page_end": 2, "bytes": 1024}  # layer 0: 256 bytes of K and of V a page


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ({}, "an empty message where"),
        ({"hello": {}}, "hello where"),
        ({"reserve": {"lease_id": 1}}, "asks for lease 1 after lease 1"),
        ({"announce": {**ANNOUNCE, "lease_id": 99}}, "lease 99, but the last it asked for is 1"),
        ({"commit": {"lease_id": 99}}, "lease 99, but the last it asked for is 1"),
        ({"abort": {"lease_id": 99}}, "lease 99, but the last it asked for is 1"),
        ({"announce": {**ANNOUNCE, "layer_end": 4}}, "layers 0 to 4, pages 0 to 2 of 3 layers"),
        ({"announce": {**ANNOUNCE, "layer_end": 0}}, "layers 0 to 0"),
        ({"announce": {**ANNOUNCE, "page_end": 0}}, "pages 0 to 0"),
        ({"announce": {**ANNOUNCE, "page_end": 4_000_000_000}}, "pages 0 to 4000000000"),
        ({"announce": {**ANNOUNCE, "page_begin": 1, "page_end": 3}}, "pages 1 to 3, but the lease has 2"),
        ({"announce": {**ANNOUNCE, "bytes": 1025}}, "1025 bytes for .* which is 1024"),
        ({"announce": {**ANNOUNCE, "segment": 3}}, "segment 3; 0 is next"),
        ({"announce": {**ANNOUNCE, "transfer_seq": 7}}, "transfer 7; 0 is next"),
        (
            {"commit": {"lease_id": 1, "num_tokens": 8, "segments": 2}},
            "2 segments and 8 tokens to lease 1, which has 0",
        ),
        ({"commit": {"lease_id": 1, "num_tokens": 9}}, "0 segments and 9 tokens .* reserved for 8 tokens"),
        ({"commit": {"lease_id": 1, "num_tokens": 7}}, "0 segments and 7 tokens .* reserved for 8 tokens"),
        (
            {"commit": {"lease_id": 1, "num_tokens": 9, "more_token_ids": [1]}},
            "1 new tokens to lease 1, which has room for 0",
        ),
        (
            {"commit": {"lease_id": 1, "num_tokens": 5, "unread_tokens": 4}},
            "5 tokens, with 4 unread to lease 1, which has 0 segments and was reserved for 8",
        ),
        (
            {"commit": {"lease_id": 1, "num_tokens": 5, "unread_tokens": 4, "more_token_ids": [1]}},
            "1 of them new, with 4 unread to lease 1",
        ),
        (
            {"commit": {"lease_id": 1, "num_tokens": 1, "unread_tokens": 3}},
            "leaves 3 tokens of lease 1 unread, which was reserved with room for 4, as one that is decoded",
        ),
    ],
)
async def test_what_breaks_the_protocol_ends_the_pair_with_a_sentence(
    decode: DecodeSide, message: dict[str, Any], sentence: str
) -> None:
    raw = RawPeer(decode)
    await raw.hello(decode)
    room = 4 if "room for 4" in sentence else 0
    await raw.say(reserve=worker_pb2.Reserve(lease_id=1, request=request("a", 8 - room), room_tokens=room))
    assert len((await raw.hear()).granted.pages) == 2
    await raw.say(**message)
    code, details = await raw.refusal()
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith("prefill-9 ")
    assert re.search(sentence, details), details
    await raw.close()
    # This peer never opened its end, so nobody closed it: its process is known to be gone (it named none).
    await decode.host.until(lambda: len(decode.host.free) == NUM_PAGES)
    peer = await connect(decode, TransferOptions(transports=("loopback",)), random_memory(50))
    handoff = peer.reserve(request("b", 4), on_stalled=print)
    send_all(handoff, peer.memory, [3])
    await handoff.commit(token_id=1, num_tokens=4, computed_ns=0)
    await peer.close()


async def test_a_sender_that_cannot_be_watched_keeps_its_pages_until_it_has_stopped(
    decode: DecodeSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be writing: that this process has no descriptor left to watch it with does not make it dead."""

    def no_descriptor(pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pidfd_open", no_descriptor)
    raw = RawPeer(decode)
    await raw.hello(decode)
    await raw.say(reserve=worker_pb2.Reserve(lease_id=1, request=request("a", 8)))
    assert len((await raw.hear()).granted.pages) == 2
    pair = next(iter(decode.servicer._pairs))
    await raw.close()
    await pair.gone
    decode.servicer._poll_fences()
    assert decode.servicer.leases.leased_pages == 2
    pair._end.sender_closed = True  # type: ignore[misc]
    await decode.host.until(lambda: len(decode.host.free) == NUM_PAGES)


MAP_AND_WAIT = """
import mmap, os, sys
pid, fd = sys.stdin.readline().split()
file = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
mapped = mmap.mmap(file, 4096)
print("mapped", flush=True)
sys.stdin.read()
"""


def start_sender() -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-Sc", MAP_AND_WAIT], stdin=PIPE, stdout=PIPE, text=True)


def have_it_map(sender: subprocess.Popen[str], params: dict[str, str]) -> None:
    assert sender.stdin is not None
    assert sender.stdout is not None
    print(params["pid"], params["fence_fd"], file=sender.stdin, flush=True)
    assert sender.stdout.readline() == "mapped\n"


@pytest.mark.parametrize("is_the_sender", [True, False])
async def test_a_stopped_sender_is_killed_or_its_pages_are_quarantined(is_the_sender: bool) -> None:
    """SIGSTOP in the middle of a write: nobody answers the end of the lease, and when woken it would write on.
    A process that a peer only says it is, and that has nothing of ours mapped, is not killed for it."""
    options = TransferOptions(transports=("shared_memory",), fence_timeout_s=0.1)
    async with decode_side(options) as decode:
        sender, raw = start_sender(), RawPeer(decode)
        params = await raw.hello(decode, "shared_memory", sender.pid)
        if is_the_sender:
            await asyncio.to_thread(have_it_map, sender, params)
        await raw.say(reserve=worker_pb2.Reserve(lease_id=1, request=request("a", 8)))
        assert len((await raw.hear()).granted.pages) == 2
        sender.send_signal(signal.SIGSTOP)
        decode.servicer.leases.end("a", "cancelled")
        leases = decode.servicer.leases
        assert (leases.fenced_pages, leases.quarantined_pages) == (2, 0)
        assert (await raw.refusal())[1] == "prefill-9: it has not stopped writing for 0.1 s"
        if not is_the_sender:
            assert sender.poll() is None
            assert (leases.fenced_pages, leases.quarantined_pages) == (0, 2)
            sender.kill()
        await decode.host.until(lambda: len(decode.host.free) == NUM_PAGES)
        assert await asyncio.to_thread(sender.wait) == -signal.SIGKILL
        assert (leases.leased_pages, decode.servicer.counters["peers_killed"]) == (0, int(is_the_sender))
        await raw.close()


async def test_announcing_or_committing_a_queued_lease_ends_the_pair(decode: DecodeSide) -> None:
    decode.host.answer = lambda _: Queued("full")
    for message, sentence in (({"announce": ANNOUNCE}, "which is queued"), ({"commit": {"lease_id": 1}}, "is queued")):
        raw = RawPeer(decode)
        await raw.hello(decode)
        await raw.say(reserve=worker_pb2.Reserve(lease_id=1, request=request("a", 8)))
        assert (await raw.hear()).queued.reason == "full"
        await raw.say(**message)
        assert sentence in (await raw.refusal())[1]
        await raw.close()
    await decode.host.until(lambda: len(decode.host.released) == 2)


async def test_an_earlier_reservation_of_the_same_attempt_must_end_first(decode: DecodeSide) -> None:
    first = await connect(decode, TransferOptions(transports=("loopback",)), random_memory(50), name="prefill-0")
    second = await connect(decode, TransferOptions(transports=("loopback",)), random_memory(50), name="prefill-1")
    await first.reserve(request("a", 8), on_stalled=print).granted()
    with pytest.raises(HandoffDenied, match="still holds an earlier reservation") as denied:
        await second.reserve(request("a", 8), on_stalled=print).granted()
    assert denied.value.cause == worker_pb2.FAILURE_CAUSE_ROOM
    await second.reserve(request("a", 8, attempt=2), on_stalled=print).granted()
    decode.servicer.leases.end("a", "cancelled")
    await decode.host.until(lambda: len(decode.host.free) == NUM_PAGES)
    await first.close()
    await second.close()


@pytest.mark.parametrize("transport", ["loopback", "shared_memory", "process_group", "tcp"])
async def test_random_handoffs_with_everything_going_wrong(transport: str) -> None:
    """Aborts, cancels, queues, damage and lost pairs in random order: no page is lost, none is given twice, and what
    was committed is right."""
    rng = random.Random(7)
    options = TransferOptions(transports=(transport,), timeout_s=2.0)
    faults = Faults(
        corrupt=frozenset(rng.sample(range(1000), 100)),
        fail=frozenset(rng.sample(range(60, 300), 3)),
        delay_s=1e-4,
    )
    async with decode_side(options, memory=random_memory(60, seed=2)) as decode:
        sides = Soak(decode, options, faults, rng)
        await asyncio.gather(*(sides.client(n) for n in range(8)))
        await decode.host.until(lambda: decode.servicer.leases.leased_pages == 0)
        await asyncio.gather(*(peer.close() for peer in sides.peers))
        for name, _ in list(decode.host.held):
            assert name in decode.host.committed, f"{name} holds pages but neither runs nor has a lease"
            sides.check_and_free(name)  # committed, but its sender gave up or was lost before the receipt came
        assert len(decode.host.free) == 60
        assert sides.outcomes["good"] > 20
        assert sides.outcomes["denied"] > 5
        assert sides.outcomes["lost"] > 0


class Soak:
    def __init__(self, decode: DecodeSide, options: TransferOptions, faults: Faults, rng: random.Random) -> None:
        self.decode, self.options, self.faults, self.rng = decode, options, faults, rng
        self.memory = random_memory(50, seed=1)
        self.peers: list[PrefillPair] = []
        self.outcomes = dict.fromkeys(["good", "denied", "failed", "lost"], 0)
        self.sources: dict[str, list[int]] = {}
        self.queue: list[worker_pb2.RequestState] = []
        decode.host.answer = self.reserve
        decode.host.on_freed = self.serve_soon

    def serve_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self.serve_queue)

    def reserve(self, wanted: worker_pb2.RequestState) -> Granted | Queued:
        if len(self.decode.host.free) < 10 or self.rng.random() < 0.2:
            self.queue.append(wanted)
            asyncio.get_running_loop().call_soon(self.serve_queue)
            return Queued("wait")
        return self.decode.host.take(wanted)

    def serve_queue(self) -> None:
        released = {(name, attempt) for name, attempt, _ in self.decode.host.released}
        waiting, self.queue = self.queue, []
        for wanted in waiting:
            if (wanted.request_id, wanted.attempt) in released:
                continue
            if len(self.decode.host.free) < 10:
                self.queue.append(wanted)
            else:
                self.decode.servicer.leases.grant(wanted.request_id, wanted.attempt, self.decode.host.take(wanted))

    async def peer(self) -> PrefillPair:
        live = [peer for peer in self.peers if not peer.is_lost]
        if len(live) < 2:
            name = f"prefill-{len(self.peers)}"
            self.peers.append(await connect(self.decode, self.options, self.memory, name=name, faults=self.faults))
            return self.peers[-1]
        return self.rng.choice(live)

    async def client(self, number: int) -> None:
        for turn in range(15):
            try:
                await self.hand_off_or_give_up(f"{number}-{turn}")
            except HandoffDenied:
                self.outcomes["denied"] += 1
            except HandoffFailed:
                self.outcomes["failed"] += 1
            except HandoffLost:
                self.outcomes["lost"] += 1
            self.decode.servicer.check_invariants()

    async def hand_off_or_give_up(self, name: str) -> None:
        peer, count = await self.peer(), self.rng.randint(1, 10)
        src = self.sources[name] = self.rng.sample(range(50), count)
        handoff = peer.reserve(request(name, count * 4), on_stalled=lambda _: None)
        send_all(handoff, self.memory, src)
        plan = self.rng.random()
        if plan < 0.15:
            await asyncio.sleep(self.rng.random() * 0.003)
            await handoff.abort("changed its mind")
        elif plan < 0.3:
            await asyncio.sleep(self.rng.random() * 0.003)
            self.decode.servicer.leases.end(name, "cancelled")
        await handoff.commit(token_id=1, num_tokens=count * 4, computed_ns=0)
        self.outcomes["good"] += 1
        self.check_and_free(name)

    def check_and_free(self, name: str) -> None:
        src, pages = self.sources[name], list(self.decode.host.held.pop((name, 1)))
        for sent, got in zip(snapshot(self.memory), snapshot(self.decode.memory), strict=True):
            assert torch.equal(got[pages], sent[src])
        self.decode.host.free |= set(pages)
        self.decode.host.changed.set()
        self.serve_queue()
