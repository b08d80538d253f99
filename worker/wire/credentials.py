"""What TlsFiles (tls.py) are made into for connections: gRPC's own credentials, and contexts for sockets of our own.
All of it follows the files, and stays with what was good while they are not.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar

import grpc

from worker.wire.followed import Followed
from worker.wire.tls import TlsFiles

T = TypeVar("T")


class FollowedTls:
    """Contexts of files as they are now, or were when they could last be used: kv_transfer.base.Tls."""

    def __init__(self, tls: TlsFiles) -> None:
        """Raises TlsError."""
        self.server_name = tls.server_name
        self._server = _followed_to_listen(tls, tls.server_context)
        self._client = _followed_to_call(tls, tls.client_context)

    def server_context(self) -> ssl.SSLContext:
        self._server.renew()
        return self._server.value

    def client_context(self) -> ssl.SSLContext:
        self._client.renew()
        return self._client.value


def channel_credentials(tls: TlsFiles) -> grpc.ChannelCredentials:
    """Of the files as they are now, or were when they could last be used. Raises TlsError."""
    followed = _follow_channel_files(tls)
    followed.renew()
    return followed.value


@cache
def _follow_channel_files(tls: TlsFiles) -> Followed[grpc.ChannelCredentials]:
    return _followed_to_call(tls, lambda: _channel_credentials(tls))


def _channel_credentials(tls: TlsFiles) -> grpc.ChannelCredentials:
    """Without `ca`: gRPC's own list of public authorities."""
    tls.client_context()  # what is wrong with the files is told here; gRPC would only say that a handshake failed
    return grpc.ssl_channel_credentials(_read(tls.ca), _read(tls.key), _read(tls.cert))


def server_credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    """Follows the files: a handshake after they have changed has the new ones. Raises TlsError."""
    followed = follow_server_files(tls)
    return grpc.dynamic_ssl_server_credentials(
        followed.value, lambda: followed.value if followed.renew() else None, require_client_authentication=bool(tls.ca)
    )


def follow_server_files(tls: TlsFiles) -> Followed[grpc.ServerCertificateConfiguration]:
    """Raises TlsError."""
    return _followed_to_listen(tls, lambda: _server_configuration(tls))


def _server_configuration(tls: TlsFiles) -> grpc.ServerCertificateConfiguration:
    tls.server_context()
    return grpc.ssl_server_certificate_configuration([(_read(tls.key), _read(tls.cert))], _read(tls.ca))


def _followed_to_listen(tls: TlsFiles, make: Callable[[], T]) -> Followed[T]:
    return Followed(_paths(tls), make, f"the certificate {tls.cert} and its files")


def _followed_to_call(tls: TlsFiles, make: Callable[[], T]) -> Followed[T]:
    paths = _paths(tls)
    return Followed(paths, make, f"the files to call with, {paths},")


def _paths(tls: TlsFiles) -> list[str]:
    return [path for path in (tls.cert, tls.key, tls.ca) if path]


def _read(path: str) -> bytes | None:
    return Path(path).read_bytes() if path else None
