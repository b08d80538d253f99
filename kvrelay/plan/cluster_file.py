"""Writes the cluster's spec of a plan, for `kvrelay up`: the pools that were chosen, with the limits they were
simulated with. It chooses nothing.

Where the plan's answer is a published system's machines, which kvrelay does not serve, or has a worker on several
nodes, the best two pools that it does are written.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import yaml

from kvrelay.plan import amounts, words
from placement.build.from_offers import targets_told
from placement.latency.model_shape import ModelShape
from placement.latency.tensor_parallel import why_not_cut
from placement.mixes.machines import gpu_name
from placement.plan import Goodput, Plan, PoolPlan, Slo

RULE = 100  # a comment line's length
PLACED = 0.001  # of a resource that a host has one of: all workers there take less


def to_run(plan: Plan, most_gpus: float = math.inf, shape: ModelShape | None = None) -> Goodput | None:
    """What kvrelay can serve: the chosen placement, or the best one with two pools, or any; None where there is none.
    `most_gpus`: of a node, as a worker's processes are on one host. `shape`: what is cut; None: as was measured."""
    served = [
        each
        for each in (plan.chosen, *plan.tried)
        if each.candidate.is_served and each.goodput.value > 0 and not why_not_started(each, most_gpus, shape)
    ]
    if served[:1] == [plan.chosen]:
        return plan.chosen
    return words.best_of(served, "two pools") or next(iter(served), None)


def why_not_started(placement: Goodput, most_gpus: float, shape: ModelShape | None = None) -> str:
    """Where a worker's stages would be on several nodes, or a published system cut what the engine does not, as they
    may be planned; empty where nothing stands against it."""
    for pool in placement.candidate.pools:
        if shape is not None and (why := why_not_cut(shape, pool.degrees.tp)):
            return why
        if pool.degrees.gpus > most_gpus:
            return (
                f"a worker's processes are on one host, and {pool.role} workers of {pool.degrees} want "
                f"{pool.degrees.gpus} GPUs, where a node has {most_gpus:g}"
            )
    return ""


def spec_data(
    placement: Goodput,
    model: str,
    shape: ModelShape | None,
    *,
    has_gpus: bool,
    slo: Slo | None = None,
    name: str = "planned",
    narrowed: Mapping[str, str] = MappingProxyType({}),
    assumed: Sequence[Mapping[str, Any] | None] = (),
    speculative_model: str = "",
    draft_bytes_per_token: int = 0,
) -> dict[str, Any]:
    """The spec of one of its clusters as plain data. `shape`: as workers have the model; None: each has its own default
    of KV. `slo`: what a request wants that does not say; None: nothing. `narrowed`: dtype, quantization and kv_dtype of
    the workers, where they are not the model's. `assumed`: by pool, cluster.spec.assumed.Assumed as plain
    data. `speculative_model`: of pools that guess ahead; empty: prompt lookup; `draft_bytes_per_token`: of its KV."""
    pools = placement.one_cluster.pools
    page_sizes = {pool.page_size for pool in pools}
    assert len(page_sizes) == 1, "workers that exchange KV have one page size"
    labels = _labels(pools)
    targets = targets_told(placement.candidate, slo)
    places = accelerators(pools) if has_gpus else [""] * len(pools)
    return {
        "name": name,
        "model": model,
        **{key: narrowed[key] for key in ("dtype", "quantization") if narrowed.get(key)},
        "page_size": page_sizes.pop(),
        **({"router": targets} if targets else {}),
        "pools": [
            pool_data(pool, label, shape, has_gpus=has_gpus)
            | ({"resources": {place: PLACED}} if place else {})
            | ({"kv_dtype": narrowed["kv_dtype"]} if narrowed.get("kv_dtype") else {})
            | guessing_data(pool, shape, speculative_model, draft_bytes_per_token)
            | ({"assumed": dict(told)} if told else {})
            for pool, label, place, told in zip(pools, labels, places, assumed or [None] * len(pools), strict=True)
        ],
    }


def _labels(pools: Sequence[PoolPlan]) -> list[str]:
    """A pool's name where its role alone does not tell it from another: prefill-h100."""
    roles = [pool.role for pool in pools]
    return ["" if roles.count(pool.role) == 1 else f"{pool.role}-{i}" for i, pool in enumerate(pools)]


def accelerators(pools: Sequence[PoolPlan]) -> list[str]:
    """By pool, the Ray resource that is on hosts with its kind of GPU alone, which Ray finds by itself; empty where all
    are of one kind, or it does not tell them apart."""
    kinds = {hardware: gpu_name(hardware) for hardware in map(words.hardware_words, pools)}
    if len(kinds) == 1 or len(set(kinds.values())) < len(kinds):
        return [""] * len(pools)
    return [f"accelerator_type:{kinds[words.hardware_words(pool)]}" for pool in pools]


def pool_data(pool: PoolPlan, label: str, shape: ModelShape | None, *, has_gpus: bool) -> dict[str, Any]:
    """As `spec_data` has it."""
    data: dict[str, Any] = {"name": label} if label else {}
    data |= {"role": pool.role, "replicas": pool.replicas}
    data |= {"tensor_parallel": pool.degrees.tp} if pool.degrees.tp > 1 else {}
    data |= {"pipeline_parallel": pool.degrees.pp} if pool.degrees.pp > 1 else {}
    data |= {"threads": pool.degrees.threads} if pool.degrees.threads else {}
    if has_gpus and pool.degrees.unit == "GPU":
        data["num_gpus"] = pool.degrees.gpus
    if shape is not None:
        data["kv_memory"] = _kv_memory(pool, shape)
    if pool.role != "decode":
        pack_tokens = pool.pack_tokens or pool.max_batch_tokens  # steps were simulated filled to the brim
        data |= {"max_batch_tokens": pool.max_batch_tokens, "pack_tokens": pack_tokens}
    if pool.role == "mixed":
        data["chunk_tokens"] = pool.chunk_tokens
    return data if pool.role == "prefill" else data | {"max_batch_size": pool.max_batch_size}


def guessing_data(pool: PoolPlan, shape: ModelShape | None, model: str, draft_bytes_per_token: int) -> dict[str, Any]:
    """Of a pool that guesses ahead; a draft model's KV is in kv_memory, too."""
    if not pool.num_speculative_tokens:
        return {}
    data: dict[str, Any] = {"num_speculative_tokens": pool.num_speculative_tokens}
    if model:
        data["speculative_model"] = model
    if shape is not None:
        data["kv_memory"] = _kv_memory(pool, shape, draft_bytes_per_token)
    return data


def _kv_memory(pool: PoolPlan, shape: ModelShape, draft_bytes_per_token: int = 0) -> int:
    """Of a worker; a draft model's KV is held once, as it is whole on one GPU."""
    token_bytes = shape.worker_kv_bytes_per_token(pool.degrees.tp) + draft_bytes_per_token
    return pool.num_pages * pool.page_size * token_bytes


def spec_text(plan: Plan, placement: Goodput, data: Mapping[str, Any], command: str) -> str:
    """The YAML with how it came about above it."""
    lines = [f"Planned by kvrelay: {words.placement_words(placement.candidate)}."]
    if placement is not plan.chosen:
        lines.append(
            f"The plan's answer is {words.placement_words(plan.chosen.candidate)}, which kvrelay does not serve. "
            f"This is the best placement {'with two pools' if placement.candidate.kind == 'two pools' else 'of those'}."
        )
    lines.append(f"Meets {words.goal(plan)} up to {amounts.between(placement.goodput)} requests/s.")
    if placement.copies > 1:
        lines.append(
            f"This is one of {placement.copies} such clusters, each with its share of the requests: start as many, "
            "every pair in its nodes."
        )
    pools = placement.candidate.pools
    if len({pool.hardware for pool in pools}) > 1:
        lines += [
            f"The pool {label or pool.role} stands on {pool.hardware}{'' if place else '; place it with resources'}."
            for pool, label, place in zip(pools, _labels(pools), accelerators(pools), strict=True)
        ]
    if plan.asked.get("classes") and data.get("router"):
        lines.append("Each request says what its class wants (slo_ttft_ms, slo_tpot_ms); the router has the loosest.")
    lines += [f"From {key}: {text}." for key, text in plan.sources.items()]
    comment = "\n".join(f"# {part}" for line in lines for part in _wrapped(line.replace("..", ".")))
    again = "\n".join(f"#   {line}" for line in command.splitlines())
    body = yaml.safe_dump(dict(data), sort_keys=False, allow_unicode=True, width=RULE)
    return f"{comment}\n# Asked by:\n{again}\n{body}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), RULE, break_long_words=False, break_on_hyphens=False)


def cluster_name(model: str) -> str:
    """What a cluster of this model may be called: small letters, digits and -."""
    short = re.sub(r"[^a-z0-9]+", "-", model.rpartition("/")[2].lower()).strip("-")[:40].strip("-")
    return short or "planned"
