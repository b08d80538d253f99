"""A prefill and a decode side over real gRPC on the loopback address: what is promised of a handoff."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme

from engine.pages.layout import LayerKv
from engine.pages.memory import KvMemory, ShareBytes
from engine.pages.share import Share
from kv_transfer.base import TransferError
from kv_transfer.handshake import host_id
from kv_transfer.lease import Denied, Queued
from kv_transfer.options import TransferOptions
from kv_transfer.prefill_side.errors import HandoffDenied, HandoffFailed, HandoffLost, HandoffRefused
from kv_transfer.prefill_side.pair import PrefillPair
from kv_transfer.transports import shared_memory
from kv_transfer.transports.faulty import Faults
from kvrelay.v1 import worker_pb2
from tests.certificates import write_tls
from tests.kv_transfer.sides import (
    DEVICE,
    PAGE_SIZE,
    DecodeSide,
    assert_pages_moved,
    connect,
    decode_side,
    random_memory,
    request,
    send_all,
    snapshot,
)

TRANSPORTS = ["loopback", "shared_memory", "process_group", "tcp"]


def no_stall(reason: str) -> None:
    raise AssertionError(f"stalled: {reason}")


def options(transport: str = "shared_memory", **kwargs: object) -> TransferOptions:
    return TransferOptions(transports=(transport,), **kwargs)  # type: ignore[arg-type]


async def hand_off(decode: DecodeSide, peer: PrefillPair, name: str = "a", num_pages: int = 9) -> None:
    """One request, checked to the last byte."""
    src = random.Random(name).sample(range(peer.memory.layout.num_pages), num_pages)
    before = snapshot(decode.memory)
    handoff = peer.reserve(request(name, num_pages * PAGE_SIZE - 1), on_stalled=no_stall)
    send_all(handoff, peer.memory, src)
    receipt = await handoff.commit(token_id=7, num_tokens=num_pages * PAGE_SIZE - 1, computed_ns=time.monotonic_ns())
    dst = list(decode.host.held[name, 1])
    assert_pages_moved(before, peer.memory, decode.memory, range(peer.memory.layout.num_layers), src, dst)
    assert receipt.pages == num_pages
    assert receipt.bytes == num_pages * peer.memory.layout.page_bytes()
    assert receipt.checksums_ok == peer.options.checksums
    assert not receipt.rank_bytes, "it is one process"
    token_ids, theirs = decode.host.committed[name]
    assert token_ids == [7]
    assert (theirs.pages, theirs.bytes, theirs.resends) == (receipt.pages, receipt.bytes, receipt.resends)


@pytest.mark.skipif(DEVICE != "cpu", reason="its memory is the host's")
async def test_a_receipt_says_what_each_process_of_the_sender_had() -> None:
    layout = random_memory(9).layout
    first = KvMemory(layout, share=Share(layers=range(2)))
    file = os.dup(first.fd or -1)
    there = ShareBytes(share=first.share, num_bytes=len(first.bytes), fd=file, address=first.address)
    leader = KvMemory(layout, share=Share(layers=range(2, 3)), others=[there])
    async with decode_side(options()) as decode:
        peer = await connect(decode, options(), leader)
        handoff = peer.reserve(request("a", 3 * PAGE_SIZE - 1), on_stalled=no_stall)
        send_all(handoff, leader, [1, 5, 7])
        receipt = await handoff.commit(token_id=7, num_tokens=3 * PAGE_SIZE - 1, computed_ns=time.monotonic_ns())
        assert list(receipt.rank_bytes) == [3 * layout.page_bytes(layers) for layers in (range(2, 3), range(2))]
        assert sum(receipt.rank_bytes) == receipt.bytes
        await peer.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("checksums", [True, False])
async def test_good_handoff(transport: str, checksums: bool) -> None:
    chosen = options(transport, checksums=checksums)
    async with decode_side(chosen) as decode:
        peer = await connect(decode, chosen, random_memory(50, seed=1))
        assert peer.transport == transport
        await hand_off(decode, peer, "a")
        await hand_off(decode, peer, "b")
        assert decode.servicer.counters["receipts_good"] == 2
        assert decode.servicer.leases.leased_pages == 0
        await peer.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_what_grows_while_it_moves(transport: str) -> None:
    """Nine pages and two tokens when it was reserved; five tokens more, and so a page, when it is committed; the third
    page of the room was not needed."""
    chosen = options(transport)
    async with decode_side(chosen) as decode:
        peer = await connect(decode, chosen, random_memory(50, seed=1))
        before, src = snapshot(decode.memory), random.Random(1).sample(range(50), 11)
        reserved = 9 * PAGE_SIZE + 2
        asked = request("a", reserved)
        asked.sampling.max_tokens = 20
        handoff = peer.reserve(asked, room_tokens=10, on_stalled=no_stall)
        layers = range(peer.memory.layout.num_layers)
        handoff.segment_ready(layers, 0, 9, src[:9])
        await handoff.moved()
        handoff.segment_ready(layers, 9, 11, src[9:])
        now = time.monotonic_ns()
        receipt = await handoff.commit(
            token_id=7, num_tokens=reserved + 5, computed_ns=now, more_token_ids=[11, 12, 13, 14, 15]
        )
        dst = decode.host.held["a", 1]
        assert len(dst) == 12
        assert_pages_moved(before, peer.memory, decode.memory, layers, src, list(dst[:11]))
        token_ids, theirs = decode.host.committed["a"]
        assert (token_ids, receipt.pages, theirs.pages) == ([11, 12, 13, 14, 15, 7], 11, 11)
        await peer.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_what_is_read_in_part_is_handed_over_to_one_that_reads(transport: str) -> None:
    """Two pages and a token of five pages."""
    chosen = options(transport)
    async with decode_side(chosen) as decode:
        peer = await connect(decode, chosen, random_memory(50, seed=1))
        read, num_tokens = 2 * PAGE_SIZE + 1, 5 * PAGE_SIZE
        for reads in (False, True):
            decode.host.reads_prompts, before = reads, snapshot(decode.memory)
            handoff = peer.reserve(request(f"a{reads}", num_tokens), on_stalled=no_stall)
            handoff.pages_ready(0, [7, 3, 5])
            committed = handoff.commit(num_tokens=read, computed_ns=0, unread_tokens=num_tokens - read)
            if not reads:
                with pytest.raises(HandoffFailed, match="decode-0: it reads no prompts"):
                    await committed
                await decode.host.until(lambda: not decode.host.held)
                continue
            assert (await committed).pages == 3
        dst, layers = decode.host.held["aTrue", 1], range(peer.memory.layout.num_layers)
        assert_pages_moved(before, peer.memory, decode.memory, layers, [7, 3, 5], list(dst[:3]))
        assert (decode.host.unread["aTrue"][0], decode.host.committed) == (read, {})
        await peer.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_damaged_segment_is_caught_and_sent_again(transport: str) -> None:
    chosen = options(transport)
    async with decode_side(chosen) as decode:
        peer = await connect(decode, chosen, random_memory(50, seed=1), faults=Faults(corrupt=frozenset({1})))
        await hand_off(decode, peer)
        assert decode.host.committed["a"][1].resends == 1
        counters = decode.servicer.counters
        assert (counters["receipts_bad"], counters["receipts_good"], counters["resends"]) == (1, 1, 1)
        await peer.close()


async def test_transfer_that_never_happens_fails() -> None:
    chosen = options(max_resends=1)
    async with decode_side(chosen) as decode:
        peer = await connect(decode, chosen, random_memory(50, seed=1), faults=Faults(drop_all=True))
        handoff = peer.reserve(request("a", 8), on_stalled=no_stall)
        send_all(handoff, peer.memory, [3, 5])
        with pytest.raises(HandoffFailed, match="2 of 2 pages are not whole: 3 of 6 segments damaged"):
            await handoff.commit(token_id=1, num_tokens=8, computed_ns=time.monotonic_ns())
        await decode.host.until(lambda: len(decode.host.released) == 1)
        assert len(decode.host.free) == 37
        assert not decode.host.committed
        assert decode.servicer.counters["receipts_bad"] == 2
        await peer.close()


async def test_segments_that_were_not_announced_are_missed() -> None:
    async with decode_side(options()) as decode:
        peer = await connect(decode, options(), random_memory(50, seed=1))
        handoff = peer.reserve(request("a", 8), on_stalled=no_stall)
        handoff.segment_ready(range(2), 0, 2, [3, 5])
        handoff.segment_ready(range(2, 3), 0, 1, [3])
        with pytest.raises(HandoffFailed, match="1 of 2 pages are not whole: nothing was announced"):
            await handoff.commit(token_id=1, num_tokens=8, computed_ns=time.monotonic_ns())
        await decode.host.until(lambda: len(decode.host.free) == 37)
        await peer.close()


async def test_lease_without_progress_gives_its_pages_back() -> None:
    async with decode_side(options(lease_ttl_s=0.05)) as decode:
        peer = await connect(decode, options(), random_memory(50, seed=1))
        handoff = peer.reserve(request("a", 30), on_stalled=no_stall)
        await handoff.granted()
        await decode.host.until(lambda: len(decode.host.released) == 1)
        assert len(decode.host.free) == 37
        assert decode.servicer.counters["leases_expired"] == 1
        with pytest.raises(HandoffDenied, match=r"no progress for 0\.05 s"):
            await handoff.commit(token_id=1, num_tokens=30, computed_ns=0)
        await peer.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_cancel_during_a_transfer_waits_for_the_fence(transport: str) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        entered.set()
        assert go_on.wait(20)

    chosen = options(transport)
    async with decode_side(chosen) as decode:
        peer = await connect(decode, chosen, random_memory(50, seed=1), faults=Faults(before_send=hold))
        handoff = peer.reserve(request("a", 8), on_stalled=no_stall)
        send_all(handoff, peer.memory, [3, 5])
        await asyncio.to_thread(entered.wait, 20)
        decode.servicer.leases.end("a", "the client went away")
        decode.servicer.check_invariants()
        with pytest.raises(HandoffDenied, match="the client went away"):
            await handoff.commit(token_id=1, num_tokens=8, computed_ns=0)
        if transport in ("process_group", "tcp"):
            assert len(decode.host.free) == 37  # only the receiver writes there, and it was told
        else:
            assert decode.servicer.leases.leased_pages == 2
            assert not decode.host.released
        go_on.set()
        await decode.host.until(lambda: len(decode.host.free) == 37)
        await hand_off(decode, peer, "b")
        await peer.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_the_same_request_may_come_again_after_an_abort(transport: str) -> None:
    async with decode_side(options(transport)) as decode:
        peer = await connect(decode, options(transport), random_memory(50, seed=1))
        first = peer.reserve(request("a", 33), on_stalled=no_stall)
        send_all(first, peer.memory, list(range(9)))
        await first.granted()
        await first.abort("the engine failed")
        with pytest.raises(HandoffDenied, match="the engine failed"):
            await first.commit(token_id=1, num_tokens=8, computed_ns=0)
        await hand_off(decode, peer, "a")
        assert decode.host.released == [("a", 1, "prefill-0 gave up: the engine failed")]
        await peer.close()


async def test_queued_reservation_is_granted_later() -> None:
    async with decode_side(options()) as decode:
        peer = await connect(decode, options(), random_memory(50, seed=1))
        decode.host.answer = lambda _: Queued("decode-0: 0 of 37 pages free")
        stalls: list[str] = []
        wanted = request("a", 8)
        handoff = peer.reserve(wanted, on_stalled=stalls.append)
        send_all(handoff, peer.memory, [3, 5])
        other = peer.reserve(request("b", 8), on_stalled=stalls.append)
        async with asyncio.timeout(20):
            while len(stalls) < 2:
                await asyncio.sleep(0)
        assert stalls == ["decode-0: 0 of 37 pages free"] * 2
        decode.servicer.leases.grant("a", 1, decode.host.take(wanted))
        decode.servicer.leases.end("b", "cancelled")
        receipt = await handoff.commit(token_id=1, num_tokens=8, computed_ns=time.monotonic_ns())
        assert receipt.pages == 2
        with pytest.raises(HandoffDenied, match="cancelled"):
            await other.granted()
        assert decode.host.released == [("b", 1, "cancelled")]
        await peer.close()


async def test_a_queued_reservation_is_given_up_after_a_while() -> None:
    """Its KV holds pages of the prefill worker, which others could use."""
    async with decode_side(options()) as decode:
        peer = await connect(decode, options(queued_reservation_s=0.05), random_memory(50, seed=1))
        decode.host.answer = lambda _: Queued("decode-0: 0 of 37 pages free")
        handoff = peer.reserve(request("a", 8), on_stalled=lambda _: None)
        send_all(handoff, peer.memory, [3, 5])
        with pytest.raises(HandoffDenied, match=r"no pages for 0\.05 s: decode-0: 0 of 37 pages free") as denied:
            await asyncio.wait_for(handoff.commit(token_id=1, num_tokens=8, computed_ns=0), 10)
        assert denied.value.cause == worker_pb2.FAILURE_CAUSE_ROOM
        await decode.host.until(lambda: len(decode.host.released) == 1)
        decode.host.answer = None
        await hand_off(decode, peer, "b")
        await peer.close()


async def test_a_pair_that_is_lost_before_the_receipt_leaves_the_commit_in_doubt() -> None:
    async with decode_side(options()) as decode:
        peer = await connect(decode, options(), random_memory(50, seed=1))
        handoff = peer.reserve(request("a", 8), on_stalled=no_stall)
        await handoff.granted()
        theirs = next(iter(decode.servicer._pairs))

        def write(**_receipt: object) -> None:
            theirs.fail("the cable is cut")

        theirs.write = write  # type: ignore[method-assign]
        send_all(handoff, peer.memory, [3, 5])
        with pytest.raises(HandoffLost):
            await handoff.commit(token_id=1, num_tokens=8, computed_ns=0)
        assert handoff.is_in_doubt
        assert "a" in decode.host.committed
        await peer.close()


async def test_a_lease_that_ended_before_its_commit_came_leaves_no_doubt() -> None:
    async with decode_side(options()) as decode:
        peer = await connect(decode, options(), random_memory(50, seed=1))
        handoff = peer.reserve(request("a", 8), on_stalled=no_stall)
        await handoff.granted()
        decode.servicer.leases.end("a", "cancelled")
        with pytest.raises(HandoffDenied, match="cancelled"):
            await handoff.commit(token_id=1, num_tokens=8, computed_ns=0)
        assert not handoff.is_in_doubt
        assert "a" not in decode.host.committed
        await peer.close()


async def test_a_pair_over_which_nothing_comes_any_more_is_lost_to_both() -> None:
    """A cable that is cut without a word: neither side has anything to say, and TCP would take minutes."""
    chosen = options("loopback", peer_silent_s=1.0)
    async with decode_side(chosen) as decode, cut_cable(decode.address.address) as (address, cut):
        there = worker_pb2.WorkerAddress(name="decode-0", address=address, incarnation="d1")
        peer = await connect(decode, chosen, random_memory(50, seed=1), address=there)
        handoff = peer.reserve(request("a", 8), on_stalled=no_stall)
        await handoff.granted()
        lost = asyncio.Event()
        peer.on_lost = lambda _: lost.set()
        cut.set()
        async with asyncio.timeout(10):
            await lost.wait()
            await decode.host.until(lambda: len(decode.host.free) == 37)
        with pytest.raises(HandoffLost):
            await handoff.commit(token_id=1, num_tokens=8, computed_ns=0)
        await peer.close()


@asynccontextmanager
async def cut_cable(address: str) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """An address that leads to `address` until the event is set; then what is sent vanishes."""
    cut, writers = asyncio.Event(), list[asyncio.StreamWriter]()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        while data := await reader.read(1 << 16):
            if not cut.is_set():
                writer.write(data)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = address.split(":")
        there = await asyncio.open_connection(host, int(port))
        await asyncio.gather(relay(reader, there[1]), relay(there[0], writer), return_exceptions=True)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", cut
    server.close()
    for writer in writers:
        writer.close()


async def test_queued_reservation_of_a_lost_sender_is_dropped() -> None:
    async with decode_side(options()) as decode:
        peer = await connect(decode, options(), random_memory(50, seed=1))
        decode.host.answer = lambda _: Queued("full")
        stalled = asyncio.Event()
        peer.reserve(request("a", 8), on_stalled=lambda _: stalled.set())
        await stalled.wait()
        await peer.close()
        await decode.host.until(lambda: len(decode.host.released) == 1)


@pytest.mark.parametrize(
    ("unable", "cause"), [(False, worker_pb2.FAILURE_CAUSE_REQUEST), (True, worker_pb2.FAILURE_CAUSE_WORKER)]
)
async def test_denied(unable: bool, cause: worker_pb2.FailureCause) -> None:
    async with decode_side(options()) as decode:
        peer = await connect(decode, options(), random_memory(50, seed=1))
        decode.host.answer = lambda _: Denied("99 pages wanted, 37 there", retryable=False, unable=unable)
        handoff = peer.reserve(request("a", 8), on_stalled=no_stall)
        with pytest.raises(HandoffDenied, match="99 pages wanted") as denied:
            await handoff.granted()
        assert denied.value.cause == cause
        await peer.close()


@pytest.mark.parametrize("cached", [3, 9])
async def test_cached_pages_are_not_written(cached: int) -> None:
    async with decode_side(options(), cached_pages=cached) as decode:
        peer = await connect(decode, options(), random_memory(50, seed=1))
        before = snapshot(decode.memory)
        handoff = peer.reserve(request("a", 36), on_stalled=no_stall)
        src = list(range(10, 19))
        assert (await handoff.granted()).cached_pages == cached
        for layer in range(3):
            handoff.segment_ready(range(layer, layer + 1), 0, 4, src[:4])
            handoff.segment_ready(range(layer, layer + 1), 4, 9, src[4:])
        receipt = await handoff.commit(token_id=1, num_tokens=36, computed_ns=time.monotonic_ns())
        assert (receipt.pages, receipt.cached_pages) == (9 - cached, cached)
        assert receipt.transport == ("" if cached == 9 else "shared_memory")
        dst = list(decode.host.held["a", 1])
        assert_pages_moved(before, peer.memory, decode.memory, range(3), src[cached:], dst[cached:])
        await peer.close()


async def test_closing_the_sender_gives_pages_back() -> None:
    async with decode_side(options()) as decode:
        peer = await connect(decode, options(), random_memory(50, seed=1))
        handoff = peer.reserve(request("a", 30), on_stalled=no_stall)
        await handoff.granted()
        await peer.close()
        await decode.host.until(lambda: len(decode.host.free) == 37)


async def test_a_failing_transport_ends_the_pair_on_both_sides() -> None:
    chosen = options()
    async with decode_side(chosen) as decode:
        peer = await connect(decode, chosen, random_memory(50, seed=1), faults=Faults(fail=frozenset({1})))
        told: list[str] = []
        peer.on_lost = told.append
        handoff = peer.reserve(request("a", 8), on_stalled=no_stall)
        send_all(handoff, peer.memory, [3, 5])
        with pytest.raises(HandoffLost, match="because a test asked"):
            await handoff.commit(token_id=1, num_tokens=8, computed_ns=0)
        assert peer.is_lost
        assert len(told) == 1
        with pytest.raises(HandoffLost):
            peer.reserve(request("b", 8), on_stalled=no_stall)
        await decode.host.until(lambda: len(decode.host.free) == 37)
        again = await connect(decode, options(), random_memory(50, seed=1))
        await hand_off(decode, again, "c")
        await again.close()
        await peer.close()


async def test_a_receiver_that_goes_away_is_a_lost_pair() -> None:
    async with decode_side(options()) as decode:
        peer = await connect(decode, options(), random_memory(50, seed=1))
        handoff = peer.reserve(request("a", 8), on_stalled=no_stall)
        await handoff.granted()
        await decode.servicer.close()
        with pytest.raises(HandoffLost, match="decode-0"):
            await handoff.commit(token_id=1, num_tokens=8, computed_ns=0)
        await peer.close()


async def test_pairs_that_are_gone_keep_no_descriptor() -> None:
    """Though nobody looks for circles."""

    def num_files() -> int:
        links = (os.path.realpath(path) for path in Path("/proc/self/fd").iterdir())  # of one that is gone its own name
        return sum("kvrelay-pair" in link for link in links)

    memory = random_memory(37, seed=1)
    gc.collect()
    gc.disable()
    before = num_files()  # of other tests
    try:
        async with decode_side(options()) as decode:
            for name in ("a", "b"):
                peer = await connect(decode, options(), memory)
                await hand_off(decode, peer, name)
                assert num_files() > before
                await peer.close()
                async with asyncio.timeout(10.0):
                    while num_files() > before:
                        await asyncio.sleep(0.01)
    finally:
        gc.enable()


@pytest.mark.parametrize("is_lost", [False, True])
async def test_pairs_that_are_gone_keep_no_connection(is_lost: bool) -> None:
    """Nor that. Who goes on living would be pinged over it for ever, by a worker that has another role, say."""

    def num_sockets() -> int:
        return sum("socket:" in os.path.realpath(path) for path in Path("/proc/self/fd").iterdir())

    memory = random_memory(37, seed=1)
    gc.collect()
    gc.disable()
    try:
        async with decode_side(options()) as decode:
            for name in ("a", "b"):
                before = num_sockets()
                peer = await connect(decode, options(), memory)
                await hand_off(decode, peer, name)
                assert num_sockets() > before
                if is_lost:
                    peer.lose("a test asked")
                else:
                    await peer.close()
                async with asyncio.timeout(10.0):
                    while num_sockets() > before:
                        await asyncio.sleep(0.01)
    finally:
        gc.enable()


async def test_what_does_not_match_is_refused_with_both_values() -> None:
    async with decode_side(options()) as decode:
        memory = random_memory(50)
        with pytest.raises(HandoffRefused, match=r"model fingerprint of decode-0 is m, but of prefill-0 other"):
            await connect(decode, options(), memory, fingerprint="other")
        narrow = random_memory(50, layers=(LayerKv(1, 8, 8),) * 3)
        with pytest.raises(HandoffRefused, match=r"layers=1x\(2h,k8,v8\).*layers=3x\(1h,k8,v8\)"):
            await connect(decode, options(), narrow)
        with pytest.raises(HandoffRefused, match="decode-0 takes shared_memory, prefill-0 offers loopback"):
            await connect(decode, options("loopback"), memory)
        with pytest.raises(HandoffRefused, match="secret"):
            await connect(decode, options(), memory, secret="wrong")
    with pytest.raises(HandoffLost, match="decode-0 at"):
        await connect(decode, options(), memory)


async def test_a_transport_that_the_sender_cannot_open_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = TransferOptions(transports=("shared_memory", "loopback"))
    offer = shared_memory.SharedMemoryTransport.offer

    def offer_elsewhere(*args: object, **kwargs: object) -> object:
        end = offer(*args, **kwargs)  # type: ignore[arg-type]
        end._params["pid"] = "999999999"  # type: ignore[attr-defined]
        return end

    monkeypatch.setattr(shared_memory.SharedMemoryTransport, "offer", offer_elsewhere)
    async with decode_side(chosen) as decode:
        peer = await connect(decode, chosen, random_memory(50, seed=1))
        assert peer.transport == "loopback"
        await hand_off(decode, peer)
        await peer.close()
        with pytest.raises(HandoffLost, match=r"no transport works .*shared_memory: "):  # lost: others may do better
            await connect(decode, options("shared_memory"), random_memory(50, seed=1))


async def test_why_a_transport_failed_is_told_where_no_other_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between hosts, where a firewall is in the way."""
    chosen = TransferOptions(transports=("shared_memory", "tcp"))

    def dial(*args: object) -> None:
        raise TransferError("cannot connect to decode-0: it does not answer")

    monkeypatch.setattr("kv_transfer.handshake.host_id", lambda: "another host")
    monkeypatch.setattr("kv_transfer.transports.tcp.dial", dial)
    why = r"^no transport works .*: tcp: cannot connect to decode-0: it does not answer; .*shared_memory wants both"
    async with decode_side(chosen) as decode:
        with pytest.raises(HandoffLost, match=why):
            await connect(decode, chosen, random_memory(50, seed=1))


async def test_kv_in_plain_from_another_host_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with decode_side(options("tcp")) as decode:
        for said, host in ((0, host_id()), (1, "another host"), (1, "a third host")):
            monkeypatch.setattr("kv_transfer.handshake.host_id", lambda host=host: host)
            peer = await connect(decode, options("tcp"), random_memory(50))
            assert caplog.text.count("comes from another host by tcp in plain text") == said
            await peer.close()


async def test_kv_goes_from_host_to_host_encrypted_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = write_tls(tmp_path, trustme.CA())
    monkeypatch.setattr("kv_transfer.handshake.host_id", lambda: "another host")
    for transport, encrypt in (("tcp", True), ("process_group", False)):
        chosen = options(transport, encrypt=encrypt)
        async with decode_side(chosen, tls=tls) as decode:
            peer = await connect(decode, chosen, random_memory(50, seed=1), tls=tls)
            await hand_off(decode, peer)
            await peer.close()
    async with decode_side(options("process_group"), tls=tls) as decode:
        with pytest.raises(HandoffRefused, match="process_group does not encrypt what it moves between hosts, and"):
            await connect(decode, options("process_group"), random_memory(50), tls=tls)
    async with decode_side(options("tcp"), tls=tls) as decode:
        with pytest.raises(HandoffLost, match="one speaks TLS and the other does not"):
            await connect(decode, options("tcp"), random_memory(50))
