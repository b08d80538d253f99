"""Shard is one rank's run of what all ranks have together: heads, columns, experts or their widths. Position says
where a process of a worker stands: which layers are its own, and which rank it is among those that share them.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.options import EngineOptions
from engine.pages.share import Share
from engine.weights.stage import Stage


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank of `size`."""

    rank: int
    size: int
    has_whole_experts: bool = False  # a run of them, and not of the width of each

    @property
    def share(self) -> Share:
        """Of the KV pages."""
        return Share(self.rank, self.size)

    def run(self, count: int) -> slice:
        """This rank's of `count` things in order; `size` divides it."""
        share = count // self.size
        return slice(self.rank * share, (self.rank + 1) * share)


@dataclass(frozen=True, slots=True)
class Position:
    """A rank of a stage. Process 0 leads: rank 0 of the last stage, whose ranks are the first; then those of the first
    stage, of the second, and so on."""

    stage: Stage
    shard: Shard

    @classmethod
    def of(cls, number: int, options: EngineOptions) -> Position:
        stages, ranks = options.pipeline_parallel, options.tensor_parallel
        return cls(Stage(number // ranks or stages, stages), Shard(number % ranks, ranks, options.expert_parallel))

    def __str__(self) -> str:
        if self.stage.size == 1:
            return f"rank {self.shard.rank}"
        stage = f"stage {self.stage.number}"
        return stage if self.shard.size == 1 else f"rank {self.shard.rank} of {stage}"

    @property
    def number(self) -> int:
        return self.stage.number % self.stage.size * self.shard.size + self.shard.rank

    @property
    def next(self) -> Position:
        """Who goes on with this one's hidden states."""
        return Position(Stage(self.stage.number + 1, self.stage.size), self.shard)

    def share(self, num_layers: int) -> Share:
        """Of the KV pages."""
        layers = None if self.stage.size == 1 else self.stage.run(num_layers)
        return Share(self.shard.rank, self.shard.size, layers)
