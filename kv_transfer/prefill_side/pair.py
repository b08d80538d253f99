"""HandoffPeer is a prefill worker's side of its pair with one decode worker: the handshake, the stream, the thread.

The control stream lives in the event loop; the bytes are moved by one thread for each pair. Requests go through it as
Handoffs (handoff.py), whose names are this module's too.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio

from engine.pages.memory import KvMemory
from kv_transfer.base import Faults as Faults
from kv_transfer.base import SendEnd, TransferError
from kv_transfer.base import TransferOptions as TransferOptions
from kv_transfer.plan import Parallel, plan_transfer
from kv_transfer.prefill_side.handoff import Grant as Grant
from kv_transfer.prefill_side.handoff import Handoff as Handoff
from kv_transfer.prefill_side.handoff import HandoffDenied as HandoffDenied
from kv_transfer.prefill_side.handoff import HandoffFailed as HandoffFailed
from kv_transfer.prefill_side.handoff import HandoffLost as HandoffLost
from kv_transfer.prefill_side.handoff import HandoffRefused as HandoffRefused
from kv_transfer.prefill_side.thread import GPU_SEGMENT_BYTES, SEGMENT_BYTES, Lane, SendThread, Sent, cut_job
from kv_transfer.transports.faulty import FaultySendEnd
from kv_transfer.transports.registry import load_transport, usable
from kvrelay.v1 import worker_pb2, worker_pb2_grpc
from worker.rpc import PROTOCOL_VERSION, host_id, open_channel, secret_metadata

CLOSE_TIMEOUT_S = 2.0
ANSWER_TIMEOUTS = 3  # an answer may wait behind this many transfers


class HandoffPeer:
    """The pair with one decode worker. Made by `connect`; used in the event loop."""

    def __init__(
        self,
        target: worker_pb2.WorkerAddress,
        memory: KvMemory,
        options: TransferOptions,
        channel: grpc.aio.Channel,
        call: Any,
        transport: str,
        end: SendEnd,
    ) -> None:
        self.name = target.name
        self.memory = memory
        self.options = options
        self.transport = transport
        self.is_lost = False
        self.lost_reason = ""
        self.on_lost: Callable[[str], object] | None = None
        self._channel = channel
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._handoffs: dict[int, Handoff] = {}
        self._last_lease_id = 0
        self._plan = plan_transfer(Parallel(), Parallel(), memory.layout.num_layers, memory.layout.layers[0].kv_heads)
        self._outgoing: asyncio.Queue[worker_pb2.PrefillMessage | None] = asyncio.Queue()
        self.thread = SendThread(
            end,
            memory,
            name=f"kv-send-{target.name}",
            checksums=options.checksums,
            on_sent=lambda sent: self._in_loop(self._on_sent, sent),
            on_error=self.lose,
        )
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]

    @classmethod
    async def connect(
        cls,
        target: worker_pb2.WorkerAddress,
        *,
        me: worker_pb2.WorkerAddress,
        model_fingerprint: str,
        memory: KvMemory,
        secret: str,
        options: TransferOptions,
        host: str,
    ) -> HandoffPeer:
        """Open the pair, over the first transport that both sides can use. `host`: this worker's own address.

        Raises HandoffRefused (the two do not fit together) or HandoffLost (the peer is not there, or no bytes can be
        moved to it: it may just be dying, so another attempt or another peer may do better).
        """
        names, failures = usable(options.transports, memory.device), list[str]()
        while names:
            hello = _hello(me, model_fingerprint, memory, names)
            channel = open_channel(target.address)
            try:
                call, welcome = await _shake_hands(channel, target, hello, secret, options.transfer_timeout_s)
                end = await _open_transport(welcome, memory, target.name, host, options)
            except TransferError as error:
                failures.append(f"{welcome.transport}: {error}")
                names.remove(welcome.transport)
                await channel.close()
            except BaseException:
                await channel.close()
                raise
            else:
                return cls(target, memory, options, channel, call, welcome.transport, end)
        raise HandoffLost(f"no transport works between {me.name} and {target.name}: {'; '.join(failures)}")

    def reserve(self, request: worker_pb2.RequestState, *, on_stalled: Callable[[str], None]) -> Handoff:
        """Ask for pages for a request. `on_stalled(reason)` is called once if they must be waited for."""
        if self.is_lost:
            raise HandoffLost(self.lost_reason)
        self._last_lease_id += 1
        handoff = Handoff(self, self._last_lease_id, on_stalled)
        self._handoffs[handoff.lease_id] = handoff
        self.write(reserve=worker_pb2.Reserve(lease_id=handoff.lease_id, request=request))
        answer_s = ANSWER_TIMEOUTS * self.options.transfer_timeout_s
        self._loop.call_later(answer_s, self._lose_if_unanswered, handoff, answer_s)
        return handoff

    async def close(self) -> None:
        """Abort what is under way and end the pair. Nothing is written after this."""
        await asyncio.gather(*(handoff.abort("the prefill worker is stopping") for handoff in self._live()))
        self.thread.close()
        await asyncio.to_thread(self.thread.join, CLOSE_TIMEOUT_S)
        self.on_lost = None
        self._outgoing.put_nowait(None)
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._tasks[1]), CLOSE_TIMEOUT_S)
        self._lose("the pair is closed")
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()

    # --- for Handoff ---

    def write(self, **kind: Any) -> None:
        """Queue one message to the peer; dropped when the pair is lost."""
        if not self.is_lost:
            self._outgoing.put_nowait(worker_pb2.PrefillMessage(**kind))

    def lose(self, reason: str) -> None:
        """The pair is of no more use. From any thread."""
        self._in_loop(self._lose, reason)

    def forget(self, handoff: Handoff) -> None:
        self._handoffs.pop(handoff.lease_id, None)

    def cut(self, layers: range, num_pages: int) -> list[tuple[range, range]]:
        """(layers, index range of the pages) of the segments that carry `layers` of num_pages pages to the peer."""
        return [
            segment
            for piece in self._plan
            for segment in cut_job(
                self.memory.layout,
                range(max(layers.start, piece.layers.start), min(layers.stop, piece.layers.stop)),
                max(0, num_pages),
                GPU_SEGMENT_BYTES if self.memory.is_on_gpu else SEGMENT_BYTES,
            )
        ]

    async def stop_lane(self, lane: Lane) -> None:
        """Returns when nothing of the lane is being written, nor will be."""
        idle = self._loop.create_future()
        self.thread.stop_lane(lane, lambda: self._in_loop(_set_done, idle))
        await idle

    async def drained_or(self, answer: asyncio.Future[worker_pb2.Receipt]) -> None:
        """Returns when all jobs put so far are sent, or when `answer` is there already because the lease is over."""
        drained = self._loop.create_future()
        self.thread.call_when_drained(lambda: self._in_loop(_set_done, drained))
        await asyncio.wait({drained, answer}, return_when=asyncio.FIRST_COMPLETED)

    async def answer_in_time(self, answer: asyncio.Future[worker_pb2.Receipt], what: str) -> worker_pb2.Receipt:
        limit_s = ANSWER_TIMEOUTS * self.options.transfer_timeout_s
        try:
            return await asyncio.wait_for(asyncio.shield(answer), limit_s)
        except TimeoutError:
            self._lose(f"{self.name} sent no {what} for {limit_s:g} s")
            raise HandoffLost(self.lost_reason) from None

    # --- the stream ---

    async def _write(self) -> None:
        try:
            while (message := await self._outgoing.get()) is not None:
                await self._call.write(message)
            await self._call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the reader says why

    async def _read(self) -> None:
        try:
            with suppress(grpc.aio.AioRpcError):
                while (message := await self._call.read()) is not grpc.aio.EOF:
                    self._on_message(message)
            code, details = await self._call.code(), await self._call.details()
            self._lose(f"{self.name} ended the pair: {details or code.name}")
        except asyncio.CancelledError:
            self._lose("the pair is closed")
        finally:
            await self._channel.close()

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
            handoff.on_over(HandoffDenied(body.reason, retryable=body.retryable))
        elif kind == "receipt":
            handoff.on_receipt(body)

    def _on_ended(self, handoff: Handoff | None, ended: worker_pb2.LeaseEnded) -> None:
        """The fence: say Stopped once nothing of the lease is being written. After our abort it was said already."""
        if handoff is None:
            return
        handoff.on_over(HandoffDenied(ended.reason, retryable=True))
        stopped = worker_pb2.Stopped(lease_id=ended.lease_id)
        self.thread.stop_lane(handoff.lane, lambda: self._in_loop(lambda: self.write(stopped=stopped)))

    def _on_sent(self, sent: Sent) -> None:
        job = sent.job
        handoff = self._handoffs.get(job.lease_id)
        if handoff is not None:
            handoff.on_sent(sent)
        number, job.lane.num_announced = job.lane.num_announced, job.lane.num_announced + 1
        self.write(
            announce=worker_pb2.Announce(
                lease_id=job.lease_id,
                segment=number,
                layer_begin=job.layers.start,
                layer_end=job.layers.stop,
                page_begin=job.page_begin,
                page_end=job.page_end,
                bytes=sent.nbytes,
                checksum=sent.checksum or 0,
                checksum_off=sent.checksum is None,
                resend=job.resend,
                transfer_seq=sent.seq,
                transfer_s=sent.transfer_s,
            )
        )

    def _lose_if_unanswered(self, handoff: Handoff, after_s: float) -> None:
        if not handoff.is_over and not handoff.was_answered:
            self._lose(f"{self.name} did not answer a reservation for {after_s:g} s")

    def _lose(self, reason: str) -> None:
        if self.is_lost:
            return
        self.is_lost, self.lost_reason = True, reason
        self.thread.abort()
        for handoff in self._live():
            handoff.on_over(HandoffLost(reason))
        self._call.cancel()
        self._outgoing.put_nowait(None)
        if self.on_lost is not None:
            self.on_lost(reason)

    def _live(self) -> list[Handoff]:
        return list(self._handoffs.values())

    def _in_loop(self, call: Callable[..., None], *args: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(call, *args)


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _hello(
    me: worker_pb2.WorkerAddress, model_fingerprint: str, memory: KvMemory, transports: Sequence[str]
) -> worker_pb2.HandoffHello:
    return worker_pb2.HandoffHello(
        worker=me,
        protocol_version=PROTOCOL_VERSION,
        model_fingerprint=model_fingerprint,
        layout=memory.layout.signature,
        tensor_parallel=1,
        pipeline_parallel=1,
        transports=transports,
        pid=os.getpid(),
        host_id=host_id(),
    )


async def _shake_hands(
    channel: grpc.aio.Channel,
    target: worker_pb2.WorkerAddress,
    hello: worker_pb2.HandoffHello,
    secret: str,
    timeout_s: float,
) -> tuple[Any, worker_pb2.HandoffWelcome]:
    stub: Any = worker_pb2_grpc.HandoffStub  # grpc generates no types
    call = stub(channel).Connect(metadata=secret_metadata(secret))
    try:
        async with asyncio.timeout(timeout_s):
            with suppress(asyncio.InvalidStateError):  # refused before the hello was out: read says why
                await call.write(worker_pb2.PrefillMessage(hello=hello))
            answer = await call.read()
            if answer is grpc.aio.EOF:
                raise _refusal(target, await call.code(), await call.details())
    except TimeoutError:
        call.cancel()
        raise HandoffLost(f"{target.name} at {target.address} did not answer for {timeout_s:g} s") from None
    except grpc.aio.AioRpcError as error:
        raise _refusal(target, error.code(), error.details()) from error
    if target.incarnation and answer.welcome.worker.incarnation != target.incarnation:
        call.cancel()
        raise HandoffLost(f"{target.name} at {target.address} was restarted")
    return call, answer.welcome


def _refusal(target: worker_pb2.WorkerAddress, code: Any, details: str | None) -> Exception:
    reason = f"{target.name} at {target.address}: {details or code.name}"
    refused = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED)
    return HandoffRefused(reason) if code in refused else HandoffLost(reason)


async def _open_transport(
    welcome: worker_pb2.HandoffWelcome, memory: KvMemory, peer: str, host: str, options: TransferOptions
) -> SendEnd:
    transport = load_transport(welcome.transport)
    end = await asyncio.to_thread(
        transport.connect,
        memory,
        dict(welcome.transport_params),
        peer=peer,
        host=host,
        timeout_s=options.transfer_timeout_s,
    )
    return FaultySendEnd(end, memory, options.faults) if options.faults is not None else end
