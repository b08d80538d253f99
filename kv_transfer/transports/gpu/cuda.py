"""What the transports ask of a GPU: a stream of their own that copies pages, and memory and events of another process.

`Gpu` and `CopyQueue` are small so that a test can put a fake in their place and see every call; `CudaGpu` is the real
one: torch for streams and events, Triton for the kernels (page_kernels.py), and the CUDA driver's own calls (libcuda,
by ctypes) for memory handles, so that only plain bytes cross a wire. Nothing here is imported by a CPU worker.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch

from engine.pages.memory import KvMemory
from engine.pages.page_table import Int64s, PartTable, check_pages, pages_at
from kv_transfer.base import TransferError

cuda: Any = torch.cuda  # half typed

COMPUTE_TIMEOUT_S = 60.0  # for layers that were launched: beyond it the GPU hangs
POLL_S = 20e-6
LONGEST_POLL_S = 200e-6
LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class CopyQueue(Protocol):
    """Work in order, beside the engine's. Calls return at once but `digest` and `finish`. One thread's at a time."""

    def wait_for(self, event: object | None) -> None:
        """What follows starts after the event (None: at once)."""

    def copy(self, src: PartTable, dst: PartTable, src_pages: Int64s, dst_pages: Int64s) -> None: ...

    def digest(self, parts: PartTable, pages: Int64s) -> int:
        """64 bits of all bytes of `pages`, in the order of the parts. Waits for it. Raises TransferError."""

    def record(self, event: object) -> None:
        """The event has happened when all that stands before it is done."""

    def mark(self) -> Any:
        """An event, with a `query`, that has happened when all that stands before it is done."""

    def finish(self, timeout_s: float) -> None:
        """Wait until all is done. Raises TransferError after timeout_s, counted from the last `wait_for`'s event."""

    def current(self) -> Any:
        """A context in which torch's own operations go into this queue."""


class Gpu(Protocol):
    uuid: str

    def queue(self) -> CopyQueue: ...

    def export(self, memory: KvMemory) -> tuple[bytes, int]:
        """A handle of the allocation that holds the memory, and where in it the memory begins."""

    def open(self, handle: bytes) -> int:
        """Address, here, of another process's allocation."""

    def close(self, address: int) -> None: ...

    def new_event(self) -> tuple[object, bytes]:
        """An event that another process can wait for, and its handle."""

    def open_event(self, handle: bytes) -> object: ...


@cache
def gpu_of(device: str) -> Gpu:
    """The GPU of that name, such as cuda:0. Raises TransferError for what is no GPU."""
    if not device.startswith("cuda"):
        raise TransferError(f"cuda_ipc moves GPU memory only, and this worker's KV is on {device}")
    return CudaGpu(device)


class CudaQueue:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = cuda.Stream(device, priority=-1)  # a copy does not stand behind the engine's next kernels
        self._after: Any = None  # the last event that the stream waits for

    def wait_for(self, event: object | None) -> None:
        if event is not None:
            self._stream.wait_event(event)
        self._after = event

    def copy(self, src: PartTable, dst: PartTable, src_pages: Int64s, dst_pages: Int64s) -> None:
        if len(src_pages):
            with self.current():
                _kernels().copy_rows(src, dst, src_pages, dst_pages, str(self._device))

    def digest(self, parts: PartTable, pages: Int64s) -> int:
        with self.current():
            out = _kernels().digest_rows(parts, pages, str(self._device))
            return int(out.item()) % (1 << 64)

    def record(self, event: Any) -> None:
        event.record(self._stream)

    def mark(self) -> Any:
        event: Any = cuda.Event()
        event.record(self._stream)
        return event

    def finish(self, timeout_s: float) -> None:
        done = self.mark()
        _poll(self._after, COMPUTE_TIMEOUT_S, "the layers were not computed")
        _poll(done, timeout_s, "the GPU copied nothing")
        self._after = None

    @contextmanager
    def current(self) -> Iterator[None]:
        with cuda.device(self._device), cuda.stream(self._stream):
            yield


def _poll(event: Any, timeout_s: float, what: str) -> None:
    """A thread that sleeps between looks, the longer the longer it waits, leaves the GIL to the engine's; an event's
    own wait has no deadline."""
    began_s = time.monotonic()
    while event is not None and not event.query():
        waited_s = time.monotonic() - began_s
        if waited_s > timeout_s:
            raise TransferError(f"{what} for {timeout_s:g} s; the GPU may hang: see nvidia-smi and dmesg")
        time.sleep(min(LONGEST_POLL_S, POLL_S + waited_s / 8))


def _kernels() -> Any:
    try:
        from kv_transfer.transports.gpu import page_kernels
    except ImportError as error:
        raise TransferError(
            f"the kernels that copy pages need Triton, which torch's CUDA builds bring: {error}; install kvrelay[gpu]"
        ) from error
    return page_kernels


class CudaGpu:
    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        if self._device.index is None:
            self._device = torch.device("cuda", cuda.current_device())
        self.uuid = str(cuda.get_device_properties(self._device).uuid)
        self._is_warm = False

    def queue(self) -> CopyQueue:
        queue = CudaQueue(self._device)
        if not self._is_warm:
            self._warm_up(queue)
        return queue

    def _warm_up(self, queue: CudaQueue) -> None:
        """Compile the kernels now, not in the first handoff, for rows of whole words and for any others."""
        with queue.current():
            scratch = torch.zeros(128, dtype=torch.uint8, device=self._device)
        one, address = np.zeros(1, np.int64), np.array([scratch.data_ptr()])
        for row_bytes in (32, 31):
            source = PartTable(address, np.array([row_bytes]))
            queue.copy(source, PartTable(address + 64, source.row_bytes), one, one)
            queue.digest(source, one)
        self._is_warm = True

    def export(self, memory: KvMemory) -> tuple[bytes, int]:
        driver, base, size, handle = _driver(), ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        with self._context():
            address = ctypes.c_uint64(memory.address)
            _check(driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), address), "find KV memory")
            _check(
                driver.cuIpcGetMemHandle(ctypes.byref(handle), base),
                "share KV memory with another process (take expandable_segments out of PYTORCH_ALLOC_CONF)",
            )
        return bytes(handle.data), memory.address - base.value

    def open(self, handle: bytes) -> int:
        address = ctypes.c_uint64()
        with self._context():
            opened = _driver().cuIpcOpenMemHandle_v2(ctypes.byref(address), _Handle.of(handle), LAZY_PEER_ACCESS)
            _check(opened, "open the other worker's KV memory")
        return address.value

    def close(self, address: int) -> None:
        with self._context():
            _check(_driver().cuIpcCloseMemHandle(ctypes.c_uint64(address)), "close the other worker's KV memory")

    def new_event(self) -> tuple[object, bytes]:
        with cuda.device(self._device):
            event = cuda.Event(interprocess=True)
            event.record(cuda.current_stream(self._device))  # makes it
            return event, bytes(event.ipc_handle())

    def open_event(self, handle: bytes) -> object:
        with cuda.device(self._device):
            return cuda.Event.from_ipc_handle(self._device, handle)

    @contextmanager
    def _context(self) -> Iterator[None]:
        """The device's primary context, which torch uses too, made current in this thread."""
        driver, device, context = _driver(), ctypes.c_int(), ctypes.c_void_p()
        _check(driver.cuDeviceGet(ctypes.byref(device), self._device.index), "find the GPU")
        _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "use the GPU")
        try:
            _check(driver.cuCtxPushCurrent_v2(context), "use the GPU")
            yield
        finally:
            driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
            driver.cuDevicePrimaryCtxRelease_v2(device)


class _Handle(ctypes.Structure):
    """CUipcMemHandle: 64 bytes, passed by value."""

    _fields_ = [("data", ctypes.c_ubyte * 64)]

    @classmethod
    def of(cls, handle: bytes) -> _Handle:
        if len(handle) != 64:
            raise TransferError(f"a CUDA memory handle has 64 bytes, and this one {len(handle)}; use another transport")
        return cls.from_buffer_copy(handle)


@cache
def _driver() -> Any:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise TransferError(f"the CUDA driver cannot be loaded: {error}") from error
    driver.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, _Handle, ctypes.c_uint]
    return driver


def _check(code: int, what: str) -> None:
    if code == 0:
        return
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(code, ctypes.byref(text))
    reason = (text.value or b"unknown error").decode()
    raise TransferError(f"CUDA cannot {what}: {reason} ({code}); use another transport")


class DeviceChecksummer:
    """Digests pages of a GPU worker's memory where they are; only the 8 bytes of the digest come to the host.

    Both sides of a pair must use it: its digests are not those of checksum.Checksummer.
    """

    def __init__(self, memory: KvMemory, gpu: Gpu) -> None:
        self._memory = memory
        self._queue = gpu.queue()

    def digest(self, layers: range, pages: Sequence[int], after: object | None = None) -> int:
        memory = self._memory
        self._queue.wait_for(after)
        parts = pages_at(memory.layout, memory.address, layers)
        return self._queue.digest(parts, check_pages(pages, memory.layout.num_pages))
