"""Whatever a prefill worker that knows the secret says, in whatever order: its pair ends with a sentence or goes on,
all pages come back, and nothing raises out of a loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_transfer.decode_side.servicer import HandoffServicer
from kv_transfer.handshake import PROTOCOL_VERSION, host_id
from kv_transfer.lease import Denied, Granted, Queued
from kv_transfer.options import TransferOptions
from kvrelay.v1 import worker_pb2
from tests.kv_transfer.sides import PAGE_SIZE, VOCAB, PageHost, random_memory, request

NUM_PAGES = 12
MEMORY = random_memory(NUM_PAGES)
LAYERS = MEMORY.layout.num_layers
OPTIONS = TransferOptions(transports=("loopback",))

Message = worker_pb2.PrefillMessage


class Aborted(Exception): ...


class FakeContext:
    """The stream, as the servicer sees it."""

    def __init__(self) -> None:
        self.said: list[worker_pb2.DecodeMessage] = []
        self.code: grpc.StatusCode | None = None
        self.details = ""

    async def write(self, message: worker_pb2.DecodeMessage) -> None:
        self.said.append(message)

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.code, self.details = code, details
        raise Aborted


def hello() -> Message:
    worker = worker_pb2.WorkerAddress(name="prefill-9", incarnation="x")
    return Message(
        hello=worker_pb2.HandoffHello(
            worker=worker,
            protocol_version=PROTOCOL_VERSION,
            model_fingerprint="m",
            layout=MEMORY.layout.signature,
            tensor_parallel=1,
            pipeline_parallel=1,
            transports=["loopback"],
            host_id=host_id(),
        )
    )


def reserve(lease_id: int, name: str, num_tokens: int) -> Message:
    return Message(reserve=worker_pb2.Reserve(lease_id=lease_id, request=request(name, num_tokens)))


def announce(lease_id: int, number: int, layers: range, pages: range, seq: int) -> Message:
    fits = 0 <= layers.start < layers.stop <= LAYERS
    return Message(
        announce=worker_pb2.Announce(
            lease_id=lease_id,
            segment=number,
            layer_begin=layers.start,
            layer_end=layers.stop,
            page_begin=pages.start,
            page_end=pages.stop,
            bytes=MEMORY.layout.page_bytes(layers) * max(0, pages.stop - pages.start) if fits else 7,
            checksum_off=True,
            transfer_seq=seq,
        )
    )


def commit(lease_id: int, segments: int, num_tokens: int, token_id: int = 1) -> Message:
    sent = worker_pb2.Commit(lease_id=lease_id, segments=segments, num_tokens=num_tokens, token_id=token_id)
    return Message(commit=sent)


def good_handoff(lease_id: int, first_seq: int) -> list[Message]:
    """One that a well-behaved peer would make, of two pages."""
    parts = [announce(lease_id, i, range(i, i + 1), range(2), first_seq + i) for i in range(LAYERS)]
    return [reserve(lease_id, f"r{lease_id}", 2 * PAGE_SIZE), *parts, commit(lease_id, LAYERS, 2 * PAGE_SIZE)]


numbers = st.one_of(st.integers(0, 4), st.sampled_from([2**31, 2**32 - 1]))
lease_ids = st.one_of(st.integers(0, 4), st.just(2**64 - 1))
ranges = st.builds(range, numbers, numbers)
odd_messages = st.one_of(
    st.builds(reserve, lease_ids, st.sampled_from("abc"), st.integers(0, 60)),
    st.builds(announce, lease_ids, numbers, ranges, ranges, numbers),
    st.builds(commit, lease_ids, numbers, numbers, numbers),
    st.builds(lambda i: Message(abort=worker_pb2.Abort(lease_id=i)), lease_ids),
    st.builds(lambda i: Message(stopped=worker_pb2.Stopped(lease_id=i)), lease_ids),
    st.just(Message()),
    st.builds(hello),
)


def changed(message: Message, field: int, number: int) -> Message:
    """With another number in one of its fields."""
    copy, kind = Message(), message.WhichOneof("kind")
    copy.CopyFrom(message)
    if kind is not None:
        body = getattr(copy, kind)
        fields = [f for f in body.DESCRIPTOR.fields if f.cpp_type in (f.CPPTYPE_UINT32, f.CPPTYPE_UINT64)]
        chosen = fields[field % len(fields)]
        if chosen.is_repeated:
            getattr(body, chosen.name).append(number)
        else:
            setattr(body, chosen.name, number)
    return copy


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """Two good handoffs, and then some: messages put in between, left out, doubled, exchanged, and numbers changed."""
    messages = [*good_handoff(1, 0), *good_handoff(2, LAYERS)]
    for _ in range(draw(st.integers(0, 4))):
        at, other = (draw(st.integers(0, len(messages) - 1)) for _ in range(2))
        match draw(st.sampled_from(["insert", "change", "change", "drop", "double", "swap"])):
            case "insert":
                messages.insert(at, draw(odd_messages))
            case "change":
                messages[at] = changed(messages[at], draw(st.integers(0, 11)), draw(numbers))
            case "drop" if len(messages) > 1:
                del messages[at]
            case "double":
                messages.insert(at, messages[at])
            case "swap":
                messages[at], messages[other] = messages[other], messages[at]
    return [hello(), *messages]


def make_servicer(options: TransferOptions = OPTIONS) -> tuple[HandoffServicer, PageHost]:
    host = PageHost(NUM_PAGES)

    def answer(wanted: worker_pb2.RequestState) -> Granted | Queued | Denied:
        if wanted.request_id == "c":
            return Denied("never", retryable=False)
        return host.take(wanted) if -(-len(wanted.prompt_ids) // PAGE_SIZE) <= len(host.free) else Queued("full")

    host.answer = answer
    me = worker_pb2.WorkerAddress(name="decode-0", incarnation="d1")
    servicer = HandoffServicer(
        host,
        memory=MEMORY,
        me=me,
        model_fingerprint="m",
        vocab_size=VOCAB,
        options=options,
        address_host="127.0.0.1",
    )
    return servicer, host


async def converse(
    messages: Sequence[Message], is_done: Callable[[PageHost], bool] = lambda _: True
) -> tuple[FakeContext, PageHost]:
    servicer, host = make_servicer()
    context: Any = FakeContext()

    async def stream() -> AsyncIterator[Message]:
        for message in messages:
            yield message
            await asyncio.sleep(0)
            servicer.check_invariants()
        for _ in range(20):  # the thread verifies what was announced
            await asyncio.sleep(0.0005)
        async with asyncio.timeout(20):
            while not is_done(host):
                await asyncio.sleep(0.001)

    with suppress(Aborted):
        await servicer.Connect(stream(), context)
    servicer._poll_fences()
    servicer.check_invariants()
    assert servicer.leases.leased_pages == 0
    committed = [page for (name, _), pages in host.held.items() if name in host.committed for page in pages]
    assert sorted([*host.free, *committed]) == list(range(NUM_PAGES)), "a page is lost"
    await servicer.close()
    return context, host


@given(conversations())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_conversation_ends_with_a_sentence_and_every_page(messages: list[Message]) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign, assignment]
    logging.getLogger("kv_transfer").addHandler(handler)
    try:
        context, _ = asyncio.run(converse(messages))
    finally:
        logging.getLogger("kv_transfer").removeHandler(handler)
    assert not [record.getMessage() for record in records if record.levelno >= logging.ERROR]
    assert context.code in (None, grpc.StatusCode.INVALID_ARGUMENT)
    assert (context.code is None) == (context.details == "")


def test_the_good_part_of_it_is_good() -> None:
    """Else the conversations above would all end at their first message."""
    both = [hello(), *good_handoff(1, 0), *good_handoff(2, LAYERS)]
    context, host = asyncio.run(converse(both, lambda host: len(host.committed) == 2))
    assert (context.code, set(host.committed)) == (None, {"r1", "r2"})


@pytest.mark.parametrize(
    ("last", "sentence"),
    [
        ([commit(1, LAYERS, 2 * PAGE_SIZE, token_id=VOCAB)], r"commits token 1000; the model's ids go from 0 to 999"),
        (
            [announce(1, LAYERS + i, range(1), range(2), LAYERS + i) for i in range(LAYERS * 2 * 3)],
            r"announces segment 18 of a lease with 6 pages of layers",
        ),
    ],
)
def test_what_no_healthy_peer_says(last: list[Message], sentence: str) -> None:
    context, host = asyncio.run(converse([hello(), *good_handoff(1, 0)[:-1], *last]))
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT
    assert sentence in context.details
    assert not host.committed


async def test_a_stream_that_says_nothing_ends() -> None:
    servicer, _ = make_servicer(replace(OPTIONS, connect_timeout_s=0.01))
    context: Any = FakeContext()

    async def silence() -> AsyncIterator[Message]:
        await asyncio.sleep(3600)
        yield Message()

    with pytest.raises(Aborted):
        await asyncio.wait_for(servicer.Connect(silence(), context), 10)
    assert context.details == "the first message must be a hello"


async def test_a_bug_ends_one_pair_and_gives_its_pages_back(caplog: pytest.LogCaptureFixture) -> None:
    servicer, host = make_servicer()

    def broken(_: worker_pb2.RequestState) -> Granted:
        raise KeyError("no such key")

    host.answer = broken
    context: Any = FakeContext()

    async def stream() -> AsyncIterator[Message]:
        yield hello()
        yield reserve(1, "a", 8)
        await asyncio.sleep(3600)

    with pytest.raises(Aborted):
        await asyncio.wait_for(servicer.Connect(stream(), context), 10)
    assert (context.code, context.details) == (grpc.StatusCode.UNAVAILABLE, "decode-0 failed: KeyError('no such key')")
    servicer.check_invariants()
