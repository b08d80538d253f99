"""Which attention backends there are, and which one `auto` means here."""

from __future__ import annotations

import logging

import torch

from engine.attention.base import AttentionBackend
from engine.device import why_no_flashinfer
from engine.kernels.build import NativeUnavailable
from engine.kernels.native import DTYPE_CODE
from engine.pages import int8_rows

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")

NAMES = ("auto", "torch", "native", "flashinfer")


def make_backend(name: str, dtype: torch.dtype, device: torch.device = CPU) -> AttentionBackend:
    """The backend called `name` for pages of `dtype` on `device`; `auto` is the fastest that can be had there.

    Raises ValueError for a name that is unknown or not the device's, NativeUnavailable when `native` was asked for and
    cannot be had. FlashInfer's kernels are not chosen yet: see flashinfer/choice.py.
    """
    if name not in NAMES:
        raise ValueError(f"attention is {name!r}; give one of {', '.join(NAMES)}")
    if name == "torch":
        return _torch()
    if device.type == "cuda":
        return _on_gpu(name, device)
    if name == "flashinfer":
        raise ValueError(f"attention is 'flashinfer', but {why_no_flashinfer(device)}; give auto, torch or native")
    try:
        return _native(dtype)
    except NativeUnavailable as reason:
        if name == "native":
            raise
        logger.warning("attention runs on the slower torch backend: %s", reason)
        return _torch()


def _on_gpu(name: str, device: torch.device) -> AttentionBackend:
    if name == "native":
        raise ValueError(f"attention is 'native', whose kernels run on CPUs, and the device is {device}; give auto")
    missing = why_no_flashinfer(device)
    if missing and name == "flashinfer":
        raise ValueError(f"attention is 'flashinfer', but {missing}")
    if missing:
        logger.warning("attention runs on the torch backend, many times slower: %s", missing)
        return _torch()
    from engine.attention.flashinfer.backend import FlashInferBackend
    from engine.attention.flashinfer.wrappers import FlashInfer

    return FlashInferBackend(FlashInfer.on(device))


def _torch() -> AttentionBackend:
    from engine.attention.torch_backend import TorchBackend

    return TorchBackend()


def _native(dtype: torch.dtype) -> AttentionBackend:
    from engine.attention.native_backend import NativeBackend

    if dtype not in (*DTYPE_CODE, int8_rows.DTYPE):
        raise NativeUnavailable(f"the native backend has no kernels for {dtype}")
    return NativeBackend()
