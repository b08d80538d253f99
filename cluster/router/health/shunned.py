"""Shunned says for one choice which workers are taken only when there is no other, which of them first, and which not
at all. A worker that is not named is sound. Values only."""

from __future__ import annotations

from collections.abc import Mapping

Grade = tuple[
    int, float
]  # how bad it is, and for equals when it is worth a try again, in seconds: the least goes first
Shunned = Mapping[str, Grade]

SOUND: Grade = (0, 0.0)
AVOIDED: Grade = (1, 0.0)  # it failed the request, or a request that may have killed a worker is tried there
DOUBTED: Grade = (2, 0.0)  # it says nothing, or its step takes long
BROKEN = 3  # its steps fail, or the handoffs to it
BARRED: Grade = (4, 0.0)  # the request may not go there now, or cannot be served there

NOBODY: Shunned = {}


def shun(shunned: dict[str, Grade], name: str, grade: Grade) -> None:
    """At least so bad."""
    shunned[name] = max(grade, shunned.get(name, SOUND))
