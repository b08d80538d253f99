"""Takers are the workers that take new requests, by the phase of requests that they compute: by them it is known who
would leave nobody behind. Plain data, which a router tells the controller.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

Takers = Mapping[str, Mapping[str, bool]]  # phase, of which model -> name -> whether it speaks


class RouterStanding(NamedTuple):
    """How a router stands with the workers."""

    takers: Takers
    ready: Mapping[str, str]  # to be sent requests: by worker, the incarnation of its process
    models: Collection[str] = ()  # that it takes requests for, or has some of


def alone_in(workers: Collection[str], takers: Takers) -> list[str]:
    """The phases of these workers for which no other one takes new requests, and speaks."""
    return [
        phase
        for phase, speaks in takers.items()
        if not speaks.keys().isdisjoint(workers) and not any(speaks[name] for name in speaks.keys() - set(workers))
    ]


def why_alone(workers: Collection[str], takers: Takers, kind: str = "") -> str:
    """Why these may not leave; empty if each of their phases has another worker. `kind`: of requests, that those who
    take can serve."""
    alone = alone_in(workers, takers)
    if not alone:
        return ""
    are, take = ("is the only worker", "takes") if len(workers) == 1 else ("are the only workers", "take")
    who = f"{' and '.join(workers)} {are} for {' and '.join(alone)} that {take} requests{kind and f' of {kind}'}"
    return f"{who}; start another one, or force it"


def without(takers: Takers, leaving: Collection[str]) -> dict[str, dict[str, bool]]:
    """But for those that leave."""
    return {
        phase: {name: speaks for name, speaks in named.items() if name not in leaving}
        for phase, named in takers.items()
    }
