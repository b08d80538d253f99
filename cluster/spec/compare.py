"""What changes when a running cluster is to have another spec, key by key, and how each key can: it decides nothing
else. The one home of the how is the key itself (`changes` and `fixed` of cluster/spec/knobs.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from cluster.spec.knobs import Change, Spec, change_of
from cluster.spec.model import ClusterSpec, ModelSpec, RouterSpec, TransferSpec
from cluster.spec.pool import PoolSpec
from cluster.spec.sources import shown
from engine.knobs import knobs_of
from worker.roles import ROLES

PARTS = ("router", "transfer", "pools", "models")
DERIVED_KEYS = ("threads", "cpus", "kv_memory", "device", "num_gpus", "gpu_memory_utilization")  # that auto is for
AT_COMMITS = ("speculative_model",)  # kept at the commit at which its workers have it
BETWEEN_HOSTS = {"tcp", "process_group"}
NOW = Change("now")


class KeyChange(NamedTuple):
    key: str
    before: Any
    after: Any
    change: Change

    def shown(self, before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, Any]:
        """As plain data, by the sources of either spec without what is secret."""
        return {
            "key": self.key,
            "before": shown(self.before, before.get(self.key, "")),
            "after": shown(self.after, after.get(self.key, "")),
            "how": self.change.how,
            "why": self.why_not,
        }

    @property
    def why_not(self) -> str:
        """Why it cannot be; empty if it can."""
        if self.change.how != "fixed":
            return ""
        values = (self.before, self.after)
        before, after = ("null" if value is None else repr(shown(value, "")) for value in values)
        return (
            f"{self.key} is {before}, and {after} cannot replace it while the cluster runs: "
            f"{self.change.why_fixed}; leave it, or start another cluster by `kvrelay up`"
        )


def merged(running: tuple[ClusterSpec, ClusterSpec], wanted: ClusterSpec, resolved: ClusterSpec) -> ClusterSpec:
    """The resolved spec that a cluster will have. `running`: as written and as resolved. What auto has come to stays
    what it is where auto is still written: a worker more does not share the machine out anew. Pools that are there keep
    the places that they were started with; those that come have none, and are not pinned, nor are those whose threads
    are others than their cores were for."""
    before = {old.label: (old, own) for old, own in zip(running[0].pools, running[1].pools, strict=True)}
    pools = [
        _merged_pool(*before[pool.label], pool, made) if pool.label in before else _unpinned(pool, made)
        for pool, made in zip(wanted.pools, resolved.pools, strict=True)
    ]
    models = [_model_of(running, model) for model in resolved.models]
    beside = {"models": tuple(models)} if models else {}  # else it would count as given
    first = running[1].model if wanted.model == running[0].model else resolved.model
    host = running[1].router.host if wanted.router.host == running[0].router.host else resolved.router.host
    router = resolved.router.model_copy(update={"host": host})
    return resolved.model_copy(update={"pools": tuple(pools), "router": router, "model": first, **beside})


def _model_of(running: tuple[ClusterSpec, ClusterSpec], wanted: ModelSpec) -> ModelSpec:
    """At the commit at which its workers have it."""
    written, own = ({each.name: each.model for each in spec.models} for spec in running)
    is_as_before = written.get(wanted.name) == wanted.model
    return wanted.model_copy(update={"model": own[wanted.name]}) if is_as_before else wanted


def _merged_pool(old: PoolSpec, own: PoolSpec, wanted: PoolSpec, resolved: PoolSpec) -> PoolSpec:
    as_before = [key for key in (*DERIVED_KEYS, *AT_COMMITS) if getattr(old, key) == getattr(wanted, key)]
    kept = {key: getattr(own, key) for key in as_before if getattr(own, key) != getattr(resolved, key)}
    places = {} if isinstance(wanted.cpus, tuple) else {"replicas": own.replicas}
    pool = resolved.model_copy(update=kept | places)
    return pool if pool.threads == own.threads else _unpinned(wanted, pool)


def _unpinned(wanted: PoolSpec, resolved: PoolSpec) -> PoolSpec:
    """Unless its cores are written."""
    return resolved if wanted.cpus != "auto" else resolved.model_copy(update={"cpus": None})


def compare(before: ClusterSpec, after: ClusterSpec, sizes: Mapping[str, tuple[int, int]]) -> list[KeyChange]:
    """Of resolved specs. `sizes`: by pool, how many it has and shall have."""
    return [
        *_changed("", before, after),
        *_changed("router.", before.router, after.router),
        *_changed("transfer.", before.transfer, after.transfer),
        *_changed_models(before, after),
        *_changed_pools(before, after, sizes),
    ]


def _changed(prefix: str, before: Spec, after: Spec, *, but: tuple[str, ...] = PARTS) -> Iterator[KeyChange]:
    for key in type(after).model_fields:
        was, now = getattr(before, key), getattr(after, key)
        if key not in but and was != now:
            yield KeyChange(f"{prefix}{key}", was, now, _how(after, key, was, now))


def _how(part: Spec, key: str, was: Any, now: Any) -> Change:
    if isinstance(part, RouterSpec) and key == "tokens_file" and None in (was, now):
        return Change("fixed", "who calls now shows a token that would be refused at once")
    if isinstance(part, TransferSpec) and key == "transports" and not _have_common(set(was), set(now)):
        return Change("fixed", "workers that are replaced first could not hand KV over to the others; keep one of both")
    return change_of(type(part), key)


def _have_common(was: set[str], now: set[str]) -> bool:
    """A transport, and one that goes between hosts where both have some."""
    wide = was & BETWEEN_HOSTS, now & BETWEEN_HOSTS
    return bool(was & now) and (bool(wide[0] & wide[1]) or not all(wide))


def _changed_models(before: ClusterSpec, after: ClusterSpec) -> Iterator[KeyChange]:
    old, new = ({each.name: (i, each) for i, each in enumerate(spec.models)} for spec in (before, after))
    for name, (index, model) in new.items():
        if name in old:
            yield from _changed(f"models[{index}].", old[name][1], model)
        else:
            yield KeyChange(f"models[{index}]", None, f"{name}: {model.model}", NOW)
    for name, (index, model) in old.items():
        if name not in new:
            yield KeyChange(f"models[{index}]", f"{name}: {model.model}", None, NOW)


def _changed_pools(
    before: ClusterSpec, after: ClusterSpec, sizes: Mapping[str, tuple[int, int]]
) -> Iterator[KeyChange]:
    old = {pool.label: pool for pool in before.pools}
    for index, pool in enumerate(after.pools):
        was, now = sizes[pool.label]
        if pool.label not in old:
            yield KeyChange(f"pools[{index}]", None, _named(pool, now), NOW)
            continue
        if was != now:
            yield KeyChange(f"pools[{index}].replicas", was, now, change_of(PoolSpec, "replicas"))
        yield from _changed(f"pools[{index}].", old[pool.label], pool, but=("name", "replicas"))
    staying = {pool.label for pool in after.pools}
    for index, pool in enumerate(before.pools):
        if pool.label not in staying:
            yield KeyChange(f"pools[{index}]", _named(pool, sizes[pool.label][0]), None, NOW)


def _named(pool: PoolSpec, size: int) -> str:
    return f"{pool.label}: {size} {pool.role}"


def live_knobs(pool: PoolSpec) -> dict[str, Any]:
    """Of a pool's policy: what its workers take while they compute."""
    own = knobs_of(ROLES[pool.role].load_options())
    return {key: getattr(pool, key) for key in own if _is(pool, key, "now")}


def made_by(spec: ClusterSpec, pool: PoolSpec) -> str:
    """Names what a worker of a resolved spec's pool is started with: one of another name is to be replaced."""
    served = spec.served[pool.model]
    parts = (("", served, PARTS), ("transfer.", spec.transfer, ()), ("pool.", pool, ("name", "replicas")))
    known = {
        f"{prefix}{key}": value
        for prefix, part, but in parts
        for key, value in part.model_dump(mode="json", exclude=set(but)).items()
        if _is(part, key, "rolling")
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]


def _is(part: Spec, key: str, how: str) -> bool:
    return change_of(type(part), key).how == how
