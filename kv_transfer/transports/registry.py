"""The registry finds a transport by name and imports it only then: the heavy ones cost nothing until they are used."""

from __future__ import annotations

from importlib import import_module

from kv_transfer.base import Transport

MODULES = {
    "loopback": "kv_transfer.transports.loopback",
    "process_group": "kv_transfer.transports.process_group",
    "shared_memory": "kv_transfer.transports.shared_memory",
}


def load_transport(name: str) -> Transport:
    """Raises ValueError for a name that is not known here."""
    if name not in MODULES:
        raise ValueError(f"transport is {name!r}; give one of {', '.join(sorted(MODULES))}")
    transport: Transport = import_module(MODULES[name]).TRANSPORT
    return transport
