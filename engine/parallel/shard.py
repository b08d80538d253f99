"""Shard is one rank's run of what all ranks have together: heads, columns, experts' widths."""

from __future__ import annotations

from dataclasses import dataclass

from engine.pages.share import Share


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank of `size`."""

    rank: int
    size: int

    @property
    def share(self) -> Share:
        """Of the KV pages."""
        return Share(self.rank, self.size)

    def run(self, count: int) -> slice:
        """This rank's of `count` things in order; `size` divides it."""
        share = count // self.size
        return slice(self.rank * share, (self.rank + 1) * share)
