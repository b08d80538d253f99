"""Loads the C++ kernels of engine/kernels/csrc, which build.py makes."""

from __future__ import annotations

import ctypes
import functools

import torch  # before the kernels are loaded: it brings a libgomp of the same name, and both share one pool of threads

from engine.kernels.build import NativeUnavailable, built

DTYPE_CODE = {torch.float32: 0, torch.bfloat16: 1}  # as the kernels know them


@functools.cache
def library() -> ctypes.CDLL:
    """The kernels. Raises NativeUnavailable. The answer is kept: nothing about a machine changes while it runs."""
    path = built()
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        mend = "remove that file, or set XDG_CACHE_HOME to a directory that is not mounted noexec"
        raise NativeUnavailable(f"the built kernels cannot be loaded: {error}; {mend}") from error
