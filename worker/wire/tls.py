"""TlsFiles names the certificate, key and authorities by which one side of a connection is known and knows the other.

Values, and what Python's own ssl makes of them; worker/wire/rpc.py makes gRPC's credentials. Files are read when a
connection is opened, or a listener made: a renewed certificate needs no restart. Nothing here opens a socket.
"""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Callable
from dataclasses import dataclass

from worker.wire.private_files import PrivateFileError, read_private

MEMBER_NAME = "kvrelay"  # the DNS name in the certificate of every process of a cluster: they move from host to host


class TlsError(ValueError):
    """Certificates that cannot be used: one sentence that names the file and the mend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Paths, PEM. A side that listens needs cert and key; with `ca` it also asks its peers for a certificate of one of
    these authorities. A side that dials checks its peer by `ca` (empty: those that the system trusts), and shows cert
    and key if it has them. `server_name`: the name that a dialled peer's certificate must have (empty: its address)."""

    cert: str = ""
    key: str = ""
    ca: str = ""
    server_name: str = ""

    def server_context(self) -> ssl.SSLContext:
        """Of a socket that listens. Raises TlsError."""
        if not self.cert:
            raise TlsError("tls.cert is missing; a side that listens needs a certificate and its key")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._load(context)
        context.verify_mode = ssl.CERT_REQUIRED if self.ca else ssl.CERT_NONE
        self._check_believed(context)
        return context

    def client_context(self) -> ssl.SSLContext:
        """Of a socket that dials: wrap it with server_hostname=files.server_name or the address. Raises TlsError."""
        if self.cert:
            self.server_context()  # what it shows must be believed, too
        return self._client_context()

    def _client_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._load(context)
        if not self.ca:
            context.load_default_certs(ssl.Purpose.SERVER_AUTH)
        return context

    def _check_believed(self, listener: ssl.SSLContext) -> None:
        """By a member, which has these files, too; where clients call only the dates are known. Raises TlsError."""
        to_dialler, to_listener = ssl.MemoryBIO(), ssl.MemoryBIO()
        dials = self._dialler().wrap_bio(to_dialler, to_listener, server_hostname=self.server_name or None)
        listens = listener.wrap_bio(to_listener, to_dialler, server_side=True)
        for side in (dials, listens, dials):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError as error:
                why = getattr(error, "verify_message", "") or _why(error)
                raise TlsError(f"nobody would believe the certificate {self.cert!r}: {why}; give another") from None

    def _dialler(self) -> ssl.SSLContext:
        if self.server_name:
            return self._client_context()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        _loaded(f"certificate {self.cert!r}", context.load_verify_locations, self.cert)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.cert or self.key:
            _check_private(self.key)
            pair = f"certificate {self.cert!r} with the key {self.key!r}"
            _loaded(pair, context.load_cert_chain, self.cert, self.key, "")  # no password: nobody is asked for one
        if self.ca:
            _loaded(f"authorities {self.ca!r}", context.load_verify_locations, self.ca)


def _check_private(key: str) -> None:
    try:
        read_private(key, "the key")
    except PrivateFileError as error:
        raise TlsError(str(error)) from None


def is_loopback(host: str) -> bool:
    """Whether nobody outside this host can reach, or overhear, who listens there."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def why_open(host: str, *, auth: bool, tls: TlsFiles | None) -> str:
    """Why a router there would let strangers in; empty where clients show tokens or certificates, or are of this
    host."""
    if auth or is_loopback(host) or (tls is not None and tls.ca):
        return ""
    return (
        f"auth is false and host is {host}, where anybody on the network could call; "
        "keep auth, or give tls.client_ca, or host 127.0.0.1"
    )


def _loaded(what: str, load: Callable[..., object], *arguments: str) -> None:
    try:
        load(*arguments)
    except (OSError, ValueError) as error:
        raise TlsError(f"the {what} cannot be used: {_why(error)}; give PEM files that belong together") from None


def _why(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error)).lower()
