"""FrontOptions is what one client or all of them may take of a router: bytes, streams, connections, time. Values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cluster.front.allowance.options import Account
from engine.knobs import check, knob

MIB = 1024 * 1024
BY_GRPC = "gRPC takes it when a router starts"


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontOptions:
    max_message_bytes: int = knob(
        4 * MIB,
        "of one request; a larger one is refused before it is read",
        unit="bytes",
        ge=1024,
        le=128 * MIB,
        fixed=BY_GRPC,
    )
    max_tokenizing_bytes: int = knob(
        16 * MIB, "of texts that wait to be tokenised; more are refused with RESOURCE_EXHAUSTED", unit="bytes", ge=1024
    )
    max_unread_bytes: int = knob(
        64 * MIB,
        "of tokens kept for one request whose client does not read them, or of an answer in one message; then it ends "
        "with RESOURCE_EXHAUSTED",
        unit="bytes",
        ge=65_536,
    )
    max_unread_total_bytes: int = knob(
        256 * MIB, "of all requests; then the one with most of them ends", unit="bytes", ge=65_536
    )
    max_stall_s: float = knob(
        30.0,
        "that a client may take nothing of what is sent to it, or its own message to arrive; then its request ends",
        unit="s",
        gt=0,
        le=86_400,
        fixed="connections are made with it",
    )
    max_request_s: float = knob(
        3600.0, "that a request may live; then it ends with DEADLINE_EXCEEDED", unit="s", gt=0, le=604_800
    )
    max_queue_s: float = knob(
        300.0,
        "that a new request waits in the router for a worker; then it ends with RESOURCE_EXHAUSTED",
        unit="s",
        gt=0,
        le=604_800,
    )
    max_calls: int = knob(
        4096,
        "at once, health apart, a request counting for each of its `n` choices: more are refused with "
        "RESOURCE_EXHAUSTED. The clients of one token's name may hold seven times what is free: 7/8 when alone",
        unit="calls",
        ge=1,
    )
    accounts: Mapping[str, Account] = knob(
        {},
        "what the tokens of a name may take, `{NAME: {requests_per_minute: 60}}`; `default`: of each name that is not "
        "there. See *Account keys*",
    )
    adapters: Mapping[str, str] = knob(
        {},
        "LoRA adapters that requests may name, `{NAME: DIRECTORY}` as PEFT saves them, on the hosts of routers and "
        "workers; `kvrelay adapter add` changes them, too. See *Adapters*",
    )
    max_watches: int = knob(1000, "of health; more are refused with RESOURCE_EXHAUSTED", unit="streams", ge=1)
    max_connections: int = knob(
        4096,
        "that clients hold, of gRPC and of HTTP each, and half of `ulimit -n` at most; more are closed at once",
        unit="connections",
        ge=1,
        fixed=BY_GRPC,
    )
    max_streams: int = knob(
        1024,
        "at once in one connection; a client's library lets more wait",
        unit="streams",
        ge=1,
        le=2**31 - 1,
        fixed=BY_GRPC,
    )
    max_idle_s: float = knob(
        900.0,
        "that a connection without a call stays open; a client opens it anew",
        unit="s",
        ge=1,
        le=86_400,
        fixed=BY_GRPC,
    )
    keepalive_s: float = knob(
        10.0,
        "between pings to a client; one that does not answer within 5 s is gone",
        unit="s",
        ge=1,
        le=86_400,
        fixed=BY_GRPC,
    )

    bundle_share: float = knob(
        1.0,
        "of a request's TPOT target, or of 50 ms without one: for so long a busy router keeps its tokens after a "
        "message, to send them in one. At rest it keeps none, never the first or what comes with the last; 0: never",
        unit="share of the target",
        ge=0,
    )
    http_allowed_origins: tuple[str, ...] = knob(
        (),
        "whose pages a browser lets call the HTTP API (`https://chat.example.org`), token and all; `*`: any",
        fixed="routers listen by it from their start",
    )
    explained_requests: int = knob(
        1000,
        "that have ended, of which a router can say where their time went (`kvrelay explain`), and as many slow ones; "
        "0: of none",
        unit="requests",
        ge=0,
        le=100_000,
    )
    otlp_traces_endpoint: str = knob(
        "",
        "where traces of requests go by OTLP, such as `http://localhost:4317`; empty: as OpenTelemetry's own variables "
        "say, or nowhere; see [monitoring.md](monitoring.md#traces)",
        fixed="the exporter is made with it",
    )
    log_requests: Literal["off", "text", "json"] = knob(
        "off", "a line in the log for the end of each request, as text or as JSON; off: none"
    )

    def __post_init__(self) -> None:
        check(self)
