"""in_turn keeps those who wait in the order in which they go: by priority, lower ones first, then as they came."""

from __future__ import annotations

from typing import Protocol, TypeVar


class Prior(Protocol):
    request_id: str
    priority: int


PriorT = TypeVar("PriorT", bound=Prior)


def in_turn(waiting: dict[str, PriorT], request: PriorT) -> dict[str, PriorT]:
    """Those who wait, which are in order, and one more."""
    last = next(reversed(waiting.values())) if waiting else None
    waiting[request.request_id] = request
    if last is None or last.priority <= request.priority:
        return waiting
    return dict(sorted(waiting.items(), key=lambda item: item[1].priority))
