"""A pair's own TCP connection: to a port that its receiver binds for it alone, and that only its sender can use.

    receiver   listens on its own address, on any free port -> port and tokens go through the control stream
    sender     connects -> [TLS, each side with a certificate of the cluster] -> shows its token -> wants the answer
    receiver   takes the first caller with the token, answers with its own token, and listens no more

The control stream is authenticated by the cluster's secret; tokens are random, used once, and compared in constant
time. Strangers cannot keep the sender out: they are heard side by side, each for CALLER_S, and where there are too many
the oldest goes. What is said on the connection afterwards is not its business (tcp.py, pair_store.py).
"""

from __future__ import annotations

import hmac
import logging
import secrets
import selectors
import socket
import ssl
import time
from collections.abc import Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from kv_transfer.base import TransferError, Wire

log = logging.getLogger(__name__)

TOKEN_BYTES = 32
CALLER_S = 2.0  # that a caller may take to show the token
LOOK_S = 0.5  # at most, between two looks at who is slow
MAX_CALLERS = 16  # heard at once
BACKLOG = 256  # that wait to be heard

Proof = Generator[int, None, None]  # yields the selectors' events that it waits for; ends once the token was shown


@dataclass(slots=True)
class _Caller:
    sock: socket.socket
    address: str
    proof: Proof
    since_s: float


class PairListener:
    def __init__(self, wire: Wire) -> None:
        """Raises OSError, ValueError (certificates of no use)."""
        self._wire = wire
        self._tls = wire.tls.server_context() if wire.tls else None
        if self._tls is not None:
            self._tls.num_tickets = 0  # the sender reads nothing after the answer
        self._token, self._answer = secrets.token_bytes(TOKEN_BYTES), secrets.token_bytes(TOKEN_BYTES)
        family = socket.AF_INET6 if ":" in wire.host else socket.AF_INET
        self._socket = socket.create_server((wire.host, 0), family=family, backlog=BACKLOG)
        self._socket.setblocking(False)
        self._listened_s = 0.0  # what this process itself stood still is no caller's silence
        self._callers: dict[int, _Caller] = {}  # by descriptor, the oldest first
        self._last_refused = ""
        self.params: Mapping[str, str] = {
            "address": wire.host,
            "port": str(self._socket.getsockname()[1]),
            "token": self._token.hex(),
            "answer": self._answer.hex(),
            "tls": "1" if wire.tls else "",
        }

    def accept(self, peer: str, timeout_s: float) -> socket.socket:
        """The connection with the sender; the port is closed then. Raises TransferError, OSError once aborted."""
        deadline_s = time.monotonic() + timeout_s
        with self._socket, selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            try:
                while (now_s := time.monotonic()) < deadline_s:
                    self._drop_slow(selector)
                    ready = selector.select(min(deadline_s - now_s, LOOK_S))
                    self._listened_s += min(time.monotonic() - now_s, LOOK_S)
                    for key, _ in ready:
                        if key.fileobj is self._socket:
                            self._hear(selector)
                        elif key.fd in self._callers and self._has_proven(selector, key.fd):
                            return self._taken(selector, key.fd, timeout_s)
            finally:
                for fd in list(self._callers):
                    self._drop(selector, fd, "the pair was opened, or is closed")
        refused = f"; the last caller was refused: {self._last_refused}" if self._last_refused else ""
        raise TransferError(f"{peer} did not connect to us within {timeout_s:g} s{refused}")

    def abort(self) -> None:
        """From any thread: `accept` ends with OSError, now or when it is called."""
        with suppress(OSError):  # closed already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _hear(self, selector: selectors.BaseSelector) -> None:
        try:
            sock, address = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the caller thought better of it
            return
        try:
            sock.setblocking(False)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        except OSError:  # it is gone already
            sock.close()
            return
        if len(self._callers) >= MAX_CALLERS:
            self._drop(selector, next(iter(self._callers)), "too many callers at once")
        self._callers[sock.fileno()] = _Caller(sock, address[0], _proof(sock, self._token), self._listened_s)
        selector.register(sock, selectors.EVENT_READ)

    def _has_proven(self, selector: selectors.BaseSelector, fd: int) -> bool:
        caller = self._callers[fd]
        try:
            selector.modify(caller.sock, next(caller.proof))
        except StopIteration:
            return True
        except OSError as error:
            self._drop(selector, fd, first_words(error))
        return False

    def _taken(self, selector: selectors.BaseSelector, fd: int, timeout_s: float) -> socket.socket:
        sock = self._callers.pop(fd).sock
        selector.unregister(sock)
        _set_up(sock, self._wire.timeout_s)
        sock.sendall(self._answer)
        return sock

    def _drop_slow(self, selector: selectors.BaseSelector) -> None:
        for fd, caller in list(self._callers.items()):
            if self._listened_s - caller.since_s > CALLER_S:
                self._drop(selector, fd, f"it showed no token for {CALLER_S:g} s")

    def _drop(self, selector: selectors.BaseSelector, fd: int, reason: str) -> None:
        caller = self._callers.pop(fd)
        selector.unregister(caller.sock)
        caller.sock.close()
        self._last_refused = f"{caller.address}: {reason}"
        log.info("a caller at a pair's port was refused: %s", self._last_refused)


def dial(params: Mapping[str, str], wire: Wire, peer: str) -> socket.socket:
    """The sender's connection to where `params` say. Blocks. Raises TransferError."""
    try:
        address, port = params["address"], int(params["port"])
        token, answer = bytes.fromhex(params["token"]), bytes.fromhex(params["answer"])
    except (KeyError, ValueError):
        raise TransferError(f"{peer} offers no address and token to connect to; use another transport") from None
    if bool(params.get("tls")) != (wire.tls is not None):
        raise TransferError(f"of {peer} and us one speaks TLS and the other does not; give both the same tls")
    deadline_s = time.monotonic() + wire.timeout_s
    try:
        sock = socket.create_connection((address, port), timeout=wire.timeout_s)
    except (OSError, OverflowError, UnicodeError) as error:  # no port, no name
        raise TransferError(f"cannot connect to {peer} at {address}:{port}: {first_words(error)}") from error
    try:
        if wire.tls is not None:
            name = wire.tls.server_name or address
            sock = wire.tls.client_context().wrap_socket(sock, server_hostname=name)
        sock.sendall(token)
        if not hmac.compare_digest(read_exactly(sock, TOKEN_BYTES, deadline_s), answer):
            raise ConnectionError("somebody else listens there")
        _set_up(sock, wire.timeout_s)
    except (OSError, ValueError) as error:
        sock.close()
        raise TransferError(f"cannot open a pair with {peer} at {address}:{port}: {first_words(error)}") from error
    return sock


def shut(sock: socket.socket) -> None:
    """From any thread: whoever waits for the connection wakes. An SSLSocket's own shutdown would pull its state away
    from under them."""
    with suppress(OSError):  # over already
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def first_words(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "it does not answer"
    return (getattr(error, "strerror", None) or str(error)).partition("\n")[0][:200].lower()


def _proof(sock: socket.socket, token: bytes) -> Proof:
    """Raises OSError when the caller is not the pair's sender."""
    while isinstance(sock, ssl.SSLSocket):
        try:
            sock.do_handshake()
            break
        except ssl.SSLWantReadError:
            yield selectors.EVENT_READ
        except ssl.SSLWantWriteError:
            yield selectors.EVENT_WRITE
    shown = b""
    while len(shown) < len(token):
        try:
            part = sock.recv(len(token) - len(shown))
        except (BlockingIOError, ssl.SSLWantReadError):
            yield selectors.EVENT_READ
            continue
        if not part:
            raise ConnectionError("it hung up before it showed the token")
        shown += part
    if not hmac.compare_digest(shown, token):
        raise ConnectionError("its token is wrong")


def read_exactly(sock: socket.socket, num_bytes: int, deadline_s: float | None = None) -> bytes:
    """Raises OSError; without a deadline the socket's own timeout holds for each part."""
    read = bytearray()
    while len(read) < num_bytes:
        if deadline_s is not None:
            sock.settimeout(max(0.001, deadline_s - time.monotonic()))
        part = sock.recv(num_bytes - len(read))
        if not part:
            raise ConnectionError("it hung up")
        read += part
    return bytes(read)


def _set_up(sock: socket.socket, timeout_s: float) -> None:
    sock.settimeout(timeout_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # what is sent to a host that has vanished would wait for minutes
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(timeout_s * 1000)))
