"""RouterLink is a worker's way up to one router: tokens and events are gathered, then sent as one message by `flush`.

    token, event -> flush -> outbox -> the stream (router_streams.py); closed: nothing is kept any more

What waits for a router that does not read is counted in bytes; whether it is too much, its keeper decides.
"""

from __future__ import annotations

import asyncio
import time
from typing import TypedDict, Unpack

from kvrelay.v1 import generate_pb2
from kvrelay.v1 import worker_pb2 as pb
from worker.convert import add_token


class EventDetails(TypedDict, total=False):
    """Of a RequestEvent, what not every kind has."""

    reason: str
    cause: pb.FailureCause
    peer: str
    receipt: generate_pb2.HandoffReceipt | None
    cached_tokens: int
    decode_worker: str
    at_ns: int  # now, unless it was before
    move: int  # the number of the Move that it answers; else of the one by which the request came
    trace: pb.Trace | None


class RouterLink:
    def __init__(self, router_id: str, heard_s: float = 0.0) -> None:
        self.router_id = router_id
        self.last_submit_seq = 0
        self.pages_told = -1  # of the news of pages: so many, -1: none
        self.heard_s = heard_s  # by its keeper's clock; routers ping several times a second
        self.unread_bytes = 0
        self.is_closed = False
        self.report_gap_s = 0.0  # that it wants between two reports, where that is longer than usual
        self.has_left = False  # nothing of it is on its way here, nor will be while this worker drains
        self._outbox: asyncio.Queue[tuple[pb.WorkerMessage | None, int]] = asyncio.Queue()  # None: nothing more comes
        self._outputs = pb.Outputs()

    @property
    def num_unread(self) -> int:
        return self._outbox.qsize()

    def put(self, message: pb.WorkerMessage) -> None:
        if not self.is_closed:
            num_bytes = message.ByteSize()
            self.unread_bytes += num_bytes
            self._outbox.put_nowait((message, num_bytes))

    async def get(self) -> pb.WorkerMessage | None:
        """The next message for the stream; None when it is to end."""
        message, num_bytes = await self._outbox.get()
        self.unread_bytes -= num_bytes
        return message

    def close(self) -> None:
        """Keep nothing for it any more. A second call does nothing."""
        if not self.is_closed:
            self.is_closed, self.unread_bytes = True, 0
            while not self._outbox.empty():
                self._outbox.get_nowait()
            self._outbox.put_nowait((None, 0))

    def token(self, output: pb.TokenOutput) -> None:
        add_token(self._outputs, output)

    def event(self, request: pb.RequestState, kind: pb.EventKind, **details: Unpack[EventDetails]) -> None:
        event = pb.RequestEvent(request_id=request.request_id, attempt=request.attempt, kind=kind, **details)
        event.move = event.move or request.move
        event.at_ns = event.at_ns or time.monotonic_ns()
        self._outputs.events.append(event)

    def flush(self) -> None:
        if self._outputs.request_ids or self._outputs.tokens or self._outputs.events:
            self.put(pb.WorkerMessage(outputs=self._outputs))
            self._outputs = pb.Outputs()
