"""A request's answer while it comes: `Stream` for plain code, `AsyncStream` for asyncio.

Each owns one gRPC call: it turns messages into deltas, keeps what has come, notes when, and cancels the call when it
is closed before the end. It opens no call itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from kvrelay.client.failures import cancelled_error, kvrelay_error, raise_kvrelay
from kvrelay.client.messages import Fold, delta_from
from kvrelay.client.types import Completion, Delta
from kvrelay.v1 import generate_pb2


class _Timed:
    """When a stream was opened, and when its first and its last tokens came (`time.perf_counter`)."""

    def __init__(self, opened_s: float) -> None:
        self._fold = Fold()
        self._opened_s = opened_s
        self._first_s: float | None = None
        self._last_s = self._opened_s
        self._num_tokens = 0
        self._ended = False

    def completion(self) -> Completion:
        """All that has come so far; usage, timeline and receipt come with the end."""
        return self._fold.completion()

    @property
    def ttft_s(self) -> float | None:
        """From opening the stream to the first choice's first token, as seen here; None before that."""
        return None if self._first_s is None else self._first_s - self._opened_s

    @property
    def tpot_s(self) -> float | None:
        """(last token - first token) / (tokens - 1) of the first choice, as seen here; None below two tokens."""
        if self._first_s is None or self._num_tokens < 2:
            return None
        return (self._last_s - self._first_s) / (self._num_tokens - 1)

    def _add(self, message: generate_pb2.GenerateResponse) -> None:
        self._fold.add(message)
        if message.token_ids and message.index == 0:
            self._num_tokens += len(message.token_ids)
            self._last_s = time.perf_counter()
            if self._first_s is None:
                self._first_s = self._last_s


class Stream(_Timed):
    """Iterates over a request's deltas. Closing it (or leaving its `with`) before the end cancels the request."""

    def __init__(self, call: Any, endpoint: str, opened_s: float) -> None:
        """`opened_s` is read before the call is made: opening the channel is part of what the caller waits for."""
        super().__init__(opened_s)
        self._call = call
        self._endpoint = endpoint

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        if self._ended:
            raise StopIteration
        try:
            message = next(self._call)
        except StopIteration:
            self._ended = True
            raise
        except grpc.RpcError as error:
            self._ended = True
            raise_kvrelay(error, self._endpoint)
        self._add(message)
        return delta_from(message)

    def close(self) -> None:
        self._ended = True
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class AsyncStream(_Timed):
    """Iterates over a request's deltas. Closing it, leaving its `async with`, or cancelling the task that waits for
    the next delta cancels the request."""

    def __init__(self, call: Any, endpoint: str, opened_s: float) -> None:
        """`opened_s` is read before the call is made: opening the channel is part of what the caller waits for."""
        super().__init__(opened_s)
        self._call = call
        self._endpoint = endpoint

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        message = await self.read()
        if message is None:
            raise StopAsyncIteration
        return delta_from(message)

    async def read(self) -> generate_pb2.GenerateResponse | None:
        """The next message as it came, None at the end: for those who count tokens and want nothing made of them."""
        if self._ended:
            return None
        try:
            message = await self._call.read()
        except grpc.RpcError as error:
            self._ended = True
            raise_kvrelay(error, self._endpoint)
        except asyncio.CancelledError as error:
            await self.aclose()
            raise cancelled_error(error, self._endpoint) from None
        if message is grpc.aio.EOF:
            self._ended = True
            await self._raise_status()
            return None
        self._add(message)
        return message  # type: ignore[no-any-return]

    async def aclose(self) -> None:
        self._ended = True
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _raise_status(self) -> None:
        code = await self._call.code()
        if code is not grpc.StatusCode.OK:
            details, trailers = await self._call.details(), await self._call.trailing_metadata()
            raise kvrelay_error(code, details, trailers, self._endpoint)
