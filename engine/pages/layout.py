"""KvLayout says where each page of each layer's K and V stands in a worker's KV memory. Arithmetic only.

One contiguous range of bytes for each layer's K, then for its V, layer after layer:

    layer 0: K [num_pages, page_size, kv_heads, k_dim]  V [num_pages, page_size, kv_heads, v_dim]
    layer 1: ...

so that one layer's page is one contiguous run (twice: K and V), and a layer can leave as soon as it is computed.
A layer that keeps a state (a convolution's last inputs, what a recurrence carries) has in each page the state behind
the last of the page's tokens that was computed: [num_pages, bytes of the one], [num_pages, bytes of the other]. So
whoever has a page has the state at its end, and what is done with pages is done with states.
Two workers exchange KV when their `signature`s agree; the number of pages may differ.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1}
BESIDE = {"int8": 4}  # bytes behind each head's row: its scale (int8_rows.py)
PAGE_SIZE = 16  # tokens of a page, where nothing else is said and no layer keeps a state
ALIGN = 64  # bytes; a cache line, and what AVX-512 loads want


@dataclass(frozen=True, slots=True)
class LayerKv:
    """Shape of one layer's KV for one token: kv_heads of k_dim and of v_dim elements (MLA: they differ)."""

    kv_heads: int
    k_dim: int
    v_dim: int

    def page_bytes(self, page_size: int, dtype: str) -> tuple[int, int]:
        """Of K, and of V."""
        k, v = (page_size * self.kv_heads * width * ITEMSIZE[dtype] for width in self.widths(dtype))
        return k, v

    def widths(self, dtype: str) -> tuple[int, int]:
        """Elements of a head's row in a page, of K and of V."""
        return self.k_dim + BESIDE.get(dtype, 0), self.v_dim + BESIDE.get(dtype, 0)

    def __str__(self) -> str:
        return f"({self.kv_heads}h,k{self.k_dim},v{self.v_dim})"


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One request's."""

    number: int  # the layer's own, where it has several
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))} {self.dtype}"


@dataclass(frozen=True, slots=True)
class LayerState:
    """One layer's state, whatever the number of tokens before it: in a page where K would be what convolutions read
    again, and where V would be what recurrences carry, each tensor from a multiple of ALIGN on."""

    conv: tuple[StateTensor, ...]
    recurrent: tuple[StateTensor, ...]

    def page_bytes(self, page_size: int, dtype: str) -> tuple[int, int]:
        """Neither is nothing, so that every layer's page is two runs of bytes."""
        conv, recurrent = (sum(_aligned(each.nbytes) for each in each_of) for each_of in (self.conv, self.recurrent))
        return max(conv, ALIGN), max(recurrent, ALIGN)

    def __str__(self) -> str:
        return f"(conv {','.join(map(str, self.conv))}; recurrent {','.join(map(str, self.recurrent))})"


def kv_and_state_bytes(layers: Sequence[LayerKv | LayerState], page_size: int, dtype: str) -> tuple[int, int]:
    """What a page of these layers holds of KV, and what of states."""
    kv, states = (
        sum(sum(layer.page_bytes(page_size, dtype)) for layer in layers if isinstance(layer, kind))
        for kind in (LayerKv, LayerState)
    )
    return kv, states


@dataclass(frozen=True)
class KvLayout:
    """What the pages are made of. The order of some pages' bytes in some layers, on the wire and in checksums: for each
    layer K of every page, then V of every page."""

    page_size: int  # tokens
    dtype: str
    layers: tuple[LayerKv | LayerState, ...]
    num_pages: int

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE:
            raise ValueError(f"KV dtype is {self.dtype!r}; give one of {', '.join(ITEMSIZE)}")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def has_states(self) -> bool:
        """Whether a layer keeps what cannot be taken back to an earlier token."""
        return any(isinstance(layer, LayerState) for layer in self.layers)

    @property
    def signature(self) -> str:
        """What must agree between two workers, readable in an error."""
        runs = itertools.groupby(self.layers)
        layers = "+".join(f"{len(list(run))}x{shape}" for shape, run in runs)
        return f"page_size={self.page_size} dtype={self.dtype} layers={layers}"

    def k_page_bytes(self, layer: int) -> int:
        return self.layers[layer].page_bytes(self.page_size, self.dtype)[0]

    def v_page_bytes(self, layer: int) -> int:
        return self.layers[layer].page_bytes(self.page_size, self.dtype)[1]

    def page_bytes(self, layers: range | None = None) -> int:
        """Bytes of one page's K and V over `layers` (all by default)."""
        chosen = range(self.num_layers) if layers is None else layers
        return sum(self.k_page_bytes(i) + self.v_page_bytes(i) for i in chosen)

    @cached_property
    def _starts(self) -> list[tuple[int, int]]:
        starts, at = [], 0
        for layer in range(self.num_layers):
            k_at = at
            v_at = _aligned(k_at + self.num_pages * self.k_page_bytes(layer))
            at = _aligned(v_at + self.num_pages * self.v_page_bytes(layer))
            starts.append((k_at, v_at))
        return starts

    def k_offset(self, layer: int) -> int:
        return self._starts[layer][0]

    def v_offset(self, layer: int) -> int:
        return self._starts[layer][1]

    @property
    def total_bytes(self) -> int:
        last = self.num_layers - 1
        return _aligned(self.v_offset(last) + self.num_pages * self.v_page_bytes(last))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
