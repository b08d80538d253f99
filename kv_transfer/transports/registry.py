"""The registry finds a transport by name and imports it only then: the heavy ones cost nothing until they are used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module

from engine.pages.memory import KvMemory
from kv_transfer.base import Transport

MODULES = {
    "cuda_ipc": "kv_transfer.transports.gpu.cuda_ipc",
    "loopback": "kv_transfer.transports.loopback",
    "process_group": "kv_transfer.transports.process_group",
    "shared_memory": "kv_transfer.transports.shared_memory",
    "tcp": "kv_transfer.transports.tcp",
}
ONLY_ON = {
    "cuda_ipc": "cuda",
    "loopback": "cpu",
    "shared_memory": "cpu",
    "tcp": "cpu",
}  # what is not named here moves both


def usable(names: Sequence[str], device: str) -> list[str]:
    """Those of `names` that can move the memory of `device`, in their order."""
    kind = device.partition(":")[0]
    return [name for name in names if ONLY_ON.get(name, kind) == kind]


def nccl_counters(settings: Mapping[str, str], memory: KvMemory, host: str) -> dict[str, int]:
    """Sets up NCCL for a worker on a GPU; its version, for the worker's counters. Nothing on CPU."""
    if not memory.is_on_gpu:
        return {}
    from kv_transfer.transports.gpu.nccl_settings import set_up

    return set_up(settings, host)


def load_transport(name: str) -> Transport:
    """Raises ValueError for a name that is not known here."""
    if name not in MODULES:
        raise ValueError(f"transport is {name!r}; give one of {', '.join(sorted(MODULES))}")
    transport: Transport = import_module(MODULES[name]).TRANSPORT
    return transport
