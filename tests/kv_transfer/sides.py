"""What the transfer tests share: memories full of random bytes, and one prefill and one decode side over real gRPC."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import grpc.aio
import torch

from engine.pages.layout import KvLayout, LayerKv
from engine.pages.memory import KvMemory
from kv_transfer.decode_side.servicer import HandoffServicer
from kv_transfer.lease import Denied, Granted, Queued
from kv_transfer.options import TransferOptions
from kv_transfer.prefill_side import connect as prefill_side
from kv_transfer.prefill_side.handoff import Handoff
from kv_transfer.prefill_side.pair import PrefillPair
from kv_transfer.transports.faulty import Faults
from kvrelay.v1 import generate_pb2, worker_pb2, worker_pb2_grpc
from worker.wire.rpc import bind, handoff_dial, keepalive_options, make_server, secret_door
from worker.wire.tls import TlsFiles

SECRET = "open sesame"
PAGE_SIZE = 4
VOCAB = 1000
LAYERS = (LayerKv(2, 8, 8), LayerKv(2, 24, 16), LayerKv(1, 8, 4))  # widths differ, and K from V


DEVICE = os.environ.get("KVRELAY_TEST_DEVICE", "cpu")  # cuda:0 on a machine with a GPU (bench/gpu_check.sh)


def random_memory(
    num_pages: int, *, layers: tuple[LayerKv, ...] = LAYERS, seed: int = 0, device: str = DEVICE
) -> KvMemory:
    memory = KvMemory(KvLayout(page_size=PAGE_SIZE, dtype="float32", layers=layers, num_pages=num_pages), device)
    chosen = torch.Generator().manual_seed(seed)
    memory.bytes.copy_(torch.empty(len(memory.bytes), dtype=torch.uint8).random_(generator=chosen))
    return memory


def snapshot(memory: KvMemory) -> list[torch.Tensor]:
    """K and V of each layer as bytes, [num_pages, bytes]."""
    parts = [part for i in range(memory.layout.num_layers) for part in (memory.k(i), memory.v(i))]
    return [part.flatten(1).view(torch.uint8).to("cpu", copy=True) for part in parts]


def assert_pages_moved(
    before: list[torch.Tensor], source: KvMemory, target: KvMemory, layers: range, src: list[int], dst: list[int]
) -> None:
    """target is what it was `before`, but for `layers` of dst, which are src's of source."""
    for i, (old, new, sent) in enumerate(zip(before, snapshot(target), snapshot(source), strict=True)):
        wanted = old.clone()
        if i // 2 in layers:
            wanted[dst] = sent[src]
        assert torch.equal(new, wanted), f"{'KV'[i % 2]} of layer {i // 2} differs"


def request(name: str, num_tokens: int, attempt: int = 1) -> worker_pb2.RequestState:
    return worker_pb2.RequestState(request_id=name, router_id="r", prompt_ids=range(num_tokens), attempt=attempt)


@dataclass
class PageHost:
    """A ReservationHost with a plain pool of pages, handed out in random order; records what it is told."""

    num_pages: int
    cached_pages: int = 0
    answer: Callable[[worker_pb2.RequestState], Granted | Queued | Denied] | None = None
    free: set[int] = field(default_factory=set)
    held: dict[tuple[str, int], tuple[int, ...]] = field(default_factory=dict)
    committed: dict[str, tuple[list[int], generate_pb2.HandoffReceipt]] = field(default_factory=dict)
    unread: dict[str, tuple[int, generate_pb2.HandoffReceipt]] = field(default_factory=dict)  # how much was read
    reads_prompts: bool = False
    released: list[tuple[str, int, str]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    on_freed: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self.free = set(range(self.num_pages))

    def reserve(self, request: worker_pb2.RequestState, room_tokens: int = 0) -> Granted | Queued | Denied:
        if self.answer is not None:
            return self.answer(request)
        return self.take(request, room_tokens)

    def take(self, request: worker_pb2.RequestState, room_tokens: int = 0) -> Granted:
        count = -(-(len(request.prompt_ids) + len(request.output_ids) + room_tokens) // PAGE_SIZE)
        pages = tuple(random.Random(request.request_id).sample(sorted(self.free), count))
        self.free -= set(pages)
        self.held[request.request_id, request.attempt] = pages
        return Granted(pages, min(self.cached_pages, count))

    def on_committed(
        self, request: worker_pb2.RequestState, token_ids: Sequence[int], receipt: generate_pb2.HandoffReceipt
    ) -> None:
        self.committed[request.request_id] = (list(token_ids), receipt)
        self.changed.set()

    def on_committed_unread(
        self, request: worker_pb2.RequestState, num_tokens: int, receipt: generate_pb2.HandoffReceipt
    ) -> None:
        self.unread[request.request_id] = (num_tokens, receipt)
        self.changed.set()

    def on_lease_released(self, request: worker_pb2.RequestState, reason: str) -> None:
        pages = self.held.pop((request.request_id, request.attempt), ())
        assert not self.free & set(pages), "a page came back twice"
        self.free |= set(pages)
        self.released.append((request.request_id, request.attempt, reason))
        self.changed.set()
        if self.on_freed is not None:
            self.on_freed()

    async def until(self, is_true: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not is_true():
                self.changed.clear()
                await self.changed.wait()


@dataclass
class DecodeSide:
    servicer: HandoffServicer
    host: PageHost
    memory: KvMemory
    address: worker_pb2.WorkerAddress
    server: grpc.aio.Server


@asynccontextmanager
async def decode_side(
    options: TransferOptions,
    *,
    memory: KvMemory | None = None,
    fingerprint: str = "m",
    cached_pages: int = 0,
    tls: TlsFiles | None = None,
) -> AsyncIterator[DecodeSide]:
    memory = memory or random_memory(37, seed=2)
    host = PageHost(memory.layout.num_pages, cached_pages=cached_pages)
    server = make_server(secret_door(SECRET), options=keepalive_options(options.peer_silent_s))
    port = bind(server, "127.0.0.1", 0)
    address = worker_pb2.WorkerAddress(name="decode-0", address=f"127.0.0.1:{port}", incarnation="d1")
    servicer = HandoffServicer(
        host,
        memory=memory,
        me=address,
        model_fingerprint=fingerprint,
        vocab_size=VOCAB,
        options=options,
        address_host="127.0.0.1",
        tls=tls,
    )
    worker_pb2_grpc.add_HandoffServicer_to_server(servicer, server)
    await server.start()
    try:
        yield DecodeSide(servicer, host, memory, address, server)
        servicer.check_invariants()
    finally:
        await servicer.close()
        await server.stop(0)


async def connect(
    decode: DecodeSide,
    options: TransferOptions,
    memory: KvMemory,
    *,
    name: str = "prefill-0",
    fingerprint: str = "m",
    secret: str = SECRET,
    faults: Faults | None = None,
    address: worker_pb2.WorkerAddress | None = None,
    tls: TlsFiles | None = None,
) -> PrefillPair:
    return await prefill_side.connect(
        address or decode.address,
        me=worker_pb2.WorkerAddress(name=name, address="127.0.0.1:1", incarnation="p1"),
        model_fingerprint=fingerprint,
        memory=memory,
        dial=handoff_dial(secret, silent_s=options.peer_silent_s),
        options=replace(options, connect_timeout_s=30.0),
        host="127.0.0.1",
        tls=tls,
        faults=faults,
    )


def send_all(handoff: Handoff, memory: KvMemory, pages: list[int]) -> None:
    """Every layer of the pages, layer by layer, as prefill does."""
    for layer in range(memory.layout.num_layers):
        handoff.segment_ready(range(layer, layer + 1), 0, len(pages), pages)
