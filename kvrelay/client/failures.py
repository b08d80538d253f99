"""What gRPC raises, told as KvrelayError: one code, one sentence, and how long to wait where the server says so."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, NoReturn

import grpc

from kvrelay.client.types import KvrelayError

# How grpc-core words a connection that could not be made, or broke; a server's own UNAVAILABLE never begins so.
_UNREACHED = ("failed to connect", "connections to all backends failing")
_UNRESOLVED = ("errors resolving", "dns resolution failed")
_NOBODY = "nothing answers at {}; is `kvrelay up` running there?"
_NAMELESS = "the host of {} has no address that is known here; is its name right?"
_REACHED = {  # somebody is there, but speaks otherwise
    "wrong_version_number": "{} speaks plain text, not TLS; leave TLS out, or give the router tls",
    "certificate has expired": "the certificate at {} has expired, or the clock here is ahead; have it renewed",
    "certificate is not yet valid": "the certificate at {} is not valid yet, or the clock here is behind; set it right",
    "certificate_verify_failed": "the certificate at {} is of no authority that is trusted here; give --tls-ca, or "
    "KVRELAY_TLS_CA",
    "hostname verification": "the certificate at {} is another name's; call the router by the name in its certificate",
    "http1.x server": "{} speaks HTTP, not gRPC; give the router's port, not its http_port",
    "socket closed": "{} hung up at once: it wants TLS (--tls, --tls-ca), a certificate of this client (--tls-cert) "
    "that its client_ca has signed and whose dates its clock is within, or has as many connections as it takes "
    "(max_connections)",
}
_PROXY = "received http2 header with status: "  # an answer that is none of gRPC's
_BROKEN = (
    "stream removed",
    "socket closed",
    "recvmsg:",
    "connection reset",
    "broken pipe",
    "ping timeout",
    "keepalive watchdog",
)


def raise_kvrelay(error: grpc.RpcError, endpoint: str) -> NoReturn:
    raise kvrelay_error(error.code(), error.details(), error.trailing_metadata(), endpoint) from None


def cancelled_error(error: asyncio.CancelledError, endpoint: str) -> BaseException:
    """gRPC raises it for a call that was closed with its client, too: nobody has cancelled the task that waits then."""
    task = asyncio.current_task()
    if task is None or task.cancelling():
        return error
    return KvrelayError("CANCELLED", f"the call to {endpoint} was closed here")


def kvrelay_error(
    code: grpc.StatusCode, details: str | None, trailers: Iterable[Any] | None, endpoint: str
) -> KvrelayError:
    message = details or code.name.lower().replace("_", " ")
    lowered = message.lower()
    if lowered.startswith(_PROXY):
        status = message[len(_PROXY) :]
        message = f"{endpoint} is a proxy that answers with HTTP {status}; does it reach the router by gRPC?"
        if status == "413":
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
            message = f"the request is larger than the proxy at {endpoint} takes; raise its limit"
    elif code is grpc.StatusCode.UNAVAILABLE:
        if lowered.startswith(_UNREACHED):
            message = next((say for sign, say in _REACHED.items() if sign in lowered), _NOBODY).format(endpoint)
        elif lowered.startswith(_UNRESOLVED):
            message = _NAMELESS.format(endpoint)
        elif lowered.startswith(_BROKEN):
            message = f"the connection to {endpoint} was lost"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and "deadline exceeded" in message.lower():
        message = "the deadline passed before the answer was complete"
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in message:
        message = f"the request is larger than {endpoint} takes: {message.rpartition(': ')[2]}"
    return KvrelayError(code.name, message, _retry_after_s(trailers))


def _retry_after_s(trailers: Iterable[Any] | None) -> float | None:
    for key, value in trailers or ():
        if key == "retry-after-ms":
            try:
                return float(value) / 1000.0
            except ValueError:
                return None
    return None
