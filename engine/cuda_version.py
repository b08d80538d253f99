"""Whether the GPU's driver is new enough for a torch. It imports none, and begins nothing that a fork would spoil."""

from __future__ import annotations

import ctypes


def why_too_old(torch_cuda: str) -> str:
    """Why a torch for that CUDA, such as 13.0, cannot run on this driver; empty where it can, or there is no driver."""
    newest = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(newest)) != 0:
            return ""
    except OSError:
        return ""
    major, minor = newest.value // 1000, newest.value % 1000 // 10
    if major >= int(torch_cuda.partition(".")[0]):
        return ""
    return (
        f"the GPU's driver runs CUDA {major}.{minor} and older, and the torch that is installed is for {torch_cuda}; "
        "update the driver, or install kvrelay[gpu-cu12] (CUDA 12.8)"
    )
