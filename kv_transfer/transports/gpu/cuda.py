"""CudaGpu is the GPU that the transports ask for (device.py): torch for streams and events, Triton for the kernels
(page_kernels.py), the driver's own calls for memory handles (driver.py). Nothing here is imported by a CPU worker.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch

from engine.gpu import driver
from engine.pages.memory import KvMemory
from engine.pages.page_table import Int64s, PartTable, part_at
from kv_transfer.base import TransferError
from kv_transfer.transports.gpu.device import CopyQueue, Gpu

cuda: Any = torch.cuda  # half typed

PRIORITY = -1  # a copy does not stand behind the engine's next kernels
COMPUTE_TIMEOUT_S = 60.0  # for layers that were launched: beyond it the GPU hangs
POLL_S = 20e-6
LONGEST_POLL_S = 200e-6


@cache
def gpu_of(device: str) -> Gpu:
    """The GPU of that name, such as cuda:0. Raises TransferError for what is no GPU."""
    if not device.startswith("cuda"):
        raise TransferError(f"cuda_ipc moves GPU memory only, and this worker's KV is on {device}")
    return CudaGpu(device)


class CudaQueue:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        address = driver.make_stream(device.index, PRIORITY)
        self._stream: Any = cuda.ExternalStream(address, device)
        weakref.finalize(self, driver.end_stream, device.index, address).atexit = False  # CUDA ends it with the process
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


@contextmanager
def _of_transport() -> Iterator[None]:
    try:
        yield
    except driver.CudaError as error:
        raise TransferError(f"{error}; use another transport") from error


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
        """Compile the kernels now, not in the first handoff: for words and bytes, for whole pages and cut ones."""
        with queue.current():
            scratch = torch.zeros(256, dtype=torch.uint8, device=self._device)
        first_row, address = np.zeros(1, np.int64), scratch.data_ptr()
        for run_bytes in (32, 30):
            source, target = (part_at(at, run_bytes, run_bytes) for at in (address, address + 128))
            for part in (source, part_at(address, run_bytes // 2, run_bytes)):
                queue.copy(part, target, first_row, first_row)
                queue.digest(part, first_row)
        self._is_warm = True

    def export(self, memory: KvMemory) -> tuple[bytes, int]:
        with _of_transport():
            handle, base = driver.export(self._device.index, memory.address)
        return handle, memory.address - base

    @property
    def free_bytes(self) -> int:
        free, _ = cuda.mem_get_info(self._device)
        return int(free)

    def open(self, handle: bytes) -> int:
        with _of_transport():
            return driver.open_handle(self._device.index, handle)

    def close(self, address: int) -> None:
        with _of_transport():
            driver.close_handle(self._device.index, address)

    def new_event(self) -> tuple[object, bytes]:
        with cuda.device(self._device):
            event = cuda.Event(interprocess=True)
            event.record(cuda.current_stream(self._device))  # makes it
            return event, bytes(event.ipc_handle())

    def open_event(self, handle: bytes) -> object:
        with cuda.device(self._device):
            return cuda.Event.from_ipc_handle(self._device, handle)
