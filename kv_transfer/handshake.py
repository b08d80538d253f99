"""The handshake that opens a pair: what the prefill side says of itself, and whether the decode side may work with it.

Which transport carries the bytes is chosen by the two sides themselves (prefill_side/connect.py, decode_side).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from engine.pages.layout import KvLayout
from kvrelay.v1 import worker_pb2

PROTOCOL_VERSION = 3


@cache
def host_id() -> str:
    """Names this host and boot: two processes with the same one may share memory (if they see each other's /proc)."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = os.readlink("/proc/self/ns/pid") if os.path.exists("/proc/self/ns/pid") else ""
    return f"{boot.read_text().strip() if boot.exists() else socket.gethostname()}/{namespace}"


def make_hello(
    me: worker_pb2.WorkerAddress, model_fingerprint: str, layout: KvLayout, transports: Sequence[str]
) -> worker_pb2.HandoffHello:
    """`transports`: those that this side can use, the preferred first."""
    return worker_pb2.HandoffHello(
        worker=me,
        protocol_version=PROTOCOL_VERSION,
        model_fingerprint=model_fingerprint,
        layout=layout.signature,
        tensor_parallel=1,
        pipeline_parallel=1,
        transports=transports,
        pid=os.getpid(),
        host_id=host_id(),
    )


def mismatch(
    hello: worker_pb2.HandoffHello, me: worker_pb2.WorkerAddress, model_fingerprint: str, layout: KvLayout
) -> str:
    """Why the two workers do not fit together, with both values; empty if they do."""
    ours_theirs = {
        "protocol version": (PROTOCOL_VERSION, hello.protocol_version),
        "model fingerprint": (model_fingerprint, hello.model_fingerprint),
        "KV layout": (layout.signature, hello.layout),
        "tensor-parallel degree": (1, hello.tensor_parallel),
        "pipeline-parallel degree": (1, hello.pipeline_parallel),
    }
    for what, (ours, theirs) in ours_theirs.items():
        if ours != theirs:
            return f"{what} of {me.name} is {ours}, but of {hello.worker.name} {theirs}; they must be the same"
    return ""
