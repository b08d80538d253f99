"""WorkerOptions says what one worker is: its name, where it listens, and the limits its policy keeps.

The cluster's spec (cluster/spec/model.py) is what a person writes; it is turned into these, one for each worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from kv_transfer.options import TransferOptions

Role = Literal["prefill", "decode"]
LIMITS: dict[Role, tuple[str, ...]] = {  # what each role's policy goes by, and whoever predicts it must know
    "prefill": (
        *("max_batch_tokens", "max_prefill_requests", "short_prompt_tokens", "pack_tokens", "short_share"),
        *("prefix_cache", "tensor_parallel"),
    ),
    "decode": ("max_batch_size", "admission", "watermark", "prefix_cache", "tensor_parallel"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    name: str
    role: Role
    host: str = "127.0.0.1"  # the address that others reach it at, and that it binds
    port: int = 0  # 0: any free one
    secret: str = ""
    incarnation: str = ""  # empty: drawn at start

    # prefill
    max_batch_tokens: int = 512  # computed in one step at most
    max_prefill_requests: int = 64  # in one step at most
    short_prompt_tokens: int = 256  # a prompt with no more left to compute may pass a long one
    pack_tokens: int = 128  # no more prompts join a step with so many: a CPU's products run at full speed by then
    short_share: float = 0.5  # of a step's tokens that short prompts may take while a long one stands before them

    # decode
    max_batch_size: int = 64  # requests that run at once
    admission: Literal["watermark", "worst_case"] = "watermark"
    watermark: float = 0.02  # share of the pages that admission leaves free for running requests to grow

    # handoff
    transports: tuple[str, ...] = ("cuda_ipc", "shared_memory", "process_group")  # the preferred first
    checksums: bool = True
    layers_per_group: int = 0  # 0: chosen so that a segment is about a megabyte, at most 8 groups
    lease_ttl_s: float = 30.0  # without progress
    transfer_timeout_s: float = 5.0
    max_resends: int = 2
    nccl: Mapping[str, str] = field(default_factory=dict)  # NCCL_* and TORCH_NCCL_* of this process's environment

    prefix_cache: bool = True
    tensor_parallel: int = 1  # as its engine has it: for those who look at the worker or predict it
    report_interval_s: float = 0.2
    record: str = ""  # a folder to write every call of the policy into, for placement/checks/replay.py; empty: none is

    @property
    def transfer(self) -> TransferOptions:
        return TransferOptions(
            transports=self.transports,
            checksums=self.checksums,
            layers_per_group=self.layers_per_group,
            transfer_timeout_s=self.transfer_timeout_s,
            max_resends=self.max_resends,
        )

    @property
    def limits(self) -> dict[str, str]:
        """Those of LIMITS, as text."""
        return {name: str(getattr(self, name)) for name in LIMITS[self.role]}
