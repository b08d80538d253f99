"""How kvrelay's processes call each other over gRPC: channel and server options, and the cluster's secret.

Every call between processes of a cluster carries the secret in its metadata; a call without it is refused with
UNAUTHENTICATED (worker/wire/door.py). What clients show instead is the front's (cluster/front/authentication.py).
"""

from __future__ import annotations

import hmac
import os
import socket
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from kv_transfer.handshake import PROTOCOL_VERSION as PROTOCOL_VERSION
from kv_transfer.prefill_side.stream import ControlStream, Dial
from kvrelay.v1 import worker_pb2_grpc
from worker.wire.completions import told_together
from worker.wire.credentials import channel_credentials, server_credentials
from worker.wire.door import Door, Metadata, single
from worker.wire.tls import TlsFiles

SECRET_KEY = "kvrelay-secret"
MAX_MESSAGE_BYTES = 128 * 1024 * 1024

# A stopped peer is noticed by our own heartbeat first; the ping timeout bounds what TCP would hide. gRPC pings beside
# data, too, and knows of no sleep: a machine that stands still for so long would lose every connection at once.
PING_TIMEOUT_MS = 10_000
CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # in spite of its name: how long one attempt to connect may take
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]
SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
    ("grpc.server_handshake_timeout_ms", 10_000),  # whoever connects and says nothing
]


def open_channel(
    address: str, tls: TlsFiles | None = None, *, options: Sequence[tuple[str, Any]] = ()
) -> grpc.aio.Channel:
    """In plain text without `tls`. Reads its files anew. `options` win over those that all have. Raises TlsError."""
    options = list((dict(channel_options(tls)) | dict(options)).items())
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, channel_credentials(tls), options=options)


def channel_options(tls: TlsFiles | None) -> list[tuple[str, Any]]:
    named = tls is not None and tls.server_name
    return [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", named)] if named else [*CHANNEL_OPTIONS]


def secret_metadata(secret: str) -> tuple[tuple[str, str], ...]:
    return ((SECRET_KEY, secret),) if secret else ()


def keepalive_options(silent_s: float) -> list[tuple[str, int]]:
    """A connection breaks when nothing, not even the answer to a ping, came over it for so long."""
    half_ms = int(silent_s * 500)
    return [
        ("grpc.keepalive_time_ms", half_ms),
        ("grpc.keepalive_timeout_ms", half_ms),
        ("grpc.http2.ping_timeout_ms", half_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def handoff_dial(secret: str, tls: TlsFiles | None = None, *, silent_s: float) -> Dial:
    """Opens the stream of a pair to a decode worker, with the secret in it."""

    def dial(address: str) -> ControlStream:
        channel = open_channel(address, tls, options=keepalive_options(silent_s))
        stub: Any = worker_pb2_grpc.HandoffStub  # grpc generates no types
        return ControlStream(channel, stub(channel).Connect(metadata=secret_metadata(secret)))

    return dial


def make_server(
    door: Door | None = None,
    *,
    behind: Sequence[grpc.aio.ServerInterceptor] = (),
    options: Sequence[tuple[str, Any]] = (),
) -> grpc.aio.Server:
    """Without a door everybody may call it. `behind`: interceptors for whom it lets in; `options` win over those that
    all servers have."""
    interceptors = [*([door] if door else []), *behind]
    with told_together():
        return grpc.aio.server(interceptors=interceptors, options=list((dict(SERVER_OPTIONS) | dict(options)).items()))


def secret_door(secret: str) -> Door | None:
    """Every call must carry the secret; with none (workers of a test, in one process) there is no door."""
    expected = secret.encode()

    def caller_of(metadata: Metadata) -> str | None:
        return "" if hmac.compare_digest(single(metadata, SECRET_KEY), expected) else None

    return Door(caller_of, "the cluster's secret is missing or wrong") if secret else None


def written(host: str, port: int) -> str:
    """As one is dialled: an address of IPv6 stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind(server: grpc.aio.Server, host: str, port: int, tls: TlsFiles | None = None) -> int:
    """Listen on host:port (0: any), in plain text without `tls`. Raises OSError with one sentence when the port is
    taken, TlsError."""
    where = written(host, port)
    try:
        bound = server.add_secure_port(where, server_credentials(tls)) if tls else server.add_insecure_port(where)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {where}: {_why_not(host, port)}") from error
    if bound == 0:
        raise OSError(f"cannot listen on {where}: {_why_not(host, port)}")
    return int(bound)


def _why_not(host: str, port: int) -> str:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, port))
    except OSError as error:
        return f"{os.strerror(error.errno or 0).lower()}; give another port, or 0 for any free one"
    return "gRPC could not bind it"
