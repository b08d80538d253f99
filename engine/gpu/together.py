"""Together: captures of an engine whose steps several processes compute, and meet in collectives.

What one of them fails to compute leaves the others waiting on their devices, for good: the engine is broken. While a
graph is captured nobody waits; so where that fails in one it fails in all, and all go on with the same graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from engine.device import Capture
from engine.errors import EngineBroken, in_short, raise_if_broken
from engine.gpu.steps import Mirror

P = ParamSpec("P")
T = TypeVar("T")


class Together:
    def __init__(self, mirror: Mirror) -> None:
        """Where there are no others all is as without."""
        self._mirror = mirror
        self._is_capturing = False

    def computed(self, run: Callable[P, T]) -> Callable[P, T]:
        """The same, which raises EngineBroken where the others would wait."""

        def compute(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return run(*args, **kwargs)
            except RuntimeError as error:
                if self._is_capturing or not self._mirror.has_others:
                    raise
                raise EngineBroken(
                    f"a decode step failed before its graph was captured: {in_short(error)}; give a smaller "
                    "max_graph_batch, or cuda_graphs: false"
                ) from error

        return compute

    def capture(self, capture: Capture) -> Capture:
        def captured(run: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
            made: tuple[Callable[[], object], torch.Tensor] | None = None
            failed = RuntimeError("another process of the worker has failed to capture it")
            self._is_capturing = True
            try:
                made = capture(run)
            except RuntimeError as error:
                raise_if_broken(error)
                failed = error
            finally:
                self._is_capturing = False
            if self._mirror.all_have(made is not None) and made is not None:
                return made
            raise failed

        return captured
