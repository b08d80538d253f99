"""Which attention backends there are, and which one `auto` means here."""

from __future__ import annotations

import logging

import torch

from engine.attention.base import AttentionBackend
from engine.native import NativeUnavailable

logger = logging.getLogger(__name__)

NAMES = ("auto", "torch", "native")


def make_backend(name: str, dtype: torch.dtype) -> AttentionBackend:
    """The backend called `name` for pages of `dtype`; `auto` is `native` where that can be built.

    Raises ValueError for an unknown name, NativeUnavailable when `native` was asked for and cannot be had.
    """
    if name not in NAMES:
        raise ValueError(f"attention is {name!r}; give one of {', '.join(NAMES)}")
    if name == "torch":
        return _torch()
    try:
        return _native(dtype)
    except NativeUnavailable as reason:
        if name == "native":
            raise
        logger.warning("attention runs on the slower torch backend: %s", reason)
        return _torch()


def _torch() -> AttentionBackend:
    from engine.attention.torch_backend import TorchBackend

    return TorchBackend()


def _native(dtype: torch.dtype) -> AttentionBackend:
    from engine.attention.cpu_backend import DTYPE_CODE, NativeBackend

    if dtype not in DTYPE_CODE:
        raise NativeUnavailable(f"the native backend has no kernels for {dtype}")
    return NativeBackend()
