"""Whether a port of this machine is free: asked by trying it. Who binds it for good is told again then."""

from __future__ import annotations

import socket


def why_taken(host: str, port: int) -> str:
    """Why nobody can listen there now; empty if one can. At port 0, any that is free, it is the host that is wrong."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does: TIME_WAIT is no obstacle
        try:
            probe.bind((host, port))
        except OSError as error:
            return (error.strerror or str(error)).lower()
    return ""
