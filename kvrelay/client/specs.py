"""The spec that a cluster runs with, as clients see it: its values, what another one would change, how far that is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from kvrelay.v1 import cluster_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecValue:
    key: str  # pools[0].threads
    value: Any
    source: str  # a file and its line, a flag, a command, default, or derived


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecChange:
    key: str
    before: Any
    after: Any
    how: Literal["now", "rolling", "fixed"]
    reason: str  # of a fixed one: why it cannot change


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """How far workers are replaced."""

    running: bool
    current: int  # workers that are as the spec has them, and ready
    total: int
    reason: str  # what is waited for, or why it has stopped before its end


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningSpec:
    values: tuple[SpecValue, ...]
    rollout: Rollout


def running_from(answer: pb.GetSpecResponse) -> RunningSpec:
    rollout = answer.rollout
    return RunningSpec(
        values=tuple(
            SpecValue(key=each.key, value=json.loads(each.value), source=each.source) for each in answer.values
        ),
        rollout=Rollout(running=rollout.running, current=rollout.current, total=rollout.total, reason=rollout.reason),
    )


def changes_from(answer: pb.ApplySpecResponse) -> tuple[SpecChange, ...]:
    return tuple(
        SpecChange(
            key=each.key,
            before=json.loads(each.before),
            after=json.loads(each.after),
            how=each.how,  # type: ignore[arg-type]
            reason=each.reason,
        )
        for each in answer.changes
    )
