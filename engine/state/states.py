"""States reads and writes what layers keep beside KV, in the pages of a step's requests; and takes back what a step
that failed has written, so that it can be run again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.attention.base import StepMeta
from engine.pages.layout import ALIGN, LayerState, StateTensor
from engine.pages.memory import TORCH_DTYPE, LayerPages
from engine.state.pieces import cut

Tensors = Sequence[torch.Tensor]


class States:
    """Of one step."""

    def __init__(self, memory: LayerPages, meta: StepMeta) -> None:
        self.pieces = cut(meta)
        self._memory = memory
        self._written_over: list[
            tuple[torch.Tensor, torch.Tensor, torch.Tensor]
        ] = []  # pages of what, which, as it was

    def read(
        self, layer: int, shape: LayerState, pages: torch.Tensor, *, will_be_written: bool, is_spared: bool
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Copies [len(pages), ...] of convolutions' inputs, and of what recurrences carry. `is_spared`: nobody changes
        the latter, so that they need not be copied again for pages that `will_be_written`."""
        views = self._views(layer, shape)
        conv, recurrent = ([view.index_select(0, pages) for view in each] for each in views)
        if will_be_written:
            kept = [*(each.clone() for each in conv), *(each if is_spared else each.clone() for each in recurrent)]
            self._written_over += zip([*views[0], *views[1]], [pages] * len(kept), kept, strict=True)
        return conv, recurrent

    def write(self, layer: int, shape: LayerState, pages: torch.Tensor, conv: Tensors, recurrent: Tensors) -> None:
        views = self._views(layer, shape)
        for view, new in zip([*views[0], *views[1]], [*conv, *recurrent], strict=True):
            view.index_copy_(0, pages, new)

    def take_back(self) -> None:
        """All that was written over is what it was before the step."""
        for view, pages, old in reversed(self._written_over):
            view.index_copy_(0, pages, old)
        self._written_over.clear()

    def _views(self, layer: int, shape: LayerState) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return _tensors(self._memory.k(layer), shape.conv), _tensors(self._memory.v(layer), shape.recurrent)


def _tensors(pages: torch.Tensor, shapes: Sequence[StateTensor]) -> list[torch.Tensor]:
    """Of bytes [num_pages, n]: [num_pages, ...] of each."""
    views, at = [], 0
    for each in shapes:
        part = pages[:, at : at + each.nbytes].view(TORCH_DTYPE[each.dtype])
        views.append(part.unflatten(1, each.shape))
        at += -(-each.nbytes // ALIGN) * ALIGN
    return views
