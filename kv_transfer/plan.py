"""The transfer plan says which rank sends which layers and KV heads to which rank. Arithmetic only, no bytes.

A worker with tensor-parallel degree tp and pipeline-parallel degree pp has tp * pp ranks; rank = stage * tp + tp_rank.
A stage holds a run of layers (the first stages one more where the division leaves a rest). Within a stage each rank
holds a run of KV heads; with more ranks than heads, several ranks hold the same head (replicas).
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.pages.layout import KvLayout

GROUP_BYTES = 1 << 20  # about what a segment should weigh: below it the cost of a message shows
MAX_GROUPS = 8  # more of them hide no more of the transfer: only the last is exposed


@dataclass(frozen=True, slots=True)
class Parallel:
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        if self.tp < 1 or self.pp < 1:
            raise ValueError(f"parallel degrees are tp={self.tp} pp={self.pp}; give whole numbers of 1 or more")

    @property
    def ranks(self) -> int:
        return self.tp * self.pp


@dataclass(frozen=True, slots=True)
class Piece:
    """What one rank sends to another: `heads` of every one of `layers`, numbered as in the whole model."""

    src_rank: int
    dst_rank: int
    layers: range
    heads: range


def layers_of(parallel: Parallel, rank: int, num_layers: int) -> range:
    """The layers that a rank's pipeline stage holds."""
    stage = rank // parallel.tp
    share, rest = divmod(num_layers, parallel.pp)
    start = stage * share + min(stage, rest)
    return range(start, start + share + (stage < rest))


def heads_of(parallel: Parallel, rank: int, kv_heads: int) -> range:
    """The KV heads that a rank holds: a run of its own, or one shared with its replicas when tp > kv_heads."""
    tp_rank = rank % parallel.tp
    first = tp_rank * kv_heads // parallel.tp
    if parallel.tp >= kv_heads:
        return range(first, first + 1)
    return range(first, (tp_rank + 1) * kv_heads // parallel.tp)


def plan_transfer(src: Parallel, dst: Parallel, num_layers: int, kv_heads: int) -> tuple[Piece, ...]:
    """The pieces that give every destination rank each of its (layer, head) pairs exactly once."""
    return tuple(
        piece for dst_rank in range(dst.ranks) for piece in _pieces_to(dst_rank, src, dst, num_layers, kv_heads)
    )


def _pieces_to(dst_rank: int, src: Parallel, dst: Parallel, num_layers: int, kv_heads: int) -> list[Piece]:
    wanted_layers = layers_of(dst, dst_rank, num_layers)
    wanted_heads = heads_of(dst, dst_rank, kv_heads)
    pieces = []
    for stage in range(src.pp):
        layers = _overlap(wanted_layers, layers_of(src, stage * src.tp, num_layers))
        for tp_rank, heads in _holders(src, wanted_heads, kv_heads, spread=dst_rank % dst.tp):
            if layers:
                pieces.append(Piece(stage * src.tp + tp_rank, dst_rank, layers, heads))
    return pieces


def _holders(src: Parallel, wanted: range, kv_heads: int, *, spread: int) -> list[tuple[int, range]]:
    """(tp rank, heads) that together hold `wanted` once. Among replicas, `spread` chooses, so that all of them send."""
    held: dict[range, list[int]] = {}
    for tp_rank in range(src.tp):
        overlap = _overlap(wanted, heads_of(src, tp_rank, kv_heads))
        if overlap:
            held.setdefault(overlap, []).append(tp_rank)
    return [(replicas[spread % len(replicas)], heads) for heads, replicas in held.items()]


def _overlap(a: range, b: range) -> range:
    start = max(a.start, b.start)
    return range(start, max(start, min(a.stop, b.stop)))


def layer_groups(layout: KvLayout, pages: int, layers_per_group: int) -> list[range]:
    """Cut the layers into the groups that leave together, in order.

    layers_per_group 0 chooses: segments of about a megabyte for a prompt of `pages`, at most eight of them.
    """
    if layers_per_group < 0:
        raise ValueError(f"layers_per_group is {layers_per_group}; give 1 or more layers, or 0 to have it chosen")
    if layers_per_group:
        starts = range(0, layout.num_layers, layers_per_group)
        return [range(start, min(start + layers_per_group, layout.num_layers)) for start in starts]
    wanted = -(-layout.page_bytes() * pages // GROUP_BYTES)
    count = max(1, min(wanted, MAX_GROUPS, layout.num_layers))
    return [layers_of(Parallel(1, count), stage, layout.num_layers) for stage in range(count)]
