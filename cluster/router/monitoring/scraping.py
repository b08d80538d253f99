"""Serves /metrics over HTTP to scrapers whom `may_enter` lets in: a few at a time, each for a bounded while.

It counts nothing itself. Prometheus sends its token with `authorization: {credentials_file: ...}`.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from worker.wire.credentials import FollowedTls
from worker.wire.tls import TlsFiles

MAX_SCRAPERS = 8
SCRAPE_TIMEOUT_S = 10.0  # from its connection to the last byte of the answer
Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class ScrapeServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(
        self,
        host: str,
        port: int,
        app: Application,
        *,
        may_enter: Callable[[bytes, str], bool] = lambda authorization, peer: True,
        tls: TlsFiles | None = None,
    ) -> None:
        """`may_enter` is asked with the authorization header and the address that it came from, in a scraper's thread.
        Raises OSError when the port is taken, TlsError."""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._tls = FollowedTls(tls) if tls is not None else None
        self._slots = threading.BoundedSemaphore(MAX_SCRAPERS)
        super().__init__((host, port), _Handler)
        self.set_app(_guarded(app, may_enter))
        self._thread = threading.Thread(target=self.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()

    def get_request(self) -> tuple[Any, Any]:
        """With certificates as they are now. The handshake is left to the scraper's own thread."""
        accepted, address = super().get_request()
        if self._tls is None:
            return accepted, address
        context = self._tls.server_context()
        return context.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False), address

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        overdue = threading.Timer(SCRAPE_TIMEOUT_S, _shut, [request])
        overdue.daemon = True
        overdue.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            overdue.cancel()
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A scraper that left, or spoke no TLS: nothing that anybody has to mend."""


def _shut(request: socket.socket) -> None:
    """Its thread wakes. A timeout of the socket would begin anew with each byte."""
    with suppress(OSError):  # over already
        socket.socket.shutdown(request, socket.SHUT_RDWR)  # an SSLSocket's own pulls its state away


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are no news."""


def _guarded(app: Application, may_enter: Callable[[bytes, str], bool]) -> Application:
    def guarded(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if may_enter(environ.get("HTTP_AUTHORIZATION", "").encode("latin-1"), environ["REMOTE_ADDR"]):
            return app(environ, start_response)
        headers = [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")]
        start_response("401 Unauthorized", headers)
        return [b"the token is missing or wrong; send authorization: Bearer TOKEN\n"]

    return guarded
