"""Who may call a router: clients with a token of the cluster's, or everyone where no tokens are asked for.

Health is open, for load balancers and probes. Everything else (Generate, Cluster, reflection, and over HTTP /metrics)
wants `authorization: Bearer TOKEN`.
"""

from __future__ import annotations

from collections.abc import Callable

from grpc_health.v1 import health

from worker.wire.door import Door, Metadata, single
from worker.wire.tokens import Keyring

HEADER = "authorization"
REFUSAL = "the token is missing or wrong; send `authorization: Bearer TOKEN`, or set KVRELAY_TOKEN for kvrelay's client"
SCHEME = b"bearer"


def client_door(keyring: Keyring, on_refused: Callable[[], None] = lambda: None) -> Door:
    return Door(_caller_of(keyring), REFUSAL, open_services=(health.SERVICE_NAME,), on_refused=on_refused)


def _caller_of(keyring: Keyring) -> Callable[[Metadata], str | None]:
    return lambda metadata: owner_of(single(metadata, HEADER), keyring)


def owner_of(authorization: bytes, keyring: Keyring) -> str | None:
    """The name of the token in such a header; None where there is no token that is known."""
    scheme, _, token = authorization.partition(b" ")
    return keyring.name_of(token.strip()) if scheme.lower() == SCHEME else None
