"""KvLayout says where each page of each layer's K and V stands in a worker's KV memory. Arithmetic only.

One contiguous range of bytes for each layer's K, then for its V, layer after layer:

    layer 0: K [num_pages, page_size, kv_heads, k_dim]  V [num_pages, page_size, kv_heads, v_dim]
    layer 1: ...

so that one layer's page is one contiguous run (twice: K and V), and a layer can leave as soon as it is computed.
Two workers exchange KV when their `signature`s agree; the number of pages may differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
ALIGN = 64  # bytes; a cache line, and what AVX-512 loads want


@dataclass(frozen=True, slots=True)
class LayerKv:
    """Shape of one layer's KV for one token: kv_heads of k_dim and of v_dim elements (MLA: they differ)."""

    kv_heads: int
    k_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True)
class Span:
    """A contiguous run of bytes in a worker's KV memory."""

    offset: int
    nbytes: int


@dataclass(frozen=True)
class KvLayout:
    page_size: int  # tokens
    dtype: str
    layers: tuple[LayerKv, ...]
    num_pages: int

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE:
            raise ValueError(f"KV dtype is {self.dtype!r}; give one of {', '.join(ITEMSIZE)}")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def signature(self) -> str:
        """What must agree between two workers, readable in an error."""
        runs = itertools.groupby(self.layers)
        layers = "+".join(f"{len(list(run))}x({k.kv_heads}h,k{k.k_dim},v{k.v_dim})" for k, run in runs)
        return f"page_size={self.page_size} dtype={self.dtype} layers={layers}"

    def k_page_bytes(self, layer: int) -> int:
        shape = self.layers[layer]
        return self.page_size * shape.kv_heads * shape.k_dim * ITEMSIZE[self.dtype]

    def v_page_bytes(self, layer: int) -> int:
        shape = self.layers[layer]
        return self.page_size * shape.kv_heads * shape.v_dim * ITEMSIZE[self.dtype]

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

    def spans(self, layers: range, pages: Sequence[int]) -> Iterator[Span]:
        """The bytes of `pages` in `layers`: for each layer K of every page in order, then V of every page.

        Neighbouring pages are joined, so the spans of two workers' pages may be cut differently; their
        concatenation is the same bytes in the same order. That order is the wire's and the checksum's.
        """
        runs = list(_runs(pages))
        for layer in layers:
            k_bytes, v_bytes = self.k_page_bytes(layer), self.v_page_bytes(layer)
            for first, count in runs:
                yield Span(self.k_offset(layer) + first * k_bytes, count * k_bytes)
            for first, count in runs:
                yield Span(self.v_offset(layer) + first * v_bytes, count * v_bytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def _runs(pages: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first page, count) of each run of consecutive numbers."""
    start = 0
    for i in range(1, len(pages) + 1):
        if i == len(pages) or pages[i] != pages[i - 1] + 1:
            yield pages[start], i - start
            start = i
