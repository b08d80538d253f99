"""gRPC's own credentials, made from TlsFiles (tls.py): of a channel, and of a server that follows its files."""

from __future__ import annotations

from pathlib import Path

import grpc

from worker.wire.followed import Followed
from worker.wire.tls import TlsFiles


def channel_credentials(tls: TlsFiles) -> grpc.ChannelCredentials:
    """Without `ca`: gRPC's own list of public authorities. Raises TlsError."""
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
    paths = [path for path in (tls.cert, tls.key, tls.ca) if path]
    return Followed(paths, lambda: _server_configuration(tls), f"the certificate {tls.cert} and its files")


def _server_configuration(tls: TlsFiles) -> grpc.ServerCertificateConfiguration:
    tls.server_context()
    return grpc.ssl_server_certificate_configuration([(_read(tls.key), _read(tls.cert))], _read(tls.ca))


def _read(path: str) -> bytes | None:
    return Path(path).read_bytes() if path else None
