"""UploadGuard: a host buffer that the device copies from is not written again before the copy has been made.

    with guard:      # waits for the copies that were queued inside the last time
        fill the buffer; queue its copy

Off CUDA nothing is asynchronous and nothing waits.
"""

from __future__ import annotations

from types import TracebackType

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
