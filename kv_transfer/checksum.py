"""The checksum of a segment: XXH3-64 over its bytes in KvLayout's order.

Both sides get the same digest for the same KV though their pages stand, and their spans are cut, differently. It finds
bytes that were lost, mixed up or damaged on the way; it is no defence against somebody who forges them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import xxhash

from engine.pages.memory import KvMemory
from engine.pages.page_table import check_pages
from engine.pages.rows import Rows, Seen
from kv_transfer.transports.gpu.device import Gpu


class RunningDigest:
    """The digest of bytes that are shown block by block, while a transport has them in the cache."""

    def __init__(self) -> None:
        self._hasher = xxhash.xxh3_64()

    def see(self, block: Rows) -> None:
        self._hasher.update(memoryview(block))  # type: ignore[arg-type]  # numpy: no Buffer before Python 3.12

    @property
    def value(self) -> int:
        return int(self._hasher.intdigest())


class SegmentChecksummer(Protocol):
    """What a worker verifies segments by."""

    def digest(self, layers: range, pages: Sequence[int], after: object | None = None) -> int: ...


def device_checksummer(memory: KvMemory) -> SegmentChecksummer | None:
    """Digests where the pages are, for a GPU's; None for the CPU's, whose bytes a transport shows as it copies."""
    if not memory.is_on_gpu:
        return None
    from kv_transfer.transports.gpu.cuda import gpu_of

    return DeviceChecksummer(memory, gpu_of(memory.device))


class Checksummer:
    """Digests pages of one worker's memory. On a GPU the bytes come to the host for it: slow, and meant for tests."""

    def __init__(self, memory: KvMemory) -> None:
        self._memory = memory
        self._rows = memory.rows if memory.device == "cpu" else None

    def digest(self, layers: range, pages: Sequence[int], after: object | None = None) -> int:
        running = RunningDigest()
        self.show(layers, pages, running.see)
        return running.value

    def show(self, layers: range, pages: Sequence[int], seen: Seen) -> None:
        """Show `seen` the pages' bytes in KvLayout's order."""
        blocks = self._rows.blocks(layers, pages) if self._rows else self._device_blocks(layers, pages)
        for block in blocks:
            seen(block)

    def _device_blocks(self, layers: range, pages: Sequence[int]) -> list[Rows]:
        assert not self._memory.others, "what other ranks have on GPUs is digested there"
        index = torch.tensor(pages, device=self._memory.bytes.device)
        parts = [part for layer in layers for part in (self._memory.k(layer), self._memory.v(layer))]
        return [part.view(torch.uint8).index_select(0, index).cpu().numpy() for part in parts]


class DeviceChecksummer:
    """Digests pages of a GPU worker's memory where they are; only the 8 bytes of the digest come to the host.

    Both sides of a pair must use it: its digests are not those of Checksummer.
    """

    def __init__(self, memory: KvMemory, gpu: Gpu) -> None:
        self._memory = memory
        self._queue = gpu.queue()

    def digest(self, layers: range, pages: Sequence[int], after: object | None = None) -> int:
        memory = self._memory
        self._queue.wait_for(after)
        return self._queue.digest(memory.places.to_read(layers), check_pages(pages, memory.layout.num_pages))
