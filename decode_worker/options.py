"""DecodeOptions are the knobs of a DecodePolicy (policy.py): how many decode at once, and who gets pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.knobs import check, knob


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    max_batch_size: int = knob(64, "that decode at once; more wait, with their KV, in pages", unit="requests", ge=1)
    admission: Literal["watermark", "worst_case"] = knob("watermark", "who gets pages: see *Choosing values*")
    watermark: float = knob(
        0.02, "that admission leaves free for running requests to grow into", unit="share of pages", ge=0, lt=1
    )

    def __post_init__(self) -> None:
        check(self)
