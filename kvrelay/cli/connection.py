"""What the commands that talk to a router share: where it listens, how it lets us in, and how its refusals are told."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from kvrelay import known_clusters
from kvrelay.cli.console import ENDPOINT_VARIABLE, FAILURE, INTERRUPTED, USAGE
from kvrelay.client.access import TLS_VARIABLES, Access, token_in
from kvrelay.client.client import DEFAULT_ENDPOINT, AsyncClient, Client
from kvrelay.client.streams import Stream
from kvrelay.client.types import Delta, KvrelayError
from worker.wire.tls import TlsFiles
from worker.wire.tokens import TokenError

_EXIT_CODES = {"INVALID_ARGUMENT": USAGE, "NOT_FOUND": USAGE, "DEADLINE_EXCEEDED": 124}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrance:
    """How a router lets us in. There is no flag for a token itself: everybody on a host sees command lines."""

    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            help="A file with the token, 0600. Default: KVRELAY_TOKEN, KVRELAY_TOKENS_FILE, or the token of the "
            "cluster that was started from here.",
        ),
    ] = None
    tls: Annotated[bool, typer.Option("--tls", help="TLS, with a certificate of a public authority.")] = False
    tls_ca: Annotated[
        str, typer.Option("--tls-ca", envvar=TLS_VARIABLES["ca"], help="TLS, with a certificate of these authorities.")
    ] = ""
    tls_cert: Annotated[
        str,
        typer.Option("--tls-cert", envvar=TLS_VARIABLES["cert"], help="Our own certificate, for mTLS."),
    ] = ""
    tls_key: Annotated[str, typer.Option("--tls-key", envvar=TLS_VARIABLES["key"], help="Its key.")] = ""

    def access(self) -> Access:
        """Raises KvrelayError for a file that holds no token."""
        files = TlsFiles(ca=self.tls_ca, cert=self.tls_cert, key=self.tls_key)
        tls = files if files != TlsFiles() else self.tls or None
        try:
            return Access(token=token_in(self.token_file) if self.token_file else None, tls=tls)
        except TokenError as error:
            raise KvrelayError("INVALID_ARGUMENT", str(error)) from None

    def client_of(self, endpoint: str) -> Client:
        access = self.access()
        return Client(endpoint, token=access.token, tls=access.tls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Router(Entrance):
    endpoint: Annotated[
        str, typer.Option("--endpoint", envvar=ENDPOINT_VARIABLE, help="Where a router listens, host:port.")
    ] = DEFAULT_ENDPOINT

    def client(self) -> Client:
        return self.client_of(self.endpoint)

    def endpoints(self) -> list[str]:
        """It, and the other routers of its cluster that are known here."""
        known = known_clusters.at(self.endpoint)
        others = known.endpoints if known else ()
        return [self.endpoint, *(each for each in others if each != known_clusters.noted(self.endpoint))]

    def async_client(self) -> AsyncClient:
        access = self.access()
        return AsyncClient(self.endpoint, token=access.token, tls=access.tls)


@contextmanager
def refusals(
    as_json: bool, *, wrong: tuple[type[Exception], ...] = (), interrupted: str | None = None
) -> Iterator[None]:
    """What the router refuses ends the command, told; so does what `wrong` says was asked for in vain, and, with a
    sentence for it, Ctrl-C."""
    try:
        yield
    except wrong as error:
        raise typer.Exit(_told(KvrelayError("INVALID_ARGUMENT", str(error)), as_json)) from None
    except KvrelayError as error:
        raise typer.Exit(_told(error, as_json)) from None
    except KeyboardInterrupt:
        if interrupted is None:
            raise
        _told(KvrelayError("CANCELLED", interrupted), as_json)
        raise typer.Exit(INTERRUPTED) from None


def until_interrupted(stream: Stream) -> Iterator[Delta]:
    """The deltas of `stream`. Ctrl-C while the next is waited for cancels the request, and is raised once it has ended:
    in the midst of a Condition.wait, where gRPC waits, it could leave the lock released, a RuntimeError at its `with`.
    """
    interrupted = False

    def cancel(_: int, __: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        stream.close()

    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it is ignored, or others hear it
    while True:
        if raises:
            signal.signal(signal.SIGINT, cancel)
        try:
            delta = next(stream, None)
        except KvrelayError:
            if not interrupted:
                raise
        finally:
            if raises:
                signal.signal(signal.SIGINT, signal.default_int_handler)
        if interrupted:
            raise KeyboardInterrupt
        if delta is None:
            return
        yield delta


def _several() -> str:
    """Which clusters run here, where there are several and none is the one that is meant without --endpoint."""
    running = [cluster for cluster in known_clusters.alive() if cluster.endpoints]
    if len(running) < 2:
        return ""
    named = " and ".join(f"{cluster.name} at {cluster.endpoints[0]}" for cluster in running)
    return f"{len(running)} clusters run here, {named}; say by --endpoint which one is meant"


def _told(error: KvrelayError, as_json: bool) -> int:
    """To a person (stderr) and, with --json, a program (stdout); returns the exit code."""
    wait = "" if error.retry_after_s is None else f" (retry after {error.retry_after_s:g} s)"
    if error.message.startswith(f"nothing answers at {DEFAULT_ENDPOINT}") and (running := _several()):
        error = KvrelayError(error.code, running)
    print(f"error: {error.message}{wait}", file=sys.stderr)
    if as_json:
        print(json.dumps({"error": error.to_dict()}))
    return _EXIT_CODES.get(error.code, FAILURE)
