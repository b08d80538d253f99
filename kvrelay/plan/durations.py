"""Latency targets as a person writes them: with their unit (250ms, 0.25s); a bare number is milliseconds."""

from __future__ import annotations

import re

DURATION = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(ms|s|)\s*", re.IGNORECASE)


def parse_duration(value: object) -> object:
    """250ms, 0.25s, 250 (ms) -> seconds; what is no duration is refused."""
    if isinstance(value, bool) or value is None:
        return value
    match = DURATION.fullmatch(str(value))
    if match is None:
        raise ValueError("give a time above 0 such as 250ms or 0.25s; a bare number is milliseconds")
    seconds = float(match[1]) * (1.0 if match[2].lower() == "s" else 1e-3)
    if not seconds > 0:
        raise ValueError("give a time above 0 such as 250ms or 0.25s; a bare number is milliseconds")
    return seconds


def written_duration(seconds: float) -> str:
    return f"{seconds:.6g}s" if seconds >= 1 else f"{seconds * 1e3:.6g}ms"
