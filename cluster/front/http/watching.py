"""The page at /, and what it shows: /watch tells, once a second, the router's status, the requests that have ended, and
what was decided since. The page is open; what it shows wants a token. It asks nobody else for anything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from google.protobuf.json_format import MessageToDict
from starlette.responses import FileResponse, Response

from cluster.front.bounds.stalls import Stalls
from cluster.front.http.streams import EventStream, event
from cluster.front.models.catalog import Catalog
from cluster.router.driver import Router
from cluster.router.monitoring.status import a_few_at_a_time, told_of
from worker.wire.door import CALLER
from worker.wire.tokens import OPERATORS

FOLDER = Path(__file__).parent / "page"
FILES = {path.name: path for path in FOLDER.iterdir()}
TICK_S = 1.0
MOST_ENDED = 2000  # of those that had ended before somebody watches
SECURITY = {
    "Content-Security-Policy": "default-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI, catalog: Catalog, stalls: Stalls) -> None:
    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(FILES["index.html"], headers=SECURITY)

    @app.get("/page/{name}", include_in_schema=False)
    async def part(name: str) -> Response:
        return FileResponse(FILES[name], headers=SECURITY) if name in FILES else Response(status_code=404)

    @app.get("/watch", responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}})
    async def watch() -> Response:
        return EventStream(_told(catalog, tells_ended=CALLER.get() in OPERATORS), stalls)


async def _told(catalog: Catalog, *, tells_ended: bool) -> AsyncGenerator[bytes, None]:
    """`tells_ended`: how others' requests fared, and what was decided for it, is for operators, as GetLoad is."""
    router = catalog.first.router  # what it has in common with those of other models
    load = router.metrics.load
    told, version = max(0, load.count - MOST_ENDED), 0
    while True:
        before, told = told, load.count
        rows = load.since(before) if tells_ended else ()
        ended = [{**told_of(each), "age_s": router.now - each.ended_s} async for each in a_few_at_a_time(rows)]
        message = _snapshot(catalog) | {"ended": ended}
        if tells_ended and version != router.metrics.chronicle.version:
            version, message["deeds"] = router.metrics.chronicle.version, _deeds(router)
        yield event(message)
        await asyncio.sleep(TICK_S)


def _deeds(router: Router) -> list[dict[str, Any]]:
    return [asdict(deed) | {"age_s": router.now - deed.at_s} for deed in router.metrics.chronicle]


def _snapshot(catalog: Catalog) -> dict[str, Any]:
    options = catalog.first.router.policy.options
    status = catalog.status
    return {
        "status": MessageToDict(status, preserving_proto_field_name=True, always_print_fields_with_no_presence=True),
        "ready": catalog.is_ready,
        "targets": {"ttft": options.slo_ttft_ms / 1e3, "tpot": options.slo_tpot_ms / 1e3},
    }
