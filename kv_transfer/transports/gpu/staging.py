"""GpuStaging holds contiguous buffers on a GPU for process_group, and fills and empties them from the pages."""

from __future__ import annotations

from typing import Any

import torch

from engine.pages.memory import KvMemory
from engine.pages.page_table import Int64s, buffer_at, check_pages
from engine.pages.rows import Seen
from kv_transfer.base import Segment, TransferError
from kv_transfer.checksum import Checksummer
from kv_transfer.transports.gpu.device import Gpu

BUFFER_BYTES = 64 << 20


class GpuStaging:
    """Contiguous buffers on the GPU, reused in turn, and the kernels between them and the pages."""

    def __init__(self, memory: KvMemory, gpu: Gpu, timeout_s: float) -> None:
        self.queue = gpu.queue()
        self._memory = memory
        self._timeout_s = timeout_s
        self._buffers: list[torch.Tensor] = []

    def take(self, nbytes: int) -> torch.Tensor:
        buffer = self._buffers.pop() if self._buffers else None
        if buffer is None or buffer.untyped_storage().nbytes() < nbytes:
            with self.queue.current():
                capacity = max(nbytes, min(BUFFER_BYTES, self._memory.layout.total_bytes))
                buffer = torch.empty(capacity, dtype=torch.uint8, device=self._memory.bytes.device)
        return torch.empty(0, dtype=torch.uint8, device=buffer.device).set_(buffer.untyped_storage())[:nbytes]

    def give(self, buffer: torch.Tensor) -> None:
        self._buffers.append(buffer)

    def gather(self, segment: Segment, out: torch.Tensor, seen: Seen | None) -> None:
        """Launches it; `settle` waits for it."""
        layout, layers, pages = self._memory.layout, segment.layers, segment.src_pages
        self.queue.wait_for(segment.after)
        index = _existing(pages, layout.num_pages)
        self.queue.copy(
            self._memory.places.to_read(layers),
            buffer_at(layout, out.data_ptr(), layers, len(pages)),
            index,
            check_pages(range(len(pages)), len(pages)),
        )
        if seen is not None:
            self.settle()
            Checksummer(self._memory).show(layers, pages, seen)

    def settle(self) -> None:
        """The source pages are not read any more."""
        self.queue.finish(self._timeout_s)

    def scatter(self, segment: Segment, data: torch.Tensor) -> None:
        layout, layers, pages = self._memory.layout, segment.layers, segment.dst_pages
        index = _existing(pages, layout.num_pages)
        self.queue.wait_for(None)
        self.queue.copy(
            buffer_at(layout, data.data_ptr(), layers, len(pages)),
            self._memory.places.to_write(layers),
            check_pages(range(len(pages)), len(pages)),
            index,
        )
        self.queue.finish(self._timeout_s)


def _existing(pages: Any, num_pages: int) -> Int64s:
    try:
        return check_pages(pages, num_pages)
    except ValueError as error:
        raise TransferError(f"pages cannot be moved: {error}") from error
