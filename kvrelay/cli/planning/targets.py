"""Latency targets as flags: 250ms, 0.25s; a bare number is milliseconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    ttft: Annotated[str | None, typer.Option(help="Time to first token: 250ms, 0.25s; a bare number is ms.")] = None
    tpot: Annotated[str | None, typer.Option(help="Time per output token after it: 25ms.")] = None

    def given_s(self) -> dict[str, float]:
        """ttft_s, tpot_s: those that were given. Raises PlanError naming the flag."""
        given = {"--ttft": self.ttft, "--tpot": self.tpot}
        return {f"{flag[2:]}_s": seconds_of(flag, text) for flag, text in given.items() if text is not None}


def seconds_of(flag: str, text: str) -> float:
    """Raises PlanError naming the flag."""
    from kvrelay.plan.durations import parse_duration
    from placement.catalogs.base import PlanError

    try:
        seconds: Any = parse_duration(text)
    except ValueError as error:
        raise PlanError(f"{flag} is {text!r}; {error}") from None
    return float(seconds)
