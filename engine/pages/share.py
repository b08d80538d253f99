"""A Share is what one process of a worker keeps of every page: a run of its layers, and in each a run of its KV heads.

Page numbers are the worker's, the same in every share; the bytes of a share are pages of their own, with its layers and
heads only, in the order of KvLayout. Where there are fewer KV heads than ranks, several keep the same one. Arithmetic
only.

A *plane* is one layer's K or V. What stands of it for one token is all of its heads, side by side: a share has a run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from engine.pages.layout import KvLayout, LayerKv, LayerState


@dataclass(frozen=True, slots=True)
class Plane:
    """Of whole pages. A state counts as one token's."""

    tokens: int  # of a page
    token_bytes: int

    @property
    def page_bytes(self) -> int:
        return self.tokens * self.token_bytes


@dataclass(frozen=True, slots=True)
class PlaneRun:
    """What a share has of each token in a plane."""

    offset: int  # of page 0, among the share's own bytes
    start: int  # among the token's bytes
    nbytes: int  # of a token


@dataclass(frozen=True, slots=True)
class Share:
    """Of rank `rank` among `size` that divide the heads; `layers` None: all."""

    rank: int = 0
    size: int = 1
    layers: range | None = None

    def __str__(self) -> str:
        layers = "" if self.layers is None else f":{self.layers.start}-{self.layers.stop}"
        return f"{self.rank}/{self.size}{layers}"

    @classmethod
    def read(cls, text: str) -> Share:
        """What `str` made. Raises ValueError."""
        heads, _, layers = text.partition(":")
        rank, size = map(int, heads.split("/"))
        if not 0 <= rank < size:
            raise ValueError(f"{text!r} is no rank's share")
        first, stop = map(int, layers.split("-")) if layers else (0, 0)
        return cls(rank, size, range(first, stop) if layers else None)

    def heads(self, count: int) -> range:
        """Which of a layer's KV heads. Raises ValueError where they cannot be divided."""
        if count % self.size == 0:
            each = count // self.size
            return range(self.rank * each, (self.rank + 1) * each)
        if self.size % count == 0:
            head = self.rank * count // self.size
            return range(head, head + 1)
        raise ValueError(f"{count} KV heads cannot be divided among {self.size} ranks")

    def layers_of(self, layout: KvLayout) -> range:
        return range(layout.num_layers) if self.layers is None else self.layers

    def of(self, layout: KvLayout) -> KvLayout:
        """The layout of this share's own pages: its layers, counted from 0, with its heads."""
        return replace(layout, layers=tuple(self._cut(layout.layers[i]) for i in self.layers_of(layout)))

    def runs(self, layout: KvLayout) -> dict[int, tuple[PlaneRun, PlaneRun]]:
        """Of K and of V, by layer."""
        own, layers = self.of(layout), self.layers_of(layout)
        return {layer: self._runs(layout, own, layer, layer - layers.start) for layer in layers}

    def _runs(self, layout: KvLayout, own: KvLayout, layer: int, number: int) -> tuple[PlaneRun, PlaneRun]:
        shape = layout.layers[layer]
        heads, first = (shape.kv_heads, self.heads(shape.kv_heads).start) if isinstance(shape, LayerKv) else (1, 0)
        offsets = own.k_offset(number), own.v_offset(number)
        sizes = own.k_page_bytes(number), own.v_page_bytes(number)
        k, v = (
            PlaneRun(offset, first * plane.token_bytes // heads, nbytes // plane.tokens)
            for offset, nbytes, plane in zip(offsets, sizes, planes(layout, layer), strict=True)
        )
        return k, v

    def _cut(self, shape: LayerKv | LayerState) -> LayerKv | LayerState:
        if isinstance(shape, LayerState):
            return shape
        return replace(shape, kv_heads=len(self.heads(shape.kv_heads)))


WHOLE = Share()


def planes(layout: KvLayout, layer: int) -> tuple[Plane, Plane]:
    """Of a layer's K and of its V."""
    tokens = layout.page_size if isinstance(layout.layers[layer], LayerKv) else 1
    k, v = (Plane(tokens, nbytes // tokens) for nbytes in (layout.k_page_bytes(layer), layout.v_page_bytes(layer)))
    return k, v


def sent_bytes(layout: KvLayout, shares: Iterable[Share]) -> list[int]:
    """Of a whole page, by share, as pages are put together: a head that several have is read from the first."""
    read: set[tuple[int, int]] = set()
    sent = []
    for share in shares:
        num_bytes = 0
        for layer in share.layers_of(layout):
            shape = layout.layers[layer]
            count = shape.kv_heads if isinstance(shape, LayerKv) else 1
            own = {(layer, head) for head in share.heads(count)} - read
            num_bytes += len(own) * (layout.k_page_bytes(layer) + layout.v_page_bytes(layer)) // count
            read |= own
        sent.append(num_bytes)
    return sent


def check_whole(layout: KvLayout, shares: Iterable[Share]) -> None:
    """Raise ValueError unless together they have every layer's every head."""
    shares, all_layers = list(shares), range(layout.num_layers)
    for share in shares:
        layers = share.layers_of(layout)
        if not all_layers.start <= layers.start < layers.stop <= all_layers.stop:
            raise ValueError(f"share {share} has other layers than the {layout.num_layers} that there are")
    for layer, shape in enumerate(layout.layers):
        there = [share for share in shares if layer in share.layers_of(layout)]
        heads = set(range(shape.kv_heads)) if isinstance(shape, LayerKv) else {0}
        for share in there:
            heads -= set(share.heads(shape.kv_heads)) if isinstance(shape, LayerKv) else {0}
        if heads:
            raise ValueError(f"nobody has head {min(heads)} of layer {layer}")
