"""HandoffServicer is the Handoff service of a decode worker: it opens pairs, and watches over those that were lost.

What is said in a pair is DecodePair's (pair.py), what becomes of its reservations LeaseKeeper's (leases.py). All
methods run in the event loop. Each pair has one thread that receives and verifies.

A lost pair over a one-sided transport is fenced: its pages stay leased until its peer has closed its end or is known
to be dead, for it may be writing still.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial

import grpc
import grpc.aio

from engine.pages.memory import KvMemory
from kv_transfer.base import ReceiveEnd, Tls, TransferError, Wire
from kv_transfer.checksum import Checksummer, device_checksummer
from kv_transfer.decode_side.checks import Malformed
from kv_transfer.decode_side.leases import LeaseKeeper
from kv_transfer.decode_side.pair import DecodePair, PairContext
from kv_transfer.decode_side.reservation import ReservationHost
from kv_transfer.handshake import host_id, mismatch
from kv_transfer.options import TransferOptions
from kv_transfer.transports.registry import MODULES, load_transport, usable
from kvrelay.v1 import worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

IN_PLAIN = (
    "does not encrypt what it moves between hosts, and tls is on; add tcp to the transports (GPUs have none), or "
    "set encrypt: false where the network between the workers is trusted"
)

FENCE_POLL_S = 0.05  # how often a lost peer is looked at, while pages wait for it


class HandoffServicer(worker_pb2_grpc.HandoffServicer):
    def __init__(
        self,
        host: ReservationHost,
        *,
        memory: KvMemory,
        me: worker_pb2.WorkerAddress,
        model_fingerprint: str,
        vocab_size: int,
        options: TransferOptions,
        address_host: str,
        tls: Tls | None = None,
    ) -> None:
        """`address_host`: this worker's address, on which two-sided transports listen."""
        self.counters: Counter[str] = Counter()
        self.leases = LeaseKeeper(
            host,
            name=me.name,
            num_layers=memory.layout.num_layers,
            options=options,
            counters=self.counters,
        )
        self._memory = memory
        self._must_encrypt = tls is not None and options.encrypt
        self._me = me
        self._model_fingerprint = model_fingerprint
        self._options = options
        self._wire = Wire(host=address_host, timeout_s=options.timeout_s, tls=tls)
        on_device = device_checksummer(memory)  # a GPU's kernels are compiled here, not in the first handshake
        self._context = PairContext(
            layout=memory.layout,
            vocab_size=vocab_size,
            options=options,
            checksummer=on_device or Checksummer(memory),
            leases=self.leases,
            counters=self.counters,
        )
        self._pairs: set[DecodePair] = set()
        self._fenced_pairs: set[DecodePair] = set()  # lost, but their peer may still write
        self._fence_poll: asyncio.TimerHandle | None = None
        self._num_pairs = 0
        self._is_closed = False

    def check_invariants(self) -> None:
        self.leases.check_invariants({pair.id for pair in self._pairs | self._fenced_pairs})

    async def close(self) -> None:
        """End every pair. Fenced pages stay fenced: only the end of this process frees them."""
        self._is_closed = True
        pairs = list(self._pairs)
        for pair in pairs:
            pair.fail(f"{self._me.name} is stopping")
        if pairs:
            await asyncio.wait([pair.gone for pair in pairs], timeout=1.0)
        self.leases.close()
        if self._fence_poll is not None:
            self._fence_poll.cancel()

    async def Connect(
        self, request_iterator: AsyncIterator[worker_pb2.PrefillMessage], context: grpc.aio.ServicerContext
    ) -> None:
        hello = await self._first_hello(request_iterator)
        if not hello.protocol_version:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be a hello")
        why_not = self._why_not(hello)
        if why_not:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, why_not)
        offer = self._offer(hello)
        if isinstance(offer, str):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, offer)
            return
        pair = self._open_pair(hello, *offer, context)
        code = grpc.StatusCode.UNAVAILABLE
        try:
            reason = await pair.serve(request_iterator)
        except Malformed as error:
            code, reason = grpc.StatusCode.INVALID_ARGUMENT, str(error)
        except Exception as error:  # our bug: it ends this pair, and gives its pages back as any end does
            log.exception("the pair with %s broke", pair.name)
            reason = f"{self._me.name} failed: {error!r}"
        finally:
            self._on_pair_gone(pair)
        if reason:
            await context.abort(code, reason)

    async def _first_hello(self, messages: AsyncIterator[worker_pb2.PrefillMessage]) -> worker_pb2.HandoffHello:
        """Empty, if nothing else comes first, or nothing soon."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._options.connect_timeout_s):
                return (await anext(messages, worker_pb2.PrefillMessage())).hello
        return worker_pb2.HandoffHello()

    def _why_not(self, hello: worker_pb2.HandoffHello) -> str:
        """Why no pair is opened; empty if one is."""
        if self._is_closed:
            return f"{self._me.name} is stopping"
        return mismatch(hello, self._me, self._model_fingerprint, self._memory.layout)

    def _offer(self, hello: worker_pb2.HandoffHello) -> tuple[str, ReceiveEnd] | str:
        """The first of the peer's transports that works here, or why none does."""
        why: list[str] = []
        for name in usable(hello.transports, self._memory.device):
            if name not in self._options.transports or name not in MODULES:
                continue
            transport = load_transport(name)
            if transport.same_host_only and hello.host_id != host_id():
                why.append(f"{name} wants both on one host")
                continue
            if self._must_encrypt and hello.host_id != host_id() and not transport.encrypts:
                why.append(f"{name} {IN_PLAIN}")
                continue
            try:
                return name, transport.offer(self._memory, peer=hello.worker.name, wire=self._wire)
            except TransferError as error:
                why.append(f"{name}: {error}")
        both = f"{self._me.name} takes {', '.join(self._options.transports)}"
        theirs = f"{hello.worker.name} offers {', '.join(hello.transports) or 'none'}"
        return "; ".join([f"no transport in common: {both}, {theirs}", *why])

    def _open_pair(
        self, hello: worker_pb2.HandoffHello, transport: str, end: ReceiveEnd, context: grpc.aio.ServicerContext
    ) -> DecodePair:
        self._num_pairs += 1
        if hello.host_id != host_id() and not (self._wire.tls and load_transport(transport).encrypts):
            self._tell_of_plain_text(hello.worker.name, transport)
        pair_id = f"{hello.worker.name}/{hello.worker.incarnation}/{self._num_pairs}"
        pair = DecodePair(pair_id, hello, transport, end, partial(_send, context), self._context)
        self.counters["pairs_opened"] += 1
        self._pairs.add(pair)
        pair.write(
            welcome=worker_pb2.HandoffWelcome(worker=self._me, transport=transport, transport_params=dict(end.params))
        )
        return pair

    def _tell_of_plain_text(self, peer: str, transport: str) -> None:
        if not self.counters["pairs_in_plain"]:
            log.warning(
                "KV from %s comes from another host by %s in plain text: who is on the network between can read and "
                "change it; give the cluster tls, or keep that network to its workers",
                peer,
                transport,
            )
        self.counters["pairs_in_plain"] += 1

    def _on_pair_gone(self, pair: DecodePair) -> None:
        self.counters["pairs_closed"] += 1
        self._pairs.discard(pair)
        self._fenced_pairs.add(pair)
        pair.close()
        self.leases.end_all_of(pair.id, f"{pair.name} is gone")
        self._poll_fences()

    def _poll_fences(self) -> None:
        if self._fence_poll is not None:
            self._fence_poll.cancel()
            self._fence_poll = None
        for pair in list(self._fenced_pairs):
            if self.leases.has_any_of(pair.id) and pair.peer_has_stopped():
                self.leases.on_peer_dead(pair.id, f"{pair.name} is gone")
            if not self.leases.has_any_of(pair.id):
                self._fenced_pairs.discard(pair)
                pair.forget()
        if self._fenced_pairs and not self._is_closed:
            self._fence_poll = asyncio.get_running_loop().call_later(FENCE_POLL_S, self._poll_fences)


async def _send(context: grpc.aio.ServicerContext, message: worker_pb2.DecodeMessage) -> None:
    try:
        await context.write(message)
    except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
        raise ConnectionError("the stream is over") from error
