"""PrefillPair is a prefill worker's side of its pair with one decode worker: the stream, the thread, the handoffs.

The control stream lives in the event loop; the bytes are moved by one thread for each pair. Requests go through it as
Handoffs (handoff.py). connect.py opens it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import grpc.aio

from engine.pages.memory import KvMemory
from engine.pages.share import sent_bytes
from kv_transfer.base import SendEnd
from kv_transfer.event_loop import call_in_loop, set_done
from kv_transfer.options import TransferOptions
from kv_transfer.plan import GPU_SEGMENT_BYTES, SEGMENT_BYTES
from kv_transfer.prefill_side.errors import HandoffDenied, HandoffEnded, HandoffLost
from kv_transfer.prefill_side.handoff import Handoff
from kv_transfer.prefill_side.pair_terms import PairTerms
from kv_transfer.prefill_side.segments import Flow, Grant, SegmentToSend, SentSegment
from kv_transfer.prefill_side.stream import ControlStream
from kv_transfer.prefill_side.thread import SendThread
from kvrelay.v1 import worker_pb2

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 2.0


class PrefillPair:
    """The pair with one decode worker. Used in the event loop."""

    def __init__(
        self,
        peer: str,
        memory: KvMemory,
        options: TransferOptions,
        stream: ControlStream,
        transport: str,
        end: SendEnd,
    ) -> None:
        self.name = peer
        self.memory = memory
        self.options = options
        self.transport = transport
        self.is_lost = False
        self.lost_reason = ""
        self.on_lost: Callable[[str], object] | None = None
        self._cancel: Callable[[], object] = stream.call.cancel  # who has the call keeps its connection
        self._loop = asyncio.get_running_loop()
        self._handoffs: dict[int, Handoff] = {}
        self._last_lease_id = 0
        shares = [each.share for each in memory.shares]
        self._terms = PairTerms(
            peer=peer,
            transport=transport,
            layout=memory.layout,
            rank_page_bytes=tuple(sent_bytes(memory.layout, shares)) if len(shares) > 1 else (),
            segment_bytes=GPU_SEGMENT_BYTES if memory.is_on_gpu else SEGMENT_BYTES,
            options=options,
        )
        self._outgoing: asyncio.Queue[worker_pb2.PrefillMessage | None] = asyncio.Queue()
        self._thread = SendThread(
            end,
            memory,
            name=f"kv-send-{peer}",
            checksums=options.checksums,
            on_sent=partial(call_in_loop, self._loop, self._on_sent),
            on_error=partial(call_in_loop, self._loop, self.lose),
        )
        self._reader = asyncio.create_task(self._read(stream))
        self._writer = asyncio.create_task(self._write(stream.call))

    def reserve(
        self, request: worker_pb2.RequestState, *, room_tokens: int = 0, on_stalled: Callable[[str], object]
    ) -> Handoff:
        """Ask for pages for a request. `room_tokens`: it is decoded meanwhile, and may have so many more when it is
        committed. `on_stalled(reason)` is called once if pages must be waited for."""
        if self.is_lost:
            raise HandoffLost(self.lost_reason)
        self._last_lease_id += 1
        lease_id = self._last_lease_id
        forget = partial(self._handoffs.pop, lease_id, None)
        handoff = Handoff(lease_id, self, self._terms, on_stalled=on_stalled, forget=forget)
        self._handoffs[lease_id] = handoff
        self.write(reserve=worker_pb2.Reserve(lease_id=lease_id, request=request, room_tokens=room_tokens))
        answer_s = self._terms.answer_timeout_s
        self._loop.call_later(answer_s, self._lose_if_unanswered, handoff, answer_s)
        return handoff

    async def close(self) -> None:
        """Abort what is under way and end the pair. Nothing is written after this."""
        handoffs = list(self._handoffs.values())
        await asyncio.gather(*(handoff.abort("the prefill worker is stopping") for handoff in handoffs))
        self._thread.close()
        await asyncio.to_thread(self._thread.join, CLOSE_TIMEOUT_S)
        self.on_lost = None
        self._outgoing.put_nowait(None)
        await asyncio.wait((self._writer,), timeout=CLOSE_TIMEOUT_S)  # however it ends: the call may be over
        self.lose("the pair is closed")
        await asyncio.gather(self._reader, self._writer, return_exceptions=True)

    # --- for its handoffs ---

    def write(self, **kind: Any) -> None:
        """Queue one message to the peer; dropped when the pair is lost."""
        if not self.is_lost:
            self._outgoing.put_nowait(worker_pb2.PrefillMessage(**kind))

    def send(self, segment: SegmentToSend) -> None:
        self._thread.put(segment)

    def all_sent(self) -> asyncio.Future[None]:
        sent: asyncio.Future[None] = self._loop.create_future()
        self._thread.call_when_drained(partial(call_in_loop, self._loop, set_done, sent))
        return sent

    async def stop_flow(self, flow: Flow) -> None:
        idle: asyncio.Future[None] = self._loop.create_future()
        self._thread.stop_flow(flow, partial(call_in_loop, self._loop, set_done, idle))
        await idle

    def lose(self, reason: str) -> None:
        if self.is_lost:
            return
        self.is_lost, self.lost_reason = True, reason
        self._thread.abort()
        for handoff in list(self._handoffs.values()):
            handoff.on_over(HandoffLost(reason))
        cancel, self._cancel = self._cancel, bool
        cancel()
        self._outgoing.put_nowait(None)
        if self.on_lost is not None:
            self.on_lost(reason)

    # --- the stream ---

    async def _write(self, call: Any) -> None:
        try:
            while (message := await self._outgoing.get()) is not None:
                await call.write(message)
            await call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the reader says why

    async def _read(self, stream: ControlStream) -> None:
        try:
            with suppress(grpc.aio.AioRpcError):
                while (message := await stream.call.read()) is not grpc.aio.EOF:
                    self._on_message(message)
            code, details = await stream.call.code(), await stream.call.details()
            self.lose(f"{self.name} ended the pair: {details or code.name}")
        except asyncio.CancelledError:
            self.lose("the pair is closed")
        except Exception as error:
            log.exception("what %s said cannot be understood", self.name)
            self.lose(f"what {self.name} said cannot be understood: {error!r}")
        finally:
            await stream.channel.close()

    def _on_message(self, message: worker_pb2.DecodeMessage) -> None:
        kind = message.WhichOneof("kind")
        body: Any = getattr(message, kind) if kind else None
        handoff = self._handoffs.get(getattr(body, "lease_id", 0))
        if kind == "ended":
            self._on_ended(handoff, body)
        elif handoff is None:
            pass  # an answer to what was given up meanwhile
        elif kind == "granted":
            handoff.on_granted(Grant(tuple(body.pages), body.cached_pages))
        elif kind == "queued":
            handoff.on_queued(body.reason)
        elif kind == "denied":
            handoff.on_over(HandoffDenied(body.reason, retryable=body.retryable, unable=body.unable))
        elif kind == "receipt":
            handoff.on_receipt(body)

    def _on_ended(self, handoff: Handoff | None, ended: worker_pb2.LeaseEnded) -> None:
        """The fence: say Stopped once nothing of the lease is being written. After our abort it was said already."""
        if handoff is None:
            return
        handoff.on_over(HandoffEnded(ended.reason))
        stopped = worker_pb2.Stopped(lease_id=ended.lease_id)
        self._thread.stop_flow(handoff.flow, lambda: call_in_loop(self._loop, partial(self.write, stopped=stopped)))

    def _on_sent(self, sent: SentSegment) -> None:
        segment = sent.segment
        handoff = self._handoffs.get(segment.lease_id)
        if handoff is not None:
            handoff.on_sent(sent)
        number, segment.flow.num_announced = segment.flow.num_announced, segment.flow.num_announced + 1
        self.write(
            announce=worker_pb2.Announce(
                lease_id=segment.lease_id,
                segment=number,
                layer_begin=segment.layers.start,
                layer_end=segment.layers.stop,
                page_begin=segment.page_begin,
                page_end=segment.page_end,
                bytes=sent.nbytes,
                checksum=sent.checksum or 0,
                checksum_off=sent.checksum is None,
                resend=segment.resend,
                transfer_seq=sent.seq,
                transfer_s=sent.transfer_s,
            )
        )

    def _lose_if_unanswered(self, handoff: Handoff, after_s: float) -> None:
        if not handoff.is_over and not handoff.was_answered:
            self.lose(f"{self.name} did not answer a reservation for {after_s:g} s")
