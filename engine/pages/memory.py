"""KvMemory owns the bytes of a worker's KV pages and shows them as tensors, layer by layer.

On CPU the bytes are an anonymous shared file (memfd): another process of the same user can map it through
/proc/PID/fd, and it vanishes with its last user, so a killed worker leaves nothing in /dev/shm.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch

from engine.pages.host_memory import HostFile
from engine.pages.layout import KvLayout, LayerState
from engine.pages.page_table import Places
from engine.pages.rows import Bytes, PageRows
from engine.pages.share import WHOLE, Share
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareBytes:
    """A share of the pages, as this process reaches it: a file on CPUs, an address on GPUs."""

    share: Share
    num_bytes: int
    fd: int | None = None
    address: int = 0
    handle: bytes = b""  # of another process's on a GPU: a third one opens it by that, too
    offset: int = 0  # in what the handle opens
    close: Callable[[], None] | None = None  # of another process's


class KvMemory:
    """One share of the pages described by `layout`, zeroed, which by default is all of them; and how those of other
    processes of this worker are reached. `fd` and `map` are None when the bytes are not on the CPU.

    With `fd`, a file that another process made for the same share: its bytes as they are, seen by both. Without, it is
    a HostFile: raises ValueError when there is not so much memory.
    """

    def __init__(
        self,
        layout: KvLayout,
        device: str = "cpu",
        fd: int | None = None,
        *,
        share: Share = WHOLE,
        others: Sequence[ShareBytes] = (),
    ) -> None:
        self.layout = layout
        self.device = device
        self.share = share
        self.others = tuple(others)
        self.fd: int | None = None
        self._file: HostFile | None = None
        own = share.of(layout)
        if device == "cpu":
            if fd is None:
                self._file = HostFile(own.total_bytes)
                fd = self._file.fd
            self.fd = fd
            self.bytes = torch.frombuffer(mmap.mmap(fd, own.total_bytes), dtype=torch.uint8)
        else:
            self.bytes = torch.zeros(own.total_bytes, dtype=torch.uint8, device=device)
        layers = share.layers_of(layout)
        views = {layer: self._views(own, number) for number, layer in enumerate(layers)}
        self._k = {layer: k for layer, (k, _) in views.items()}
        self._v = {layer: v for layer, (_, v) in views.items()}

    @property
    def shares(self) -> tuple[ShareBytes, ...]:
        """This process's, then the others': together all of the pages."""
        num_bytes = len(self.bytes)
        return ShareBytes(share=self.share, num_bytes=num_bytes, address=self.address, fd=self.fd), *self.others

    @cached_property
    def rows(self) -> PageRows:
        """Whole pages, whoever has their heads. CPU only."""
        return PageRows(self.layout, [(self.share, self.bytes.numpy()), *map(_mapped, self.others)])

    @cached_property
    def places(self) -> Places:
        """The same as addresses, on any device."""
        return Places(self.layout, [(each.share, each.address) for each in self.shares])

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

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """From the first page of each pair to the second, in all layers of this share. On a GPU it is queued."""
        pairs = uploaded(copies, self.bytes.device)
        sources, targets = pairs.unbind(1)
        for pages in (*self._k.values(), *self._v.values()):
            rows = pages.view(torch.uint8)  # whatever a page holds
            rows.index_copy_(0, targets, rows[sources])

    def poison(self) -> None:
        """Fill this share with what is a NaN in any dtype that pages, scales and states have."""
        self.bytes.fill_(0xFF)

    def close(self) -> None:
        """Close the files; the bytes live as long as a tensor shows them."""
        if self._file is not None:
            self._file.close()
        elif self.fd is not None:
            os.close(self.fd)
        self._file = self.fd = None
        others, self.others = self.others, ()
        for other in others:
            if other.close is not None:
                other.close()

    def _views(self, own: KvLayout, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of a layer's K and of its V, by its number among those that are here."""
        starts = own.k_offset(number), own.v_offset(number)
        sizes = own.k_page_bytes(number), own.v_page_bytes(number)
        k, v = (
            self.bytes[start : start + size * own.num_pages].view(own.num_pages, size)
            for start, size in zip(starts, sizes, strict=True)
        )
        shape = own.layers[number]
        if isinstance(shape, LayerState):
            return k, v
        dtype, page = TORCH_DTYPE[own.dtype], (own.page_size, shape.kv_heads)
        k_width, v_width = shape.widths(own.dtype)
        return k.view(dtype).unflatten(1, (*page, k_width)), v.view(dtype).unflatten(1, (*page, v_width))


def _mapped(other: ShareBytes) -> tuple[Share, Bytes]:
    assert other.fd is not None, "only files can be mapped"
    return other.share, np.frombuffer(mmap.mmap(other.fd, other.num_bytes), np.uint8)
