"""gRPC's own credentials, made from TlsFiles (tls.py): of a channel, and of a server that follows its files."""

from __future__ import annotations

import logging
from pathlib import Path

import grpc

from worker.wire.tls import TlsError, TlsFiles

log = logging.getLogger(__name__)


def channel_credentials(tls: TlsFiles) -> grpc.ChannelCredentials:
    """Without `ca`: gRPC's own list of public authorities. Raises TlsError."""
    tls.client_context()  # what is wrong with the files is told here; gRPC would only say that a handshake failed
    return grpc.ssl_channel_credentials(_read(tls.ca), _read(tls.key), _read(tls.cert))


def server_credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    """Follows the files: a handshake after they have changed has the new ones. Raises TlsError."""
    return grpc.dynamic_ssl_server_credentials(
        _server_configuration(tls), _RenewedFiles(tls).configuration, require_client_authentication=bool(tls.ca)
    )


def _server_configuration(tls: TlsFiles) -> grpc.ServerCertificateConfiguration:
    tls.server_context()
    return grpc.ssl_server_certificate_configuration([(_read(tls.key), _read(tls.cert))], _read(tls.ca))


def _read(path: str) -> bytes | None:
    return Path(path).read_bytes() if path else None


class _RenewedFiles:
    """gRPC asks it at each handshake. Files that do not fit together (half renewed, say) change nothing."""

    def __init__(self, tls: TlsFiles) -> None:
        self._tls = tls
        self._seen = self._stamp()  # of what was read
        self._complaint = ""  # that the log has: anybody can ask for a handshake

    def configuration(self) -> grpc.ServerCertificateConfiguration | None:
        try:
            stamp = self._stamp()
            if stamp == self._seen:
                return None
            renewed = _server_configuration(self._tls)
        except (OSError, TlsError) as error:
            if str(error) != self._complaint:
                log.warning("the certificate stays as it was: %s", error)
            self._complaint = str(error)
            return None
        self._seen, self._complaint = stamp, ""
        log.info("%s is read anew", self._tls.cert)
        return renewed

    def _stamp(self) -> list[tuple[int, int, int]]:
        stats = [Path(path).stat() for path in (self._tls.cert, self._tls.key, self._tls.ca) if path]
        return [(known.st_ino, known.st_mtime_ns, known.st_size) for known in stats]
