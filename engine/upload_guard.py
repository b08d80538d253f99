"""UploadGuard: a host buffer that the device copies from is not written again before the copy has been made.

    with guard:      # waits for the copies that were queued inside the last time
        fill the buffer; queue its copy

Off CUDA nothing is asynchronous and nothing waits. A few numbers are `uploaded` through memory of torch's own, which it
uses again only when the copies that were queued from it have been made.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch


class UploadGuard:
    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        self._was_recorded = False

    def __enter__(self) -> None:
        if self._event is not None and self._was_recorded:
            self._event.synchronize()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._event is not None:
            self._event.record()  # on the current stream, behind what was queued
            self._was_recorded = True


def pinned(host: torch.Tensor) -> torch.Tensor:
    """A copy from which a GPU takes without a wait for the steps before: from other memory the host might wait."""
    return torch.empty_like(host, pin_memory=True).copy_(host)


def queued(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Its copy on the device, when the device comes to it."""
    return pinned(host).to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def uploaded(values: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Whole numbers, in lists of lists where it has more dimensions, as int64 on the device, queued."""
    return queued(torch.tensor(values, dtype=torch.int64), device)
