"""KvMemory owns the bytes of a worker's KV pages and shows them as tensors, layer by layer.

On CPU the bytes are an anonymous shared file (memfd): another process of the same user can map it through
/proc/PID/fd, and it vanishes with its last user, so a killed worker leaves nothing in /dev/shm.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from engine.pages.host_memory import allocate
from engine.pages.layout import KvLayout, LayerKv, LayerState
from engine.upload_guard import uploaded

TORCH_DTYPE = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int8": torch.int8,
}


class LayerPages(Protocol):
    """Pages to read and write, layer by layer."""

    def k(self, layer: int) -> torch.Tensor:
        """Keys of one layer: [num_pages, page_size, kv_heads, k_dim]."""

    def v(self, layer: int) -> torch.Tensor:
        """Values of one layer: [num_pages, page_size, kv_heads, v_dim]."""


class KvMemory:
    """The pages described by `layout`, zeroed. `fd` and `map` are None when the bytes are not on the CPU.

    With `fd`, a file that another process made for the same layout: its bytes as they are, seen by both. Without, all
    of its memory is taken at once: raises ValueError when there is not so much.
    """

    def __init__(self, layout: KvLayout, device: str = "cpu", fd: int | None = None) -> None:
        self.layout = layout
        self.device = device
        self.fd: int | None = None
        self.map: mmap.mmap | None = None
        if device == "cpu":
            self.fd = allocate(layout.total_bytes) if fd is None else fd
            self.map = mmap.mmap(self.fd, layout.total_bytes)
            self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)
        else:
            self.bytes = torch.zeros(layout.total_bytes, dtype=torch.uint8, device=device)
        views = [self._views(layer, shape) for layer, shape in enumerate(layout.layers)]
        self._k, self._v = [k for k, _ in views], [v for _, v in views]

    def k(self, layer: int) -> torch.Tensor:
        """Keys of one layer: [num_pages, page_size, kv_heads, k_dim]; of one with a state, bytes [num_pages, n]."""
        return self._k[layer]

    def v(self, layer: int) -> torch.Tensor:
        """Values of one layer: [num_pages, page_size, kv_heads, v_dim]; of one with a state, bytes [num_pages, n]."""
        return self._v[layer]

    @property
    def address(self) -> int:
        """Address of the first byte in this process."""
        return self.bytes.data_ptr()

    @property
    def is_on_gpu(self) -> bool:
        return self.device != "cpu"

    def mark(self) -> object | None:
        """What must happen before pages that were written so far may be read: an event of a GPU's current stream.

        None on CPU, where what was written is there. Called in the engine's thread, for KV that it has just launched.
        """
        if not self.is_on_gpu:
            return None
        cuda: Any = torch.cuda  # half typed
        event: object = cuda.current_stream(self.bytes.device).record_event()
        return event

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Bytes of a span, without a copy. CPU only."""
        assert self.map is not None, "only CPU memory can be viewed as bytes"
        return memoryview(self.map)[offset : offset + nbytes]

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """From the first page of each pair to the second, in all layers. On a GPU it is queued."""
        pairs = uploaded(copies, self.bytes.device)
        sources, targets = pairs.unbind(1)
        for pages in (*self._k, *self._v):
            rows = pages.view(torch.uint8)  # whatever a page holds
            rows.index_copy_(0, targets, rows[sources])

    def close(self) -> None:
        """Close the file; the bytes live as long as a tensor shows them."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def _views(self, layer: int, shape: LayerKv | LayerState) -> tuple[torch.Tensor, torch.Tensor]:
        """Of its K and of its V."""
        layout = self.layout
        starts = layout.k_offset(layer), layout.v_offset(layer)
        sizes = layout.k_page_bytes(layer), layout.v_page_bytes(layer)
        k, v = (
            self.bytes[start : start + size * layout.num_pages].view(layout.num_pages, size)
            for start, size in zip(starts, sizes, strict=True)
        )
        if isinstance(shape, LayerState):
            return k, v
        dtype, page = TORCH_DTYPE[layout.dtype], (layout.page_size, shape.kv_heads)
        k_width, v_width = shape.widths(layout.dtype)
        return k.view(dtype).unflatten(1, (*page, k_width)), v.view(dtype).unflatten(1, (*page, v_width))
