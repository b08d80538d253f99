"""The replanning policy: given how the cluster would fare in each arrangement of its roles, which to take, and why.

    roles now --candidates--> arrangements near by --played against what came lately--> Played --decide--> Decision

Pure: it plays nothing and changes nothing. A change has a price, for a worker that changes computes nothing meanwhile.
What came lately is believed to go on for as long as it has gone on: the same change is dear where little was seen, and
two loads that take turns are seen together, so that they do not make roles swing. And the gain must be more than
chance: both arrangements are played against the same requests, and compared part by part.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, product

import numpy as np
import numpy.typing as npt

from worker.roles import PHASES, ROLES, kind_of

Roles = Mapping[str, str]  # by worker
PARTS = 20  # of what came, one after another, by which two arrangements are compared
SURE = 2.0  # standard errors
TRUSTED = 0.03  # a share that the simulation may be wrong by: what gains less is left
MIN_SEEN_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Played:
    """How each request fared: whether it met its targets, in the order in which they came. `tpot_s`: of the middle
    one."""

    roles: Roles
    met: npt.NDArray[np.bool_]
    tpot_s: float = 0.0

    @property
    def attainment(self) -> float:
        return float(self.met.mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """`changes`: (worker, role) one after another; none: all stay. `reason`: one sentence."""

    changes: tuple[tuple[str, str], ...]
    reason: str


def candidates(roles: Roles, most_changes: int) -> list[Roles]:
    """All arrangements that are so few changes away and can be come to, the nearest first. Of workers of a role the
    last ones change."""
    have = Counter(roles.values())
    near = [range(max(0, have[role] - most_changes), have[role] + most_changes + 1) for role in ROLES]
    found = [
        changed
        for counts in product(*near)
        if sum(counts) == len(roles)
        for changed in (_with_counts(roles, dict(zip(ROLES, counts, strict=True))),)
        if 0 < num_changes(roles, changed) <= most_changes and _steps(roles, changed) is not None
    ]
    return sorted(found, key=lambda changed: num_changes(roles, changed))


def num_changes(roles: Roles, changed: Roles) -> int:
    return sum(changed[name] != role for name, role in roles.items())


def _with_counts(roles: Roles, wanted: Mapping[str, int]) -> Roles:
    have, changed = Counter(roles.values()), dict(roles)
    missing = [role for role in ROLES for _ in range(wanted[role] - have[role])]
    for name in sorted(roles, key=_number, reverse=True):
        if missing and have[roles[name]] > wanted[roles[name]]:
            have[roles[name]] -= 1
            changed[name] = missing.pop(0)
    return changed


def _number(name: str) -> tuple[int, str]:
    number = name.rpartition("-")[2]
    return (int(number) if number.isdigit() else 0), name


def decide(
    present: Played, others: Sequence[Played], *, wanted: float, seen_s: float, change_s: float, measured: float
) -> Decision:
    """`wanted`: the share of requests that shall meet their targets. `seen_s`: for how long requests were seen;
    `change_s`: what a change takes. `measured`: the share that did."""
    now = f"{measured:.0%} of the requests met their targets, {present.attainment:.0%} when played again"
    if measured >= wanted:
        return Decision(changes=(), reason=f"{now}: enough")
    if present.attainment >= wanted:
        return Decision(changes=(), reason=f"{now}: it is not for their roles that workers missed them")
    if not others:
        return Decision(changes=(), reason=f"{now}, and there is no other arrangement near by")
    best = max(others, key=lambda other: other.attainment - _price(present, other, seen_s, change_s))
    gain, error = _gain(present, best)
    price = _price(present, best, seen_s, change_s)
    words = f"{now}; with {_words(best.roles)} it would be {best.attainment:.0%}"
    least = price + SURE * error + TRUSTED
    if gain <= least:
        needed = present.attainment + least
        return Decision(changes=(), reason=f"{words}, and must be {needed:.0%} to be worth a change")
    return Decision(changes=_steps(present.roles, best.roles) or (), reason=words)


def _price(present: Played, other: Played, seen_s: float, change_s: float) -> float:
    """Of the requests, those that would come while a worker does nothing, and be served by it."""
    changes = num_changes(present.roles, other.roles)
    return changes * change_s / max(seen_s, MIN_SEEN_S) / max(1, len(present.roles) - 1)


def _gain(present: Played, other: Played) -> tuple[float, float]:
    """The difference of the shares, and its standard error: of parts, for requests near each other fare alike."""
    better = other.met.astype(np.float64) - present.met
    parts = np.array([part.mean() for part in np.array_split(better, min(PARTS, len(better)))])
    return float(better.mean()), float(parts.std(ddof=1) / math.sqrt(len(parts))) if len(parts) > 1 else math.inf


def _steps(roles: Roles, wanted: Roles) -> tuple[tuple[str, str], ...] | None:
    """In an order in which, while each changes, another worker computes each of its phases; None: there is none."""
    changing = [name for name, role in roles.items() if wanted[name] != role]
    for order in permutations(changing):
        now = dict(roles)
        for name in order:
            if not _computes_all([role for other, role in now.items() if other != name]):
                break
            now[name] = wanted[name]
        else:
            return tuple((name, wanted[name]) for name in order) if _computes_all(list(now.values())) else None
    return None


def _computes_all(roles: Sequence[str]) -> bool:
    return all(any(phase in kind_of(role).phases for role in roles) for phase in PHASES)


def _words(roles: Roles) -> str:
    counts = Counter(roles.values())
    return ", ".join(f"{counts[role]} {role}" for role in ROLES if counts[role])
