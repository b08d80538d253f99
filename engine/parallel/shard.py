"""Shard is one rank's share of what all ranks have: heads, columns, and its heads of the KV pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.pages.layout import LayerKv
from engine.pages.memory import KvMemory


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank of `size`."""

    rank: int
    size: int

    def run(self, count: int) -> slice:
        """This rank's of `count` things in order; `size` divides it."""
        share = count // self.size
        return slice(self.rank * share, (self.rank + 1) * share)


class HeadSlice:
    """One rank's heads of pages that hold all heads: views, strided from token to token. It owns no bytes."""

    def __init__(self, whole: KvMemory, shard: Shard) -> None:
        layers = range(whole.layout.num_layers)
        heads = [shard.run(shape.kv_heads) for shape in whole.layout.layers if isinstance(shape, LayerKv)]
        self._k = [whole.k(i)[:, :, heads[i]] for i in layers]
        self._v = [whole.v(i)[:, :, heads[i]] for i in layers]

    def k(self, layer: int) -> torch.Tensor:
        return self._k[layer]

    def v(self, layer: int) -> torch.Tensor:
        return self._v[layer]
