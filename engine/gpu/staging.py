"""Staging carries a step's small arrays to the device: packed into one pinned buffer, one copy, no wait.

Two host buffers take turns, each behind an UploadGuard, so that the next step's arrays are filled in while the last
one's copy is still queued. `Uploader` makes new device tensors each time; `StaticUploader` writes into places that
stay, which is what a CUDA graph reads. Off CUDA both copy at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.base import StepMeta
from engine.attention.tables import ON_DEVICE as TABLE_NAMES
from engine.attention.tables import PageTables, page_tables
from engine.upload_guard import UploadGuard, pinned

Arrays = Mapping[str, npt.NDArray[np.generic]]
ALIGN = 16  # bytes; of each array's start
LEAST_BYTES = 1 << 16
ON_DEVICE = ("token_ids", "positions", "block_tables", "slots")  # of a step's metadata


class _HostBuffers:
    """Two byte buffers by turns; `next` is free to write once it is entered."""

    def __init__(self, device: torch.device) -> None:
        self._pin = device.type == "cuda"
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]
        self._guards = [UploadGuard(device) for _ in range(2)]
        self._turn = 0

    def next(self, nbytes: int) -> tuple[UploadGuard, int]:
        self._turn ^= 1
        if self._buffers[self._turn].numel() < nbytes:
            with self._guards[self._turn]:  # what was queued from the old buffer has left it
                size = max(LEAST_BYTES, 2 * nbytes)
                self._buffers[self._turn] = torch.empty(size, dtype=torch.uint8, pin_memory=self._pin)
        return self._guards[self._turn], self._turn

    def bytes(self, turn: int) -> torch.Tensor:
        return self._buffers[turn]


class Uploader:
    """Arrays to new tensors on the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._host = _HostBuffers(device)

    def __call__(self, arrays: Arrays) -> dict[str, torch.Tensor]:
        starts, total = _offsets({name: array.nbytes for name, array in arrays.items()})
        guard, turn = self._host.next(total)
        with guard:
            host = self._host.bytes(turn)
            _fill(host, arrays, starts)
            device = torch.empty(total, dtype=torch.uint8, device=self.device)
            device.copy_(host[:total], non_blocking=True)
        return {
            name: _view(device, starts[name], array.dtype, array.size).view(array.shape)
            for name, array in arrays.items()
        }


class StaticUploader:
    """Arrays into fixed places: `capacity` gives each name's dtype and most elements. All names come each time.

    Of the last, only as much is copied as comes: the longest that varies most belongs there.
    """

    def __init__(self, device: torch.device, capacity: Mapping[str, tuple[npt.DTypeLike, int]]) -> None:
        sizes = {name: np.dtype(dtype).itemsize * count for name, (dtype, count) in capacity.items()}
        self._starts, total = _offsets(sizes)
        self._capacity = sizes
        self._last = list(capacity)[-1]
        self._host = _HostBuffers(device)
        self._bytes = torch.zeros(total, dtype=torch.uint8, device=device)
        self.device = {
            name: _view(self._bytes, self._starts[name], np.dtype(dtype), count)
            for name, (dtype, count) in capacity.items()
        }

    def __call__(self, arrays: Arrays) -> None:
        for name, array in arrays.items():
            assert array.nbytes <= self._capacity[name], f"{name} has {array.size} elements, more than its place holds"
        total = self._starts[self._last] + arrays[self._last].nbytes
        guard, turn = self._host.next(total)
        with guard:
            host = self._host.bytes(turn)
            _fill(host, arrays, self._starts)
            self._bytes[:total].copy_(host[:total], non_blocking=True)


def _offsets(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    starts: dict[str, int] = {}
    at = 0
    for name, nbytes in sizes.items():
        starts[name] = at
        at += -(-nbytes // ALIGN) * ALIGN
    return starts, max(at, ALIGN)


def _fill(host: torch.Tensor, arrays: Arrays, starts: Mapping[str, int]) -> None:
    into = host.numpy()
    for name, array in arrays.items():
        start = starts[name]
        into[start : start + array.nbytes].view(array.dtype)[:] = array.reshape(-1)


def _view(device: torch.Tensor, start: int, dtype: npt.DTypeLike, count: int) -> torch.Tensor:
    kind = torch.from_numpy(np.zeros(0, dtype)).dtype
    return device[start : start + count * kind.itemsize].view(kind)


def on_device(
    meta: StepMeta, device: torch.device, upload: Uploader | None = None, *, with_tables: bool = True
) -> StepMeta:
    """The step's metadata with what kernels read on the device; `with_tables` adds FlashInfer's form of the pages."""
    return stage(meta, {}, upload or Uploader(device), with_tables=with_tables)[0]


def stage(
    meta: StepMeta, beside: Arrays, upload: Uploader, *, with_tables: bool
) -> tuple[StepMeta, dict[str, torch.Tensor]]:
    """The same, and other arrays `beside` it, all in one copy."""
    names = ON_DEVICE if meta.rope_lengths is None else (*ON_DEVICE, "rope_lengths")
    arrays: dict[str, npt.NDArray[np.generic]] = {f"meta {name}": getattr(meta, name).numpy() for name in names}
    tables = None
    if with_tables:
        on_host = (meta.query_starts.numpy(), meta.starts.numpy(), meta.block_tables.numpy())
        tables = page_tables(*on_host, meta.page_size)
        arrays |= {f"table {name}": getattr(tables, name).numpy() for name in TABLE_NAMES}
    placed = upload(arrays | dict(beside))
    if tables is not None:
        tables = replace(tables, device={name: placed[f"table {name}"] for name in TABLE_NAMES})
        if upload.device.type == "cuda":  # plans copy these once more
            tables = _pinned(tables)
    on_gpu: dict[str, Any] = {name: placed[f"meta {name}"] for name in names}
    meta = replace(meta, tables=tables, **on_gpu)
    return meta, {name: placed[name] for name in beside}


def _pinned(tables: PageTables) -> PageTables:
    """With the tables that plans read in memory from which they may be copied without a wait."""
    read: dict[str, Any] = {name: pinned(getattr(tables, name)) for name in ("qo_indptr", "kv_indptr", "last_page_len")}
    return replace(tables, **read)
