"""/metrics over HTTP: who is let in, and that nobody holds it up (cluster/router/monitoring/scraping.py)."""

from __future__ import annotations

import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trustme

from cluster.router.monitoring import scraping
from cluster.router.monitoring.scraping import ScrapeServer
from tests.certificates import write_tls

pytestmark = pytest.mark.unit

Start = Callable[..., ScrapeServer]


def metrics(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    start_response("200 OK", [])
    return [b"up 1\n"]


@pytest.fixture
def start() -> Iterator[Start]:
    servers: list[ScrapeServer] = []

    def start(**settings: Any) -> ScrapeServer:
        servers.append(ScrapeServer("127.0.0.1", 0, metrics, **settings))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def scrape(server: ScrapeServer, *, scheme: str = "http", context: ssl.SSLContext | None = None, **headers: str) -> int:
    asked = urllib.request.Request(f"{scheme}://127.0.0.1:{server.server_port}/metrics", headers=headers)
    try:
        with urllib.request.urlopen(asked, timeout=30, context=context) as answer:
            assert answer.read() == b"up 1\n"
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_only_who_is_known_may_scrape(start: Start) -> None:
    server = start(may_enter=lambda authorization, peer: authorization == b"Bearer t")
    assert scrape(server, Authorization="Bearer t") == 200
    assert [scrape(server), scrape(server, Authorization="Bearer x"), scrape(server, Authorization="t")] == [401] * 3


def test_a_scraper_that_says_nothing_costs_the_others_nothing(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scraping, "SCRAPE_TIMEOUT_S", 1.0)
    server = start()
    with socket.create_connection(("127.0.0.1", server.server_port)):
        assert scrape(server) == 200
    silent = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(scraping.MAX_SCRAPERS + 3)]
    for other in silent:
        other.settimeout(30)
        assert other.recv(1) == b""  # too many of them, or too slow
        other.close()
    assert scrape(server) == 200


def test_a_scraper_that_says_a_byte_now_and_then_is_not_waited_for_either(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scraping, "SCRAPE_TIMEOUT_S", 0.3)
    with socket.create_connection(("127.0.0.1", start().server_port)) as dripping:
        dripping.settimeout(0.05)
        with suppress(ConnectionError):
            for _ in range(100):
                dripping.sendall(b"G")
                with suppress(TimeoutError):
                    assert dripping.recv(1) == b""
                    return
        pytest.fail("it was heard for 5 s")


def test_with_certificates_it_speaks_tls_and_asks_for_theirs(start: Start, tmp_path: Path) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    own = write_tls(tmp_path, authority, "127.0.0.1")
    server = start(tls=own)
    assert scrape(server, scheme="https", context=own.client_context()) == 200
    without = replace(own, cert="", key="")
    others = write_tls(tmp_path, stranger, "127.0.0.1", ca=authority, stem="stranger")
    for files in (without, others):
        with pytest.raises((urllib.error.URLError, OSError)):
            scrape(server, scheme="https", context=files.client_context())
    with pytest.raises((urllib.error.URLError, OSError)):
        scrape(server)
    assert scrape(server, scheme="https", context=own.client_context()) == 200
