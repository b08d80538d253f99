"""plain writes a policy's values as JSON knows them, for recordings and for those that compare with one.

A dataclass is {its name: its fields}; bytes are {"bytes": hex}; a set is {"set": [...]}, sorted.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any


def plain(value: Any) -> Any:
    """As JSON knows it."""
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, frozenset | set):
        return {"set": sorted(value)}
    if is_dataclass(value):
        return {type(value).__name__: {f.name: plain(getattr(value, f.name)) for f in fields(value)}}
    return [plain(each) for each in value]
