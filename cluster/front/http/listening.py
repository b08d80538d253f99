"""Listens for HTTP in a running event loop: uvicorn's server without its signals and its clock, with bounds on who
connects and says nothing."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import math
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import httptools
from starlette.types import ASGIApp
from uvicorn import Config, Server
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from cluster.front.bounds.limits import half_of_files
from cluster.front.http.errors import body_of
from worker.wire.credentials import FollowedTls
from worker.wire.tls import TlsFiles

log = logging.getLogger(__name__)

HEADERS_S = 10.0  # that a request's headers may take to come, and a connection to bring its first
MAX_HEADER_BYTES = 64 * 1024
KEEP_ALIVE_S = 75.0  # longer than most clients and load balancers keep an idle connection: they close it, and know
STOP_S = 1.0  # for the last bytes
TELL_S = 60.0  # between two lines of a process that has too many files open
_WHY_TOO_LARGE = body_of(f"the headers are larger than {MAX_HEADER_BYTES} bytes", "invalid_request_error")
_TOO_LARGE = json.dumps(_WHY_TOO_LARGE).encode()
HEADERS_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_TOO_LARGE), _TOO_LARGE)
)


class _Connection(HttpToolsProtocol):
    """Aborted where its client takes nothing for `max_stall_s`, or sends no headers in HEADERS_S. One that sends too
    many is told so, and heard out for so long: what is unread when a connection is closed resets it, answer and all.
    So is one that is answered while its body still comes, where the connection ends with the answer.

    One that sends a request before the last one is answered gets that answer, and then the connection's end (RFC 9112
    9.3.2: it asks again for the others): uvicorn would stop reading, and nobody would see that the client leaves. An
    upgrade that is offered (h2c, by curl and Java) is passed over, as RFC 9110 7.8 has it: llhttp would take the body
    for the other protocol's. To a client of HTTP/1.0 nothing is sent in chunks (RFC 9112 6.1): an answer whose length
    is not told ends with the connection."""

    def __init__(self, *args: Any, max_connections: int, max_stall_s: float, **uvicorns: Any) -> None:
        super().__init__(*args, **uvicorns)
        self._max_connections = max_connections
        self._max_stall_s = max_stall_s
        self._headers_timer: asyncio.TimerHandle | None = None  # runs while headers are awaited
        self._stall_timer: asyncio.TimerHandle | None = None  # runs while it does not take what is written
        self._untaken_bytes = 0
        self._header_bytes = 0
        self._awaited_bytes = 0  # that came since headers or a part of a body were whole
        self._is_heard_out = False  # what comes now is read, and dropped

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_headers()
        if len(self.connections) > self._max_connections:  # uvicorn's own limit refuses those who were here before, too
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._heard()
        self._stop_stall_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_heard_out:
            return
        self._unset_keepalive_if_required()
        self._awaited_bytes += len(data)
        self._parse(data)
        if self._is_heard_out or self.transport.is_closing():
            return
        if self._awaited_bytes > MAX_HEADER_BYTES:  # of one header, maybe: the parser keeps it, and tells of it whole
            self._refuse_headers()
        elif self._headers_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._await_headers()  # what came was no beginning of a request, and has ended uvicorn's own timer

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._parse(self._head_without_offer() + data[offer.args[0] :])
        except httptools.HttpParserError:
            if not self._is_heard_out:
                self.send_400_response("Invalid HTTP request received.")

    def _head_without_offer(self) -> bytes:
        first = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        others = [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([first, *others, b"", b""])

    @property
    def _is_offered_upgrade(self) -> bool:
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def on_message_begin(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._is_heard_out = True
            self.cycle.keep_alive = False
            raise ConnectionAbortedError  # ends the parser's work
        self._header_bytes = 0
        self._await_headers()
        if not self.flow.write_paused:
            self._stop_stall_timer()  # of the last answer's end
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._is_offered_upgrade:
            self._heard()
            super().on_headers_complete()
            send = _send_unchunked if self.parser.get_http_version() == "1.0" else RequestResponseCycle.send
            self.cycle.send = partial(self._send, send, self.cycle)  # type: ignore[method-assign]

    def on_body(self, body: bytes) -> None:
        self._awaited_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._is_offered_upgrade:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self._heard()  # uvicorn's own timer runs now
        super().on_response_complete()
        self._look_again()  # that timer's close, too, waits until all is taken

    async def _send(self, send: Callable[..., Awaitable[None]], cycle: RequestResponseCycle, message: Any) -> None:
        is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
        is_early = is_last and cycle.more_body and not cycle.keep_alive
        if is_early:
            cycle.keep_alive = True  # or uvicorn closes
        await send(cycle, message)
        if is_early:
            self._hear_out()

    def _hear_out(self) -> None:
        self._is_heard_out = True
        self._unset_keepalive_if_required()
        self._await_headers()
        if self.transport.can_write_eof():  # not in TLS
            self.transport.write_eof()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look_again()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_stall_timer()
        if self.cycle is None or self.cycle.response_complete:
            self._look_again()  # nothing more is written, which would have to wait for what is left

    def _await_headers(self) -> None:
        self._heard()
        self._headers_timer = self.loop.call_later(HEADERS_S, self.transport.abort)

    def _heard(self) -> None:
        self._awaited_bytes = 0
        if self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None

    def _count(self, num_bytes: int) -> None:
        self._header_bytes += num_bytes
        if self._header_bytes > MAX_HEADER_BYTES:
            self._refuse_headers()
            raise ConnectionAbortedError  # ends the parser's work

    def _refuse_headers(self) -> None:
        self._is_heard_out = True
        if self._headers_timer is not None:
            self.transport.write(HEADERS_TOO_LARGE)
        else:  # they are behind the body, and its answer may have begun
            self.transport.abort()

    def _look_again(self) -> None:
        self._stop_stall_timer()
        self._untaken_bytes = self.transport.get_write_buffer_size()
        if self._untaken_bytes:
            self._stall_timer = self.loop.call_later(self._max_stall_s, self._look)

    def _look(self) -> None:
        if self.transport.get_write_buffer_size() >= self._untaken_bytes:
            self.transport.abort()
        else:
            self._look_again()

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None


async def _send_unchunked(cycle: RequestResponseCycle, message: Any) -> None:
    """uvicorn knows an answer in chunks and one of a told length; here each piece is all that is expected of it."""
    cycle.chunked_encoding = False
    if message["type"] == "http.response.body":
        cycle.expected_content_length = len(message.get("body", b""))
    await RequestResponseCycle.send(cycle, message)


class _Door(socket.socket):
    """What comes while half of the process's files are open is closed at once. Where others have opened all, asyncio,
    which would try it for as many as may wait and tell of each, is told once, and asks again a second later."""

    _is_short = False
    _told_s = -math.inf

    def accept(self) -> tuple[socket.socket, Any]:
        if self._is_short:
            self._is_short = False
            raise BlockingIOError
        try:
            connection, address = super().accept()
        except OSError as error:
            self._is_short = error.errno in (errno.EMFILE, errno.ENFILE)
            raise
        if connection.fileno() < (most := half_of_files()):
            return connection, address
        connection.close()
        self._tell(most)
        raise ConnectionAbortedError

    def _tell(self, most: int) -> None:
        if (now_s := time.monotonic()) >= self._told_s + TELL_S:
            self._told_s = now_s
            log.warning("HTTP connections are closed at once: %d files are open, half of what ulimit -n allows", most)


class HttpListener:
    def __init__(self, app: ASGIApp, *, max_connections: int, max_stall_s: float, tls: TlsFiles | None) -> None:
        """Raises TlsError."""
        connection: Any = partial(_Connection, max_connections=max_connections, max_stall_s=max_stall_s)
        config = Config(
            app,
            http=connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=round(KEEP_ALIVE_S),
            timeout_graceful_shutdown=round(STOP_S),
            reset_contextvars=True,
        )
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # else whoever sends no HTTP fills the log
        config.load()
        config.ssl = _followed(tls) if tls is not None else None
        self._server = Server(config)
        self._server.lifespan = config.lifespan_class(config)
        self._sockets: list[socket.socket] = []

    async def start(self, host: str, port: int) -> int:
        """Returns the port. Raises OSError when it is taken."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = _Door(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY on no other
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
        except OSError:
            listener.close()
            raise
        listener.setblocking(False)
        self._sockets = [listener]
        await self._server.startup(sockets=self._sockets)
        return int(listener.getsockname()[1])

    async def stop(self) -> None:
        """What runs is over by now, or is cut off."""
        if self._sockets:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2 * STOP_S):
                    await self._server.shutdown(sockets=self._sockets)
            self._sockets = []


def _followed(tls: TlsFiles) -> ssl.SSLContext:
    """Of the files as they are now; a handshake after they have changed has the new ones."""
    followed = FollowedTls(tls)
    context = followed.server_context()

    def renew(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        connection.context = followed.server_context()

    context.sni_callback = renew
    return context
