"""Door lets calls into a gRPC server, or refuses them: all services but those that it is told are open to everyone.

Whoever is refused gets UNAUTHENTICATED and one sentence, the same whatever was wrong, after its first message or
FIRST_MESSAGE_S, or at once where many are; it costs no more than a comparison, and the log has one line for many. Who
comes in is CALLER to the handler of its call.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from contextvars import ContextVar

import grpc
import grpc.aio

from worker.wire.aborts import without_traces
from worker.wire.reads import read_whole

log = logging.getLogger(__name__)

FIRST_MESSAGE_S = 2.0  # that a caller is heard who is to be refused
MAX_HEARD = 64  # of those at once: each may send a message
LOG_GAP_S = 10.0
QUIET = ("Invalid encoding on", "ExecuteBatchError raised in core")  # of a client that left while it was written to
logging.getLogger("grpc._cython.cygrpc").addFilter(  # else anybody fills the log, or a mistyped token stands in it
    lambda record: not record.getMessage().startswith(QUIET)
)
Metadata = Sequence[tuple[str, str | bytes]]
CALLER: ContextVar[str] = ContextVar("CALLER", default="")  # the name that the caller is known by; empty: it has none


def single(metadata: Metadata, key: str) -> bytes:
    """The value of a key that is there once; else nothing: of two values nobody knows which one others looked at."""
    values = [value for name, value in metadata if name == key]
    if len(values) != 1:
        return b""
    return values[0] if isinstance(values[0], bytes) else values[0].encode(errors="surrogateescape")


class Door(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """`caller_of`: a call's metadata -> the caller's name, None for one who is refused with `sentence`."""

    def __init__(
        self,
        caller_of: Callable[[Metadata], str | None],
        sentence: str,
        *,
        open_services: Collection[str] = (),
        on_refused: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_refused = 0
        self._on_refused = on_refused
        self._caller_of = caller_of
        self._sentence = sentence
        self._open = frozenset(f"/{service}" for service in open_services)
        self._clock = clock
        self._heard = 0  # now, of those who are to be refused
        self._told = 0  # of num_refused
        self._tell_s = float("-inf")  # not before
        self._refuse = grpc.stream_stream_rpc_method_handler(self._refused)  # bounds how long a unary call is open, too

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        caller = None
        is_open = handler_call_details.method.rpartition("/")[0] in self._open
        if not is_open:
            caller = self._caller_of(handler_call_details.invocation_metadata or ())
            CALLER.set(caller or "")  # to the interceptors behind, too
        handler = await continuation(handler_call_details)
        return handler if handler is None or is_open or caller is not None else self._refuse

    async def _refused(self, requests: AsyncIterator[object], context: grpc.aio.ServicerContext) -> None:
        """After the first message: a caller that still writes when the refusal comes is told of its write instead."""
        self.note_refused(context.peer())
        if self._heard < MAX_HEARD:
            self._heard += 1
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(FIRST_MESSAGE_S):
                        await read_whole(anext(requests, None))
            finally:
                self._heard -= 1
        await without_traces(context.abort(grpc.StatusCode.UNAUTHENTICATED, self._sentence))

    def note_refused(self, peer: str) -> None:
        """One more, here or by another entrance to the same."""
        self.num_refused += 1
        self._on_refused()
        now = self._clock()
        if now < self._tell_s:
            return
        log.warning("%d calls refused: %s; the last came from %s", self.num_refused - self._told, self._sentence, peer)
        self._told, self._tell_s = self.num_refused, now + LOG_GAP_S
