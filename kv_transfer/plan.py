"""The transfer plan says in which pieces KV leaves the prefill worker. Arithmetic only, no bytes.

The layers of a step leave in groups, each as soon as its last layer is computed; what is ready of a group is cut into
segments, each of which is announced, verified and, if need be, sent again by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from engine.pages.layout import KvLayout

GROUP_BYTES = 1 << 20  # about what a group should weigh: below it the cost of a message shows
MAX_GROUPS = 8  # more of them hide no more of the transfer: only the last is exposed
SEGMENT_BYTES = 8 << 20  # larger ones are cut, so that sending one overlaps with verifying the one before
MAX_SEGMENT_BYTES = 256 << 20  # that a receiver takes where it must stage them
GPU_SEGMENT_BYTES = 64 << 20  # a launch and a message cost more there, and a copy of so much takes microseconds


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
    return _even_groups(layout.num_layers, max(1, min(wanted, MAX_GROUPS, layout.num_layers)))


def _even_groups(num_layers: int, count: int) -> list[range]:
    """The first groups hold one layer more where the division leaves a rest."""
    share, rest = divmod(num_layers, count)
    starts = [group * share + min(group, rest) for group in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def cut_segments(
    layout: KvLayout, layers: range, num_pages: int, segment_bytes: int = SEGMENT_BYTES
) -> Iterator[tuple[range, range]]:
    """(layers, index range of the pages) of the segments that num_pages of `layers` make: whole layers while they
    fit. None for no pages."""
    start = layers.start
    while start < layers.stop:
        stop, nbytes = start + 1, layout.page_bytes(range(start, start + 1)) * num_pages
        while stop < layers.stop and nbytes + layout.page_bytes(range(stop, stop + 1)) * num_pages <= segment_bytes:
            nbytes += layout.page_bytes(range(stop, stop + 1)) * num_pages
            stop += 1
        step = max(1, num_pages * segment_bytes // max(nbytes, segment_bytes))
        for at in range(0, num_pages, step):
            yield range(start, stop), range(at, min(at + step, num_pages))
        start = stop
