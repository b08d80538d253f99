"""How a client is let in: its token, and whether it speaks TLS. What is not said is found: in the environment, then in
what `kvrelay up` noted of the cluster at this endpoint.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from kvrelay import known_clusters
from worker.wire.secrets import TOKEN_VARIABLE
from worker.wire.tls import TlsFiles
from worker.wire.tokens import TokenError, checked_token, read_tokens

KEY_VARIABLE = "OPENAI_API_KEY"
TOKENS_FILE_VARIABLE = "KVRELAY_TOKENS_FILE"
TLS_VARIABLES = {"ca": "KVRELAY_TLS_CA", "cert": "KVRELAY_TLS_CERT", "key": "KVRELAY_TLS_KEY"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """None: to be found. `token` "": none is sent. `tls` False: plain text; True: public authorities."""

    token: str | None = field(default=None, repr=False)
    tls: TlsFiles | bool | None = None


FOUND = Access()


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundAccess:
    endpoint: str  # to call
    token: str = field(repr=False)  # empty: none
    tls: TlsFiles | None  # None: plain text

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()


def find_access(endpoint: str, access: Access) -> FoundAccess:
    """Raises TokenError."""
    token, tls = _from_environment(access.token), access.tls
    tls = _tls_from_environment() if tls is None else tls
    cluster = known_clusters.at(endpoint) if token is None or tls is None else None
    if cluster is not None:
        token = token_of(cluster) if token is None else token
        tls = TlsFiles(ca=cluster.tls_ca) if tls is None and cluster.tls else tls
    if not tls and cluster is not None:
        endpoint = known_clusters.noted(endpoint)
    return FoundAccess(endpoint=endpoint, token=token or "", tls=TlsFiles() if tls is True else tls or None)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAccess:
    url: str  # to call
    key: str = field(repr=False)  # empty: none
    tls_ca: str  # a file; empty: the authorities that the system trusts


def find_http_access(url: str) -> HttpAccess:
    """Of a server of OpenAI's API: the environment's key, else that of the cluster which `kvrelay up` started there."""
    cluster = known_clusters.serving(url)
    key = os.environ.get(KEY_VARIABLE) or (token_of(cluster) if cluster is not None else "") or ""
    if cluster is None:
        return HttpAccess(url=url, key=key, tls_ca="")
    return HttpAccess(url=url if cluster.tls else known_clusters.noted(url), key=key, tls_ca=cluster.tls_ca)


def token_in(path: str | Path) -> str:
    """The first of a tokens file. Raises TokenError."""
    return read_tokens(path)[0].value.decode("ascii")


def _from_environment(given: str | None) -> str | None:
    if given is not None:
        return checked_token(given, "the token") if given else ""
    if token := os.environ.get(TOKEN_VARIABLE):
        return checked_token(token, TOKEN_VARIABLE)
    path = os.environ.get(TOKENS_FILE_VARIABLE)
    return token_in(path) if path else None


def token_of(cluster: known_clusters.ClusterState) -> str | None:
    """A file that is gone, or not ours any more, gives none: the router then says what is missing."""
    try:
        return token_in(cluster.tokens_file) if cluster.tokens_file else cluster.token
    except TokenError:
        return None


def _tls_from_environment() -> TlsFiles | None:
    files = {key: os.environ.get(variable, "") for key, variable in TLS_VARIABLES.items()}
    return TlsFiles(**files) if any(files.values()) else None
