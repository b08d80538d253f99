"""What keeps strangers out of a cluster that `kvrelay up` starts: its secrets are drawn, or read, and all of it is
checked before anything is started.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

from cluster.front.options import FrontOptions
from cluster.router.tracing.asked import asked_exporters
from cluster.router.tracing.errors import TracingError
from kvrelay.cli.console import USAGE, CliError
from kvrelay.known_clusters import ClusterState
from worker.wire.secrets import SECRET_VARIABLE, TOKEN_VARIABLE, VARIABLES, Secrets
from worker.wire.tls import TlsError, is_loopback
from worker.wire.tokens import DEFAULT_NAME, OPERATORS, TokenError, checked_token, read_tokens

if TYPE_CHECKING:
    from cluster.spec.model import ClusterSpec

TELEMETRY = "OTEL_"  # how OpenTelemetry's variables begin
NUM_BYTES = 32


def draw(spec: ClusterSpec, *, must_be_here: bool) -> Secrets:
    """The cluster's secrets. Raises CliError for tokens, a secret or certificates
    that cannot be used; those on other nodes (not `must_be_here`) are for these to tell."""
    try:
        if must_be_here:
            check_files(spec)
        telemetry = {name: value for name, value in os.environ.items() if name.startswith(TELEMETRY)}
        return Secrets(cluster=_given_or_drawn(SECRET_VARIABLE), clients=_clients(spec), telemetry=telemetry)
    except (TokenError, TlsError, TracingError) as error:
        raise CliError(str(error), USAGE) from None


def why_overheard(spec: ClusterSpec, *, is_joined: bool) -> str:
    """What of a cluster others on its network could read; empty if nothing crosses it in plain text."""
    host = spec.router.host
    is_near = not is_joined if host == "auto" else is_loopback(host)
    if not is_near and spec.router.tls is None:
        return "clients' tokens, prompts and answers cross the network in plain text; give router.tls"
    if is_joined and spec.tls is None:
        return "the cluster's secret and KV cross between nodes in plain text; give tls, or keep their network private"
    return ""


def keep_from_children() -> None:
    """Ray, and all that it starts, would have them in their environments."""
    for variable in VARIABLES:
        os.environ.pop(variable, None)


def noted(spec: ClusterSpec, drawn: Secrets, state: ClusterState) -> ClusterState:
    """The state with what a client of this user needs to come in."""
    tls = spec.router.tls
    return replace(
        state,
        model=spec.model,
        token=drawn.clients.partition(":")[2],
        tokens_file=spec.router.tokens_file or "",
        tls=tls is not None,
        tls_ca=tls.ca if tls else "",
    )


def check_files(spec: ClusterSpec) -> None:
    """Raises TokenError, TlsError, TracingError."""
    asked_exporters(spec.router.options(FrontOptions).otlp_traces_endpoint)
    if spec.router.tokens_file:
        _check_operator(spec, read_tokens(spec.router.tokens_file)[0].name)
    if spec.router.tls:
        spec.router.tls.files.server_context()
    if spec.tls:
        spec.tls.files.server_context()
        spec.tls.files.client_context()


def _check_operator(spec: ClusterSpec, first: str) -> None:
    """`first`: whose token is the one that `kvrelay up` shows itself. Raises TokenError."""
    if spec.replan != "off" and first not in OPERATORS:
        raise TokenError(
            f"replan is {spec.replan}, which takes an operator, and the first token of router.tokens_file "
            f"{spec.router.tokens_file!r} is that of {first!r}; put one named `operator` first"
        )


def _clients(spec: ClusterSpec) -> str:
    """One token, where none are in a file."""
    if not spec.router.auth or spec.router.tokens_file:
        return ""
    return f"{DEFAULT_NAME}:{_given_or_drawn(TOKEN_VARIABLE)}"


def _given_or_drawn(variable: str) -> str:
    given = os.environ.get(variable)
    return checked_token(given, variable) if given else secrets.token_urlsafe(NUM_BYTES)
