"""RouterLink is a worker's way up to one router: tokens and events are gathered, then sent as one message by `flush`.

    token, event -> flush -> outbox -> the stream (router_streams.py); closed: nothing is kept any more

What waits for a router that does not read is counted in bytes; whether it is too much, its keeper decides.
"""

from __future__ import annotations

import asyncio
import time

from kvrelay.v1 import generate_pb2
from kvrelay.v1 import worker_pb2 as pb


class RouterLink:
    def __init__(self, router_id: str, heard_s: float = 0.0) -> None:
        self.router_id = router_id
        self.last_submit_seq = 0
        self.heard_s = heard_s  # by its keeper's clock; routers ping several times a second
        self.unread_bytes = 0
        self.is_closed = False
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
        self._outputs.tokens.append(output)

    def event(
        self,
        request: pb.RequestState,
        kind: pb.EventKind,
        *,
        reason: str = "",
        retryable: bool = False,
        cause: pb.FailureCause = pb.FAILURE_CAUSE_UNSPECIFIED,
        peer: str = "",
        receipt: generate_pb2.HandoffReceipt | None = None,
        cached_tokens: int = 0,
        decode_worker: str = "",
        at_ns: int = 0,
    ) -> None:
        self._outputs.events.append(
            pb.RequestEvent(
                request_id=request.request_id,
                attempt=request.attempt,
                kind=kind,
                at_ns=at_ns or time.monotonic_ns(),
                reason=reason,
                retryable=retryable,
                cause=cause,
                peer=peer,
                receipt=receipt,
                cached_tokens=cached_tokens,
                decode_worker=decode_worker,
            )
        )

    def flush(self) -> None:
        if self._outputs.tokens or self._outputs.events:
            self.put(pb.WorkerMessage(outputs=self._outputs))
            self._outputs = pb.Outputs()
