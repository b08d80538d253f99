"""Arrangements are what the workers of a cluster can be: how many, of which roles, with which chunks; and the moves
that lead from one to another.

    nearby     other roles           resized    other chunks of mixed workers
    grown      more workers          shrunk     one worker less

Values only: which arrangement is worth its moves is for policy.py.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice, permutations, product

from worker.options import pool_of
from worker.roles import PHASES, ROLES, kind_of

Roles = Mapping[str, str]  # by worker
RESIZED = (0.25, 0.5, 2.0, 4.0)  # times what a chunk has
LEAST_CHUNK = 16  # tokens
GROWN = (1, 2, 4)  # workers more


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """`chunks`: by mixed worker, its chunk_tokens; who is not named has its own."""

    roles: Roles
    chunks: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        counts, sizes = Counter(self.roles.values()), sorted({*self.chunks.values()})
        words = ", ".join(f"{counts[role]} {role}" for role in ROLES if counts[role])
        return f"{words} (chunks of {' and '.join(map(str, sizes))})" if sizes else words


@dataclass(frozen=True, slots=True, kw_only=True)
class SetRole:
    worker: str
    role: str
    chunk_tokens: int | None = None  # None: as it has them
    force: bool = False  # nobody else computes its phase meanwhile: new requests wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    pool: str
    replicas: int


Move = SetRole | Scale


def nearby(roles: Roles, most_changes: int) -> list[Arrangement]:
    """Those that are so few changes of roles away and can be come to, the nearest first. Of workers of a role the last
    ones change."""
    have = Counter(roles.values())
    near = [range(max(0, have[role] - most_changes), have[role] + most_changes + 1) for role in ROLES]
    found = [
        changed
        for counts in product(*near)
        if sum(counts) == len(roles)
        for changed in (_with_counts(roles, dict(zip(ROLES, counts, strict=True))),)
        if 0 < num_changes(roles, changed) <= most_changes and _in_order(roles, changed) is not None
    ]
    return [Arrangement(roles=changed) for changed in sorted(found, key=lambda changed: num_changes(roles, changed))]


def resized(arrangement: Arrangement, chunks: Mapping[str, int], steps: Mapping[str, int]) -> Iterator[Arrangement]:
    """With chunks of other sizes for all mixed workers that have one size now. `chunks`: by each of them; `steps`:
    likewise, the tokens that a step of it has at most."""
    alike: dict[tuple[int, int], list[str]] = defaultdict(list)
    for name, tokens in chunks.items():
        alike[tokens, steps[name]].append(name)
    for (tokens, most), names in alike.items():
        sizes = {min(most, int(max(tokens, LEAST_CHUNK) * times)) for times in RESIZED}
        for size in sorted(sizes):
            if size >= LEAST_CHUNK and size != tokens:
                yield Arrangement(roles=arrangement.roles, chunks={**arrangement.chunks, **dict.fromkeys(names, size)})


def grown(roles: Roles, devices: Mapping[str, int], most_devices: int) -> Iterator[Arrangement]:
    """With more workers in one pool. `devices`: that each worker takes."""
    left = most_devices - sum(devices.values())
    for pool, names in _pools(roles).items():
        role = pool if pool in ROLES else Counter(roles[name] for name in names).most_common(1)[0][0]
        for more in GROWN:
            if more * devices[names[0]] <= left:
                free = (name for i in count() if (name := f"{pool}-{i}") not in roles)
                yield Arrangement(roles={**roles, **dict.fromkeys(islice(free, more), role)})


def shrunk(roles: Roles) -> Iterator[Arrangement]:
    """With one worker less in one pool that keeps another: the last."""
    for names in _pools(roles).values():
        if len(names) < 2:
            continue
        left = {name: role for name, role in roles.items() if name != max(names, key=_number)}
        if _computes_all(left.values()):
            yield Arrangement(roles=left)


def moves(roles: Roles, wanted: Arrangement) -> tuple[Move, ...] | None:
    """In an order in which, while each worker changes, another one computes each of its phases, if there is such an
    order; else each phase is computed before and after each change. None: there is none of either."""
    have, want = _pools(roles), _pools(wanted.roles)
    scaled = [Scale(pool=pool, replicas=len(want.get(pool, ()))) for pool in have]
    changing = _in_order({name: role for name, role in roles.items() if name in wanted.roles}, wanted.roles)
    if changing is None:
        return None
    new = [name for name in wanted.roles if name not in roles]  # they come as the spec has them
    same = [name for name in wanted.chunks if name not in changing and name not in new]
    return (
        *(scale for scale in scaled if scale.replicas != len(have[scale.pool])),
        *(
            SetRole(worker=n, role=wanted.roles[n], chunk_tokens=wanted.chunks.get(n), force=changing.get(n, False))
            for n in (*new, *changing, *same)
        ),
    )


def num_changes(roles: Roles, changed: Roles) -> int:
    """How many workers of both have another role."""
    return sum(name in changed and changed[name] != role for name, role in roles.items())


def _pools(roles: Roles) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for name in roles:
        found[pool_of(name)].append(name)
    return found


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


def _in_order(roles: Roles, wanted: Roles) -> Mapping[str, bool] | None:
    """Those that change, one after another, and whether a phase has nobody meanwhile; None: there is no order in which
    each has somebody after each change. Prompts may be left waiting so where no order keeps both phases all the time;
    the only one that writes stays, for its answers could go nowhere and be waited for without bound."""
    changing = [name for name, role in roles.items() if wanted[name] != role]
    found: Mapping[str, bool] | None = None
    for order in permutations(changing):
        pauses = _pauses(roles, wanted, order)
        if pauses is not None and not any(pauses.values()):
            return pauses
        if pauses is not None and (found is None or sum(pauses.values()) < sum(found.values())):
            found = pauses
    return found


def _pauses(roles: Roles, wanted: Roles, order: Sequence[str]) -> Mapping[str, bool] | None:
    now, pauses = dict(roles), dict[str, bool]()
    for name in order:
        others = [role for other, role in now.items() if other != name]
        pauses[name] = not _computes_all(others)
        now[name] = wanted[name]
        if not (_computes(others, "decode") and _computes_all(now.values())):
            return None
    return pauses


def _computes(roles: Collection[str], phase: str) -> bool:
    return any(phase in kind_of(role).phases for role in roles)


def _computes_all(roles: Collection[str]) -> bool:
    return all(_computes(roles, phase) for phase in PHASES)
