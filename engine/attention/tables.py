"""PageTables: one step's pages in the form that FlashInfer's kernels read. Arithmetic on the host, no device call.

Sequence s owns kv_indices[kv_indptr[s] : kv_indptr[s + 1]], its pages in order, the last of which is filled up to
last_page_len[s] (1 .. page_size), this step's own rows counted in. Row t belongs to batch_indices[t] and stands at
positions[t] there. What plans read stays on the host; what kernels read goes to the device with `place`.

Shapes: S sequences, T rows, N pages of all sequences, W pages of the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

_I32 = npt.NDArray[np.int32]
ON_DEVICE = ("kv_indptr", "kv_indices", "last_page_len", "batch_indices", "positions", "kv_lens", "block_tables")


@dataclass(frozen=True)
class PageTables:
    qo_indptr: torch.Tensor  # int32 [S + 1], host
    kv_indptr: torch.Tensor  # int32 [S + 1], host
    last_page_len: torch.Tensor  # int32 [S], host
    kv_lens: torch.Tensor  # int32 [S], host
    kv_indices: torch.Tensor  # int32 [N], host; the device has its own
    batch_indices: torch.Tensor  # int32 [T]
    positions: torch.Tensor  # int32 [T]
    block_tables: torch.Tensor  # int32 [S, W]
    device: Mapping[str, torch.Tensor] | None = None  # the same, by name, where kernels run
    is_static: bool = False  # a CUDA graph's: its device buffers stay and change their content

    @property
    def num_sequences(self) -> int:
        return int(self.kv_lens.shape[0])

    @property
    def num_rows(self) -> int:
        return int(self.batch_indices.shape[0])

    @cached_property
    def is_decode(self) -> bool:
        """Whether every sequence has exactly one row."""
        return self.num_rows == self.num_sequences and bool((self.qo_indptr.diff() == 1).all())

    @cached_property
    def longest(self) -> int:
        """Keys of the longest sequence."""
        return int(self.kv_lens.max())

    def on_device(self, name: str) -> torch.Tensor:
        """The copy that kernels read."""
        assert self.device is not None, "the tables were not placed on the device"
        return self.device[name]

    def place(
        self, upload: Callable[[Mapping[str, npt.NDArray[np.generic]]], Mapping[str, torch.Tensor]]
    ) -> PageTables:
        """With device copies, made by one `upload` of all arrays."""
        return replace(self, device=upload({name: getattr(self, name).numpy() for name in ON_DEVICE}))


def page_tables(query_starts: _I32, starts: _I32, block_tables: _I32, page_size: int) -> PageTables:
    """From the rows' starts [S + 1], each sequence's first position [S] and its pages [S, W]."""
    lengths = np.diff(query_starts)
    kv_lens = (starts + lengths).astype(np.int32)
    pages = -(-kv_lens // page_size)
    kv_indptr = np.zeros(len(starts) + 1, dtype=np.int32)
    np.cumsum(pages, out=kv_indptr[1:])
    width = int(pages.max(initial=1))
    used = np.arange(width)[None, :] < pages[:, None]
    owner = np.repeat(np.arange(len(starts), dtype=np.int32), lengths)
    first_position = np.repeat(starts - query_starts[:-1], lengths)
    return PageTables(
        qo_indptr=torch.from_numpy(query_starts.astype(np.int32)),
        kv_indptr=torch.from_numpy(kv_indptr),
        last_page_len=torch.from_numpy((kv_lens - (pages - 1) * page_size).astype(np.int32)),
        kv_lens=torch.from_numpy(kv_lens),
        kv_indices=torch.from_numpy(np.ascontiguousarray(block_tables[:, :width][used], dtype=np.int32)),
        batch_indices=torch.from_numpy(owner),
        positions=torch.from_numpy((np.arange(len(owner)) + first_position).astype(np.int32)),
        block_tables=torch.from_numpy(np.ascontiguousarray(block_tables[:, :width], dtype=np.int32)),
    )
