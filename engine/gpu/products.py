"""Which of torch's two libraries of matrix products is the faster for a decode step: each captures it, and is timed.

cuBLAS and cuBLASLt choose kernels by rules of their own, and which of them is right hangs on the number of rows. At few
rows products are most of a step. torch's TunableOp cannot try them on CUDA.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from engine.device import Capture
from engine.errors import raise_if_broken

logger = logging.getLogger(__name__)

LIBRARIES = ("cublas", "cublaslt")


@dataclass(frozen=True, slots=True)
class _Timed:
    seconds: float
    library: str
    replay: Callable[[], object]
    logits: torch.Tensor


@contextmanager
def preferred(library: str) -> Iterator[None]:
    """torch's products come from it, where it has them."""
    blas: Any = torch.backends.cuda
    before = blas.preferred_blas_library()
    blas.preferred_blas_library(library)
    try:
        yield
    finally:
        blas.preferred_blas_library(before)


def with_faster_products(
    capture: Capture,
    seconds_of: Callable[[Callable[[], object]], float],
    prefer: Callable[[str], AbstractContextManager[None]] = preferred,
) -> Capture:
    """A capture by each of LIBRARIES, of which the one that is replayed sooner is kept. `seconds_of` times a replay."""

    def fastest(run: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
        made: list[_Timed] = []
        for library in LIBRARIES:
            try:
                with prefer(library):
                    run()  # what it makes and loads at its first call is so outside the capture
                    replay, logits = capture(run)
            except RuntimeError as error:  # memory for a second one, say
                raise_if_broken(error)
                if not made:
                    raise
            else:
                made.append(_Timed(seconds_of(replay), library, replay, logits))
        best = min(made, key=lambda each: each.seconds)
        shown = ", ".join(f"{each.library} {each.seconds * 1e6:.0f} us" for each in made)
        logger.info("decode steps of %d take their products from %s: %s", len(best.logits), best.library, shown)
        return best.replay, best.logits

    return fastest
