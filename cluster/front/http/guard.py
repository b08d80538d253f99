"""Guard stands before the HTTP application: who may call, how many at once, how large a request may be and how long it
may take to come. It names each call, and ends it when its client leaves."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

import grpc
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.front.authentication import REFUSAL, owner_of
from cluster.front.bounds.limits import CallLimit
from cluster.front.bounds.stalls import Stalls
from cluster.front.generation import Limits
from cluster.front.http.errors import limit_headers, refused
from cluster.front.requests import MAX_ID_CHARS
from cluster.router.live.requests import RequestFailed
from worker.wire.door import CALLER
from worker.wire.tokens import Keyring

Code = grpc.StatusCode
OPEN = ("/health", "/ready", "/")  # for load balancers and probes; and a page that knows nothing by itself
OPEN_FOLDER = "/page/"
ID_HEADER = "X-Request-Id"


class ClientGone(Exception):
    """It left before all of its request had come."""


@dataclass(slots=True)
class HttpCall:
    """Of one request over HTTP: a Call (generation.py)."""

    request_id: str
    is_answered: bool = False
    is_admitted: bool = False

    def time_remaining(self) -> float | None:
        return None

    def set_trailing_metadata(self, trailing_metadata: Iterable[tuple[str, str]], /) -> None:
        """HTTP/1.1's clients read none."""


class Guard:
    def __init__(
        self,
        app: ASGIApp,
        *,
        keyring: Keyring | None,
        note_refused: Callable[[str], None],
        calls: CallLimit,
        max_body_bytes: int,
        max_stall_s: float,
        turn: Callable[[str], Awaitable[None]],
        limits: Callable[[], Limits],
    ) -> None:
        """`keyring`: None: everyone may call. `note_refused`: is told from where one came who has none. `turn`:
        waits for the turn of a caller. `limits`: the caller's."""
        self._app = app
        self._keyring = keyring
        self._note_refused = note_refused
        self._calls = calls
        self._max_body_bytes = max_body_bytes
        self._stalls = Stalls(max_stall_s)
        self._turn = turn
        self._limits = limits
        self._names: set[str] = set()  # that clients have given to what is open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        name = self._name(_given_id(headers))
        call = scope["state"]["call"] = HttpCall(name)

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[ID_HEADER] = call.request_id
                if call.is_admitted:
                    MutableHeaders(scope=message).update(limit_headers(self._limits()))
            call.is_answered = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        path = scope["path"] = scope["path"].rstrip("/") or "/"  # a redirect would name us, and no proxy before us
        is_open = path in OPEN or path.startswith(OPEN_FOLDER)
        try:
            if not is_open:
                self._admit(headers, scope["client"])
                call.is_admitted = True
                await self._turn(CALLER.get())
            body = await self._read(headers, receive, 0 if is_open else self._max_body_bytes)
        except RequestFailed as error:
            await refused(error)(scope, receive, named)
        except ClientGone:
            return
        else:
            await _until_gone(receive, call, self._app(scope, _replayed(body), named))
        finally:
            self._names.discard(name)

    def _name(self, given: str) -> str:
        """Ours, if the client gives none; more than its own, if another that is open has that: a trace's id comes with
        each call of one who passes it on."""
        name = given or secrets.token_hex(8)
        if name in self._names:
            name = f"{name[: MAX_ID_CHARS - 9]}-{secrets.token_hex(4)}"
        self._names.add(name)
        return name

    def _admit(self, headers: Headers, client: tuple[str, int] | None) -> None:
        if self._keyring is not None:
            given = headers.getlist("authorization")
            owner = owner_of(given[0].encode("latin-1"), self._keyring) if len(given) == 1 else None
            if owner is None:
                self._note_refused("{}:{}".format(*client) if client else "nobody knows where")
                raise RequestFailed(Code.UNAUTHENTICATED, REFUSAL)
            CALLER.set(owner)
        self._calls.admit()

    async def _read(self, headers: Headers, receive: Receive, most_bytes: int) -> bytes:
        """The body. Raises RequestFailed for one that is too large, or does not come."""
        encoding = headers.get("content-encoding", "identity")
        if encoding != "identity":
            why = f"Content-Encoding is {encoding[:80]!r}; send the body as it is, without one"
            raise RequestFailed(Code.INVALID_ARGUMENT, why)
        told = headers.get("content-length", "0")
        if told.isdecimal() and int(told) > most_bytes:
            raise _too_large(int(told), most_bytes)
        try:
            async with asyncio.timeout(None) as limit:
                return await self._stalls.bounded(limit, _whole(receive, most_bytes))
        except TimeoutError:
            why = f"the request's body did not come within {self._stalls.bound_s:g} s"
            raise RequestFailed(Code.DEADLINE_EXCEEDED, why) from None


def across_origins(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """For pages of other origins. It stands outside the Guard: a browser asks first, without a token."""
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "HEAD", "POST"),
        allow_headers=("*",),
        expose_headers=(ID_HEADER, "Retry-After", "Retry-After-Ms"),
    )


async def _whole(receive: Receive, most_bytes: int) -> bytes:
    body, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > most_bytes:
            raise _too_large(len(body), most_bytes)
        more = message.get("more_body", False)
    return bytes(body)


def _too_large(num_bytes: int, most_bytes: int) -> RequestFailed:
    return RequestFailed(Code.OUT_OF_RANGE, f"the body has {num_bytes} bytes or more; {most_bytes} are taken here")


def _given_id(headers: Headers) -> str:
    """What the client calls its request, where it can be a name of ours."""
    given = headers.get(ID_HEADER, "")
    return given if len(given) <= MAX_ID_CHARS and given.isascii() and given.isprintable() else ""


def _replayed(body: bytes) -> Receive:
    """Brings the body that was read, and then nothing: that a client leaves ends the whole call."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        raise AssertionError("never")

    return receive


async def _until_gone(receive: Receive, call: HttpCall, answer: Awaitable[None]) -> None:
    """The answer, or until the client leaves: then it is cancelled."""
    task, watcher = asyncio.ensure_future(answer), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watcher.cancel()
        if not task.done():
            if not call.is_answered:
                task.cancel()
            await asyncio.wait((task,))
    if not task.cancelled():
        task.result()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
