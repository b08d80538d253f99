"""The settings of NCCL that keep a lost pair from harming others, its version, and when two ranks may share a GPU.

NCCL and torch read them from the environment of the process, once, when the first group is made.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import torch

from engine.parallel.process_group import NCCL_DEFAULTS

log = logging.getLogger(__name__)

LOOPBACK = {"NCCL_SOCKET_IFNAME": "lo"}  # left to itself, NCCL listens on any interface but this one

# For a test of correctness on a machine with one GPU, on NCCL below 2.30: each process calls itself another host and
# they talk through sockets on loopback, at milliseconds a message. Never for serving.
ONE_GPU_SWITCH = "KVRELAY_NCCL_ONE_GPU"
ONE_GPU_SETTINGS = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
}
HOST_ID, HOST_ID_PREFIX = "NCCL_HOSTID", "kvrelay-"
MULTI_RANK_VERSION = (2, 30)
MULTI_RANK_KEY = "NCCL_MULTI_RANK_GPU_ENABLE"


def settings_for(chosen: Mapping[str, str], environ: Mapping[str, str], pid: int, host: str = "") -> dict[str, str]:
    """What the environment must say before NCCL is first used: what was chosen, then what is there, then ours.
    `host`: the worker's own address."""
    ours = NCCL_DEFAULTS | (LOOPBACK if host == "127.0.0.1" else {})
    if environ.get(ONE_GPU_SWITCH) == "1":
        ours |= ONE_GPU_SETTINGS | {HOST_ID: f"{HOST_ID_PREFIX}{pid}"}
    there = {key: environ[key] for key in ours if key in environ}
    if there.get(HOST_ID, "").startswith(HOST_ID_PREFIX):  # the process that started this one took it for itself
        del there[HOST_ID]
    return ours | there | dict(chosen)


def prepare(chosen: Mapping[str, str] | None = None, host: str = "") -> None:
    """Set this process's NCCL environment. NCCL reads it once, when its first group is made."""
    os.environ.update(settings_for(chosen or {}, os.environ, os.getpid(), host))


def loaded_version() -> tuple[int, ...] | None:
    """Of the NCCL that torch loaded, such as (2, 28, 9); None for a torch without it."""
    if torch.version.cuda is None:
        return None
    try:
        cuda: Any = torch.cuda  # half typed
        return tuple(cuda.nccl.version())[:3]
    except (ImportError, RuntimeError, AttributeError):
        return None


def set_up(settings: Mapping[str, str], host: str) -> dict[str, int]:
    """What a GPU worker does before its first pair: sets NCCL's environment, tells its version (log and counter)."""
    version = loaded_version()
    if version is None:
        return {}
    prepare(settings, host)
    log.info("torch loaded NCCL %s", ".".join(map(str, version)))
    return {"nccl_version": version_code(version)}


def version_code(version: tuple[int, ...]) -> int:
    """As NCCL itself writes it: 22809 is 2.28.9."""
    major, minor, patch = (*version, 0, 0)[:3]
    return major * 10_000 + minor * 100 + patch


def why_not_on_one_gpu(version: tuple[int, ...] | None, environ: Mapping[str, str]) -> str:
    """Why two ranks cannot share one GPU here; empty when they can."""
    if environ.get(ONE_GPU_SWITCH) == "1":
        return ""
    shown = ".".join(map(str, version)) if version else "an unknown version"
    if version is None or version < MULTI_RANK_VERSION:
        return f"NCCL {shown} refuses two ranks on one GPU (from 2.30 {MULTI_RANK_KEY}=1 allows them); use cuda_ipc"
    if environ.get(MULTI_RANK_KEY) != "1":
        return (
            f"NCCL {shown} allows two ranks on one GPU only with {MULTI_RANK_KEY}: 1 in transfer.nccl; or use cuda_ipc"
        )
    return ""
