"""FrontOptions is what one client or all of them may take of a router: bytes, streams, connections, time. Values."""

from __future__ import annotations

from dataclasses import dataclass

from engine.knobs import check, knob

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontOptions:
    max_tokenizing_bytes: int = knob(
        16 * MIB, "of texts that wait to be tokenised; more are refused with RESOURCE_EXHAUSTED", unit="bytes", ge=1024
    )

    def __post_init__(self) -> None:
        check(self)
