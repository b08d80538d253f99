"""Which GPUs the transfer tests may use, and why not for NCCL."""

from __future__ import annotations

import os

import torch

from kv_transfer.transports.gpu.nccl_settings import loaded_version, why_not_on_one_gpu
from tests.kv_transfer.sides import DEVICE

SECOND_GPU = "cuda:1" if DEVICE != "cpu" and torch.cuda.device_count() > 1 else ""


def why_no_nccl() -> str:
    """Why two NCCL ranks cannot meet in this process; empty when they can."""
    if DEVICE == "cpu":
        return "NCCL moves GPU memory only"
    if SECOND_GPU:
        return ""
    return why_not_on_one_gpu(loaded_version(), {k: v for k, v in os.environ.items() if k.startswith("NCCL_")})
