"""The CUDA driver's calls for memory of another process (libcuda, by ctypes), so that handles are plain bytes, and for
streams that nobody shares.

Each is made in the device's primary context, which torch uses too. What fails is a CudaError.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: it does not wait for the default stream


class CudaError(RuntimeError):
    """One sentence: what CUDA cannot do, and why."""


class _MemHandle(ctypes.Structure):
    """CUipcMemHandle: 64 bytes, passed by value."""

    _fields_ = [("data", ctypes.c_ubyte * 64)]

    @classmethod
    def of(cls, handle: bytes) -> _MemHandle:
        if len(handle) != 64:
            raise CudaError(f"a CUDA memory handle has 64 bytes, and this one {len(handle)}")
        return cls.from_buffer_copy(handle)


def export(device: int, address: int) -> tuple[bytes, int]:
    """A handle of the allocation that holds `address`, and where the allocation begins."""
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _MemHandle()
    with _context(device) as cuda:
        code = cuda.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        _check(code, "find KV memory")
        _check(
            cuda.cuIpcGetMemHandle(ctypes.byref(handle), base),
            "share KV memory with another process (take expandable_segments out of PYTORCH_ALLOC_CONF)",
        )
    return bytes(handle.data), base.value


def open_handle(device: int, handle: bytes) -> int:
    """Address, here, of another process's allocation."""
    address = ctypes.c_uint64()
    with _context(device) as cuda:
        code = cuda.cuIpcOpenMemHandle_v2(ctypes.byref(address), _MemHandle.of(handle), LAZY_PEER_ACCESS)
        _check(code, "open another process's KV memory")
    return address.value


def close_handle(device: int, address: int) -> None:
    with _context(device) as cuda:
        _check(cuda.cuIpcCloseMemHandle(ctypes.c_uint64(address)), "close another process's KV memory")


def make_stream(device: int, priority: int) -> int:
    """Its address. torch's own streams are 32 of each priority, which all who ask for one share."""
    stream = ctypes.c_void_p()
    with _context(device) as cuda:
        _check(cuda.cuStreamCreateWithPriority(ctypes.byref(stream), NON_BLOCKING, priority), "make a stream")
    assert stream.value is not None, "a stream without an address"
    return stream.value


def end_stream(device: int, stream: int) -> None:
    """What it was given ends as it would have."""
    with _context(device) as cuda:
        _check(cuda.cuStreamDestroy_v2(ctypes.c_void_p(stream)), "end a stream")


@cache
def load() -> Any:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(f"the CUDA driver cannot be loaded: {error}") from error
    cuda.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, _MemHandle, ctypes.c_uint]
    return cuda


@contextmanager
def _context(device: int) -> Iterator[Any]:
    """The driver, with the device's primary context current in this thread."""
    cuda, number, context = load(), ctypes.c_int(), ctypes.c_void_p()
    _check(cuda.cuDeviceGet(ctypes.byref(number), device), "find the GPU")
    _check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), number), "use the GPU")
    try:
        _check(cuda.cuCtxPushCurrent_v2(context), "use the GPU")
        yield cuda
    finally:
        cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        cuda.cuDevicePrimaryCtxRelease_v2(number)


def _check(code: int, what: str) -> None:
    if code == 0:
        return
    text = ctypes.c_char_p()
    load().cuGetErrorString(code, ctypes.byref(text))
    reason = (text.value or b"unknown error").decode()
    raise CudaError(f"CUDA cannot {what}: {reason} ({code})")
