"""PageMass adds up how much of its attention a prompt gives to each of its pages: by it, heavy hitters are found.

H2O (Zhang et al., NeurIPS 2023) keeps the tokens with the greatest sums of attention over the rows so far, for each
head; here pages are kept, for all layers and heads together, as a page holds the KV of all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class PageMass:
    """An AttentionMass; `settle` is called behind a step that has not failed."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._sums: torch.Tensor | None = None  # [tokens so far], float64
        self._step: torch.Tensor | None = None

    def begin(self) -> None:
        self._step = None

    def add(self, weights_L: torch.Tensor) -> None:
        """Of one layer's rows to each token so far."""
        self._step = weights_L.double() if self._step is None else self._step + weights_L

    def settle(self) -> None:
        if self._step is None:
            return
        sums = self._step.clone()  # which is written outside of the engine's inference mode
        if self._sums is not None:
            sums[: len(self._sums)] += self._sums
        self._sums, self._step = sums, None

    def heaviest(self, count: int) -> tuple[int, ...]:
        """The full pages that were given most, `count` of them at most, in order; the first where none is full. The
        first ones win ties."""
        assert self._sums is not None, "nothing has been read"
        sums, size = self._sums.tolist(), self._page_size
        pages = [sum(sums[start : start + size]) for start in range(0, max(size, len(sums) - size + 1), size)]
        return tuple(sorted(sorted(range(len(pages)), key=lambda page: -pages[page])[:count]))
