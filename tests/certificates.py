"""Certificates for tests, made by trustme: authorities, members and clients, as files."""

from __future__ import annotations

from pathlib import Path

import trustme

from worker.wire.tls import MEMBER_NAME, TlsFiles


def write_tls(
    folder: Path, authority: trustme.CA, *names: str, ca: trustme.CA | None = None, stem: str = "member"
) -> TlsFiles:
    """A certificate of `authority` for the names (none: a member's, for members), which trusts `ca` (none: the same
    authority)."""
    leaf = authority.issue_cert(*(names or (MEMBER_NAME,)))
    files = TlsFiles(
        cert=str(folder / f"{stem}.pem"),
        key=str(folder / f"{stem}.key"),
        ca=str(folder / f"{stem}-ca.pem"),
        server_name="" if names else MEMBER_NAME,
    )
    Path(files.cert).write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
    Path(files.key).write_bytes(leaf.private_key_pem.bytes())
    Path(files.key).chmod(0o600)
    Path(files.ca).write_bytes((ca or authority).cert_pem.bytes())
    return files
