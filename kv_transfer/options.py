"""TransferOptions says what a pair of workers keeps to while it hands KV over. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.knobs import check, knob


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOptions:
    transports: tuple[str, ...] = knob(
        ("cuda_ipc", "shared_memory", "tcp", "process_group"),
        "the first that both workers can use is used: `cuda_ipc` between GPUs of one host, `shared_memory` on one "
        "host's CPU, `tcp` between CPUs of any hosts (in TLS if the cluster has it), `process_group` anywhere (gloo; "
        "NCCL between GPUs; always in plain)",
    )
    encrypt: bool = knob(
        True, "with TLS between workers, KV goes encrypted from host to host (`tcp`) or not at all; no TLS: in plain"
    )
    checksums: bool = knob(True, "of every segment, made by the sender and verified by the receiver")
    layers_per_group: int = knob(
        0, "that leave together; 0: about a megabyte for the prompt, at most eight groups", unit="layers", ge=0
    )
    lease_ttl_s: float = knob(
        30.0, "without progress, after which a lease ends and its pages come back", unit="s", gt=0, le=86_400
    )
    fence_timeout_s: float = knob(
        10.0,
        "that a prefill worker on this host may take to stop writing into pages whose lease is over; then its process "
        "is killed, or the pages are quarantined",
        unit="s",
        gt=0,
        le=86_400,
    )
    queued_reservation_s: float = knob(
        30.0,
        "that a prompt's KV waits at its prefill worker for pages of a decode worker; then the request is given back "
        "to its router",
        unit="s",
        gt=0,
        le=86_400,
    )
    connect_timeout_s: float = knob(
        3.0, "that a decode worker may take to answer a prefill worker that connects", unit="s", gt=0, le=86_400
    )
    peer_silent_s: float = knob(
        5.0,
        "that a pair of workers lives without a sign of the other one, be it the answer to a ping",
        unit="s",
        ge=1,
        le=86_400,
    )
    timeout_s: float = knob(5.0, "that a transport waits for a peer that moves nothing", unit="s", gt=0, le=86_400)
    max_resends: int = knob(
        2, "a segment with a bad checksum is sent again before the handoff fails", unit="times", ge=0
    )
    nccl: Mapping[str, str] = knob(
        {},
        "settings of NCCL in every worker, such as `{NCCL_SOCKET_IFNAME: eth0}`: keys that begin with `NCCL_` or "
        "`TORCH_NCCL_`",
    )

    def __post_init__(self) -> None:
        check(self)
