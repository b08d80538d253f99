"""Whether somebody lives at a port who speaks HTTP/2, as gRPC's servers do."""

from __future__ import annotations

import socket

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5)  # and settings, none of them


def knock(host: str, port: int, timeout_s: float) -> None:
    """The kernel takes connections for a process that hangs, too: who lives says something to a client of HTTP/2, or
    hangs up on it, be it that TLS is wanted. Raises OSError."""
    with socket.create_connection((host.strip("[]"), port), timeout_s) as knocking:
        knocking.sendall(PREFACE)
        knocking.recv(1)
