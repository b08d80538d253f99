"""TransferOptions are the limits that a worker keeps in its pairs, and the transports that it may use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOptions:
    transports: tuple[str, ...] = ("cuda_ipc", "shared_memory", "process_group")  # the preferred first
    checksums: bool = True
    layers_per_group: int = 0  # 0: chosen so that a segment is about a megabyte, at most 8 groups
    transfer_timeout_s: float = 5.0
    max_resends: int = 2
