"""RunningSpec is the spec that a cluster runs with, as its controller keeps it: as it was written, what auto has come
to, where each value comes from, how many workers each pool shall have, and how far a change of it is.

    look at another spec (plan) -> refuse it, or take it -> members are brought to it, one after another -> settled

It decides and remembers; the controller carries out. `saved` is all of it, as plain data, for the next controller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from cluster.front.options import FrontOptions
from cluster.spec.compare import KeyChange, compare, live_knobs, made_by, merged
from cluster.spec.errors import SpecError
from cluster.spec.load import parse_spec
from cluster.spec.model import ClusterSpec
from cluster.spec.pool import PoolSpec
from cluster.spec.resolve import Machine, WorkerPlan, plan_of, resolve
from cluster.spec.sources import DEFAULT, Row, Sources, rows_of

SAVED = ("sizes", "number", "rolls", "max_surge", "is_rolling", "reason")  # of a RunningSpec, beside its specs


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What the cluster will run with, and what that changes."""

    written: ClusterSpec
    resolved: ClusterSpec
    sources: Sources
    sources_before: Sources
    changes: Sequence[KeyChange]

    @property
    def why_not(self) -> str:
        return "\n".join(change.why_not for change in self.changes if change.why_not)


def _with_adapters(spec: ClusterSpec, adapters: Mapping[str, str]) -> ClusterSpec:
    """Raises SpecError."""
    data = spec.model_dump(mode="json", exclude_unset=True)
    return parse_spec({**data, "router": {**data.get("router", {}), "adapters": dict(adapters)}})


@dataclass(slots=True, kw_only=True)
class RunningSpec:
    written: ClusterSpec
    resolved: ClusterSpec
    sources: Sources
    machine: Machine | None  # where all of it runs; None: in a Ray that was joined
    node_host: str
    sizes: dict[str, int]  # by pool: as it was written, or scaled since
    number: int = 0  # of the spec: one more with each that is taken
    rolls: dict[str, int] = field(default_factory=dict)  # by pool: how often all of its workers were to be replaced
    max_surge: int | None = None  # None: 1 where there is room
    is_rolling: bool = False
    reason: str = ""  # what is waited for, or why it has stopped before its end

    @classmethod
    def of(
        cls, written: ClusterSpec, resolved: ClusterSpec, sources: Sources, machine: Machine | None, node_host: str
    ) -> Self:
        sizes = {pool.label: pool.replicas for pool in resolved.pools}
        return cls(
            written=written,
            resolved=resolved,
            sources=sources,
            machine=machine,
            node_host=node_host,
            sizes=sizes,
        )

    # what it says

    def pool(self, label: str) -> PoolSpec | None:
        return next((pool for pool in self.resolved.pools if pool.label == label), None)

    def plan(self, worker: str) -> WorkerPlan:
        return plan_of(self.resolved, worker)

    def made_by(self, label: str) -> str:
        """What its workers are to be started with; empty where there is no such pool any more."""
        pool = self.pool(label)
        return f"{made_by(self.resolved, pool)}.{self.rolls.get(label, 0)}" if pool is not None else ""

    def live_knobs(self, label: str) -> dict[str, Any]:
        pool = self.pool(label)
        return live_knobs(pool) if pool is not None else {}

    @property
    def rows(self) -> list[Row]:
        rows = rows_of(self.written, self.resolved, self.sources)
        sizes = {f"pools[{i}].replicas": self.sizes[pool.label] for i, pool in enumerate(self.written.pools)}
        return [
            row._replace(value=sizes[row.key], source=self.sources.get(row.key, DEFAULT)) if row.key in sizes else row
            for row in rows
        ]

    # changes

    def plan_for(self, data: object, sources: Sources) -> Planned:
        """Raises SpecError."""
        written = parse_spec(data)
        resolved = merged(
            (self.written, self.resolved), written, resolve(written, self.machine, node_host=self.node_host)
        )
        changes = compare(self.resolved, resolved, self._sizes_beside(written))
        return Planned(
            written=written, resolved=resolved, sources=sources, sources_before=self.sources, changes=changes
        )

    def plan_adapters(self, add: Mapping[str, str], remove: Sequence[str]) -> Planned:
        """With other adapters, and all else as it is. Raises SpecError."""
        there = self.resolved.router.options(FrontOptions).adapters
        if unknown := [name for name in remove if name not in there]:
            have = f"there are {', '.join(there)}" if there else "there is none"
            raise SpecError(f"there is no adapter {unknown[0]!r}; {have}")
        left = {name: path for name, path in there.items() if name not in remove}
        for name, path in add.items():
            if not Path(path).is_absolute():
                raise SpecError(f"adapter {name!r} is at {path}; give the whole path, for routers and workers read it")
            if left.get(name, path) != path:
                raise SpecError(f"adapter {name!r} is {left[name]} already; remove it first, or take another name")
        written, resolved = (_with_adapters(spec, {**left, **add}) for spec in (self.written, self.resolved))
        sources = {"router.adapters": "kvrelay adapter"}
        return Planned(written=written, resolved=resolved, sources=sources, sources_before=self.sources, changes=())

    def take_now(self, planned: Planned) -> None:
        """What changes at once, wherever it is. A pool may have been resized since it was planned."""
        self.written, self.resolved = planned.written, planned.resolved
        self.sources = {**self.sources, **planned.sources}
        self.number += 1

    def _sizes_beside(self, written: ClusterSpec) -> dict[str, tuple[int, int]]:
        """By pool, how many it has and shall have. Where a replanner scales pools, one that is written as before stays
        as it has made it."""
        before = {pool.label: pool.replicas for pool in self.written.pools}
        after = {pool.label: pool.replicas for pool in written.pools}
        if self.written.replan == written.replan == "act":
            after = {label: self.sizes.get(label, n) if before.get(label) == n else n for label, n in after.items()}
        return {label: (self.sizes.get(label, 0), after.get(label, 0)) for label in before | after}

    def take(self, planned: Planned, max_surge: int | None) -> None:
        sizes = self._sizes_beside(planned.written)
        self.sizes = {pool.label: sizes[pool.label][1] for pool in planned.written.pools}
        self.written, self.resolved, self.sources = planned.written, planned.resolved, planned.sources
        self.number += 1
        self.begin(max_surge)

    def roll(self, pools: Sequence[str], max_surge: int | None) -> None:
        """Have all workers of these pools replaced."""
        for label in pools:
            self.rolls[label] = self.rolls.get(label, 0) + 1
        self.begin(max_surge)

    def begin(self, max_surge: int | None) -> None:
        self.max_surge, self.is_rolling, self.reason = max_surge, True, ""

    def settle(self, reason: str = "") -> None:
        """`reason`: why it has stopped; empty: all is as the spec has it."""
        self.is_rolling, self.reason = False, reason

    def resize(self, label: str, size: int, by: str) -> None:
        """Of a pool, somebody has changed the size beside the spec."""
        self.sizes[label] = size
        index = [pool.label for pool in self.written.pools].index(label)
        self.sources = {**self.sources, f"pools[{index}].replicas": by}

    # over restarts

    @property
    def saved(self) -> dict[str, Any]:
        specs = {key: getattr(self, key).model_dump(mode="json", exclude_unset=True) for key in ("written", "resolved")}
        return {**specs, "sources": dict(self.sources), **{key: getattr(self, key) for key in SAVED}}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """As the last controller kept it. Raises SpecError; nothing is changed then."""
        specs = {key: parse_spec(saved[key]) for key in ("written", "resolved")}
        kept = {key: saved[key] for key in ("sources", *SAVED) if key in saved}  # another version may have kept it
        for key, value in {**kept, **specs}.items():
            setattr(self, key, value)
