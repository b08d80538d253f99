"""RouterServer is one router process's server: the router, its public services, health, reflection, metrics.

start: listen -> NOT_SERVING until some model has a worker of each phase -> SERVING
stop:  NOT_SERVING, refuse what is new -> let running requests end within the grace -> cancel the rest -> close
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from cluster.front.authentication import client_door, owner_of
from cluster.front.bounds.limits import CallLimit, grpc_options
from cluster.front.bounds.memory import let_go_forever
from cluster.front.generation import Generation
from cluster.front.grpc import GENERATE_SERVICE, GenerateService
from cluster.front.health import Health
from cluster.front.models.catalog import Catalog, Served
from cluster.front.models.coming import Models
from cluster.front.operating.operate import CLUSTER_SERVICE, ClusterService, Pools
from cluster.front.operating.usage_call import Usage
from cluster.front.options import FrontOptions
from cluster.front.tokenizer import TextCodec, load_codec
from cluster.front.trace_context import TracedCalls, TracedHttp
from cluster.router.driver import Router
from cluster.router.explaining.kept import Record
from cluster.router.links.worker_link import WorkerEndpoint
from cluster.router.live.shared import Shared
from cluster.router.monitoring.exposing import expose, text_of
from cluster.router.monitoring.families import Scrape
from cluster.router.monitoring.scraping import ScrapeServer
from cluster.router.monitoring.status import status_of
from cluster.router.options import RouterOptions
from cluster.router.tracing.asked import make_tracing
from cluster.usage.accounting import Accounting
from cluster.usage.options import Prices, UsageUrl
from engine.knobs import knobs_of, read
from worker.wire.rpc import bind, make_server
from worker.wire.tls import TlsFiles, why_open
from worker.wire.tokens import Keyring

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from cluster.front.http.listening import HttpListener

log = logging.getLogger(__name__)

DRAIN_POLL_S = 0.02
ADAPTERS_S = 30.0  # that a start waits for adapters' files
SCRAPE_TIMEOUT_S = 5.0
OWN_LINES = (
    (health.SERVICE_NAME, "Check"),
    (CLUSTER_SERVICE, "GetStatus"),
    (CLUSTER_SERVICE, "Drain"),
    (CLUSTER_SERVICE, "SetRole"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    name: str = "router-0"  # unique among the routers of a cluster
    cluster_id: str = ""  # the same of all of them
    host: str = "127.0.0.1"
    port: int = 50051  # 0: any free one
    secret: str = field(default="", repr=False)  # shared with the workers
    auth: bool = False  # clients must send a token: one of `tokens` (worker/wire/tokens.py), or of the file
    tokens: str = field(default="", repr=False)
    tokens_file: str = ""
    tls: TlsFiles | None = None  # for clients; None: plain text
    worker_tls: TlsFiles | None = None  # between the processes of the cluster
    reflection: bool = True
    model: str = ""  # directory or hub name whose tokenizer is loaded; empty: token ids only
    model_name: str = ""  # the name that requests give; empty: as the workers say
    models: Mapping[str, str] = field(default_factory=dict)  # beside it: directory or hub name, by the name in requests
    metrics_port: int | None = None  # None: not exposed; 0: any free one
    http_ports: tuple[int, ...] = ()  # the first that is free serves HTTP (0: any free one); none: nobody does
    router: RouterOptions = field(default_factory=RouterOptions)
    num_routers: int = 1  # of the cluster: each gives a part of what an account allows
    front: FrontOptions = field(default_factory=FrontOptions)
    usage_db: Path | UsageUrl | None = None  # where what clients use is counted; None: it is not
    prices: Prices | None = None  # told beside it
    record: str = ""  # a folder to write the policy's calls into, for placement/checks/replay.py; empty: none is


def server_options(**settings: Any) -> ServerOptions:
    """A server's options from settings by name, knobs of the router and of the front among them. Raises ValueError for
    one out of range."""
    knobs = {*knobs_of(RouterOptions), *knobs_of(FrontOptions)}
    own = {key: value for key, value in settings.items() if key not in knobs}
    return ServerOptions(router=read(RouterOptions, settings), front=read(FrontOptions, settings), **own)


class RouterServer:
    def __init__(self, options: ServerOptions, *, codec: TextCodec | None = None, pools: Pools | None = None) -> None:
        """`codec` stands in for the tokenizer of `options.model`, which is loaded by `start` otherwise. `pools`: who
        starts and ends workers, if anybody does. Raises TracingError for an exporter that cannot be had."""
        if why := why_open(options.host, auth=options.auth, tls=options.tls):
            raise ValueError(why)
        self.options = options
        self._keyring = Keyring(text=options.tokens, path=options.tokens_file) if options.auth else None
        self._tracing = make_tracing(options.front.otlp_traces_endpoint, instance=options.name, clock=time.monotonic)
        front = options.front
        self._shared = Shared.of(
            options.router,
            bundle_share=front.bundle_share,
            max_unread_bytes=front.max_unread_bytes,
            max_unread_total_bytes=front.max_unread_total_bytes,
        )
        self.router = self._make_router("")  # of the cluster's own model
        count = self.router.metrics.on_ended
        self._door = client_door(self._keyring, partial(count, "UNAUTHENTICATED")) if self._keyring else None
        first = Served(given_name=options.model_name, path=options.model, router=self.router, codec=codec)
        self.catalog = Catalog(first)
        self.models = Models(self.catalog, self._make_router, self._load_codec)
        self.serving = asyncio.Event()  # once a worker of each role of each model was ready
        self.port = 0
        self.metrics_port: int | None = None
        self.http_port: int | None = None
        self._pools = pools
        self._reading = asyncio.Lock()
        self._first_adapters: asyncio.Task[None] | None = None
        self._accounting: Accounting | None = None
        self._health = Health(
            (GENERATE_SERVICE,), max_watches=options.front.max_watches, max_stall_s=options.front.max_stall_s
        )
        self._calls = CallLimit(
            front.max_calls, front.max_stall_s, self._shared.turns, partial(count, "RESOURCE_EXHAUSTED")
        )
        self._letting_go: asyncio.Task[None] | None = None
        self._generation: Generation | None = None
        self._http: HttpListener | None = None
        self._scraped: ScrapeServer | None = None
        self._server: grpc.aio.Server | None = None

    async def start(self) -> int:
        """Listen; returns the port. Raises OSError when it is taken, TokenizerError when the tokenizer cannot load."""
        options = self.options
        if self.catalog.first.codec is None and options.model:
            self.catalog.first.codec = await self._load_codec(options.model)
        await self.take_models(options.models)
        self._first_adapters = asyncio.create_task(self.take_adapters(options.front.adapters))
        await asyncio.wait([self._first_adapters], timeout=ADAPTERS_S)  # where a disk hangs, all else is served
        if options.usage_db is not None:
            self._accounting = await asyncio.to_thread(Accounting.open, options.usage_db, options.name)
            self._accounting.start()
        self._generation = Generation(
            self.catalog,
            options=options.front,
            calls=self._calls,
            num_routers=options.num_routers,
            counting=self._accounting,
        )
        self._server = make_server(
            self._door,
            behind=[TracedCalls(), self._calls] if self._tracing is not None else [self._calls],
            options=grpc_options(options.front),
        )
        services = {
            GENERATE_SERVICE: GenerateService(self._generation).handlers(),
            CLUSTER_SERVICE: ClusterService(self.catalog, self._pools, self._usage).handlers(),
            health.SERVICE_NAME: self._health.handlers(),
        }
        _serve(self._server, services)
        if options.reflection:
            names = (GENERATE_SERVICE, CLUSTER_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)
        self.port = bind(self._server, options.host, options.port, options.tls)
        if options.metrics_port is not None:
            self._scraped = self._expose(options, options.metrics_port)
            self.metrics_port = self._scraped.server_port
        if options.http_ports:
            self.http_port = await self._serve_http(self._generation, options.http_ports)
        await self._server.start()
        self._shared.loop_clock.start()
        self._letting_go = asyncio.create_task(let_go_forever(self._num_busy))
        log.info("%s listens on %s:%d", options.name, options.host, self.port)
        return self.port

    def set_workers(self, workers: Iterable[WorkerEndpoint]) -> None:
        """These are the cluster's workers from now on."""
        self.catalog.set_workers(workers)

    def take_options(self, router: RouterOptions, front: FrontOptions, tokens_file: str) -> None:
        """Go by these from now on, where they are of what changes while it runs (knob's `changes`). Raises TokenError
        for a tokens file that cannot be read; nothing is changed then."""
        if tokens_file != self.options.tokens_file and self._keyring is not None:
            self._keyring.follow(tokens_file)
        self.options = replace(self.options, router=router, front=front, tokens_file=tokens_file)
        self._shared.bundles.set_targets(front.bundle_share, router.slo_tpot_ms / 1e3)
        self._shared.unread.max_bytes = front.max_unread_bytes
        self._shared.unread.max_total_bytes = front.max_unread_total_bytes
        for served in self.catalog.all:
            served.router.take_options(router, front.explained_requests)
            if served.codec is not None:
                served.codec.max_waiting_bytes = front.max_tokenizing_bytes
        self._health.max_watches = front.max_watches
        self._calls.set_limit(front.max_calls)
        if self._generation is not None:
            self._generation.take_options(front)

    async def take_models(self, wanted: Mapping[str, str]) -> None:
        """These are served beside the cluster's own from now on: directories by the names that requests call them."""
        await self.models.take(wanted)
        self._on_readiness()

    async def take_adapters(self, wanted: Mapping[str, str]) -> None:
        """Requests may name these from now on, once their files are read: directories by name. One call after another:
        the last has the last word."""
        book = self.catalog.first.adapters
        async with self._reading:
            book.known = await asyncio.to_thread(book.read, wanted)

    async def why_not_adapters(self, wanted: Mapping[str, str]) -> str:
        """Why those that come could not be taken; empty if they could."""
        return await asyncio.to_thread(self.catalog.first.adapters.why_not, wanted)

    def take_prices(self, prices: Prices | None) -> None:
        """Tell these from now on."""
        self.options = replace(self.options, prices=prices)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Refuse what is new, let what runs end within `grace_s`, then cancel it and close."""
        if self._server is None or self._generation is None:
            return
        self._generation.is_draining = True
        self._health.set(is_serving=False)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self.catalog.num_submissions:
                    await asyncio.sleep(DRAIN_POLL_S)
        for served in self.catalog.all:
            await served.router.close()
        if self._http is not None:
            await self._http.stop()
        await self._server.stop(0.5)  # the last messages and statuses still go out
        await self._shared.loop_clock.stop()
        if self._letting_go is not None:
            self._letting_go.cancel()
        if self._scraped is not None:
            await asyncio.to_thread(self._scraped.close)
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)
        if self._first_adapters is not None:
            self._first_adapters.cancel()
        await self.models.close()
        if self._accounting is not None:
            await self._accounting.stop()

    def _usage(self) -> Usage:
        return Usage(self._accounting, self.options.prices)

    def _expose(self, options: ServerOptions, port: int) -> ScrapeServer:
        host = options.host
        loop = asyncio.get_running_loop()
        try:
            return expose(
                host,
                port,
                partial(self._scrape_from_a_thread, loop),
                may_enter=partial(self._may_scrape, loop),
                tls=options.tls,
            )
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise OSError(f"cannot serve metrics on {host}:{port}: {why}; give another metrics_port") from error

    def _may_scrape(self, loop: asyncio.AbstractEventLoop, authorization: bytes, peer: str) -> bool:
        """Asked in a scraper's thread."""
        if self._keyring is None or owner_of(authorization, self._keyring) is not None:
            return True
        loop.call_soon_threadsafe(self._note_refused, peer)
        return False

    def _note_refused(self, peer: str) -> None:
        if self._door is not None:
            self._door.note_refused(peer)

    async def _serve_http(self, generation: Generation, ports: tuple[int, ...]) -> int:
        """On the first of the ports that is free. Raises OSError when none is, TlsError."""
        from cluster.front.http.app import Probes, make_app
        from cluster.front.http.guard import Guard, across_origins
        from cluster.front.http.listening import HttpListener

        options = self.options
        probes = Probes(
            is_ready=lambda: self.catalog.is_ready and not generation.is_draining, metrics=self._metrics_text
        )
        guard: ASGIApp = Guard(
            make_app(generation, probes),
            keyring=self._keyring,
            note_refused=self._note_refused,
            calls=self._calls,
            max_body_bytes=options.front.max_message_bytes,
            max_stall_s=options.front.max_stall_s,
            turn=self._shared.turns.wait,
            limits=generation.limits_now,
        )
        front = options.front
        if front.http_allowed_origins:
            guard = across_origins(guard, front.http_allowed_origins)
        self._http = HttpListener(
            TracedHttp(guard) if self._tracing is not None else guard,
            max_connections=front.max_connections,
            max_stall_s=front.max_stall_s,
            tls=options.tls,
        )
        for port in ports:
            try:
                return await self._http.start(options.host, port)
            except OSError as error:
                why = f"cannot serve HTTP on {options.host}:{port}: {(error.strerror or str(error)).lower()}"
        raise OSError(f"{why}; give another http_port, or 0 for any free one")

    async def _metrics_text(self) -> bytes:
        return await asyncio.to_thread(text_of, await self.scrape())

    def _scrape_from_a_thread(self, loop: asyncio.AbstractEventLoop) -> list[Scrape]:
        """Whatever lives is read in the event loop. Raises TimeoutError where that hangs: then the scrape fails."""
        return asyncio.run_coroutine_threadsafe(self.scrape(), loop).result(SCRAPE_TIMEOUT_S)

    async def scrape(self) -> list[Scrape]:
        """Of each model, the cluster's own first."""
        return [self._scrape(served) for served in self.catalog.all]

    def _scrape(self, served: Served) -> Scrape:
        router, codec = served.router, served.codec
        front: dict[str, tuple[float, str]] = {
            "router_ready": (router.is_ready, "1 if each phase has a worker."),
            "tokenizing_bytes": (codec.waiting_bytes if codec else 0, "Of texts that wait to be tokenised."),
        }
        if served is self.catalog.first:  # what is the process's, and of no model
            front |= {
                "calls": (self._calls.running, "Calls that run, health not counted."),
                "health_watches": (self._health.num_watches, "Streams that watch the health."),
                "unread_bytes": (self._shared.unread.total_bytes, "Of tokens that clients have not read."),
                "router_tasks": (self._shared.loop_clock.num_tasks, "Tasks of the router's event loop."),
                "router_loop_lag_seconds": (
                    self._shared.loop_clock.lag_s,
                    "By how much the router's event loop was late, the worst of a second.",
                ),
            }
        return Scrape(
            model=served.name,
            status=status_of(router),
            histograms=router.metrics.histograms,
            codes=dict(router.metrics.codes),
            front=front,
        )

    def _num_busy(self) -> int:
        return self._calls.running + self.catalog.num_live

    def _on_readiness(self) -> None:
        if self._generation is not None and not self._generation.is_draining:
            self._health.set(is_serving=self.catalog.is_ready)
            if self.catalog.is_whole:
                self.serving.set()

    def _make_router(self, model: str) -> Router:
        """`model`: of the spec's `served`."""
        options = self.options
        return Router(
            options.name,
            options.router,
            cluster_id=options.cluster_id,
            secret=options.secret,
            tls=options.worker_tls,
            record=options.record if not model else "",
            shared=self._shared,
            keeps=options.front.explained_requests,
            on_end=partial(self._trace, model) if self._tracing is not None else None,
            on_readiness=self._on_readiness,
        )

    def _trace(self, model: str, record: Record) -> None:
        if self._tracing is not None:
            self._tracing.on_end(record, model or self.catalog.first.name)

    async def _load_codec(self, model: str) -> TextCodec:
        """Raises TokenizerError."""
        return await asyncio.to_thread(load_codec, model, max_waiting_bytes=self.options.front.max_tokenizing_bytes)


def _serve(server: grpc.aio.Server, services: dict[str, dict[str, grpc.RpcMethodHandler]]) -> None:
    """gRPC lets calls of a registered method wait in a line of their own: what an operator or a probe asks does not
    wait behind a flood of requests. Each line may hold MAX_UNHEARD calls."""
    for service, handlers in services.items():
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    for service, method in OWN_LINES:
        server.add_registered_method_handlers(service, {method: services[service][method]})
