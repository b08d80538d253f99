"""Plans several models on one kind of GPU, each by itself and all on the same GPUs, and says which is better.

    PlanRequest of each -> make_plan (apart) + find_together -> SharingPlan -> words, tables, cluster.yaml, plan.json

A model is called by its request's file. It decides nothing that placement/search/together.py does not say.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from rich import box
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cluster.spec.load import parse_spec
from cluster.spec.model import SERVED_NAME
from cluster.spec.resolve import why_not_served
from kvrelay.plan import cluster_file
from kvrelay.plan.amounts import count, num, percent, seconds
from kvrelay.plan.catalogs import catalogs
from kvrelay.plan.folder import Saved, write_all
from kvrelay.plan.planning import OnProgress, make_plan, workload_of
from kvrelay.plan.request import PlanRequest
from placement.catalogs.base import PlanError
from placement.catalogs.roofline import RooflineCatalog
from placement.goodput.runner import open_runner
from placement.goodput.targets import Targets
from placement.latency.model_files import loadable_name
from placement.latency.model_shape import FEW_BITS
from placement.plan import Plan, to_json
from placement.search.together import Share, Tenant, Together, find_together
from placement.workload.traffic import Traffic, with_classes

ALIKE = 0.05  # of how far rates may grow: what two sets of requests differ by


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingPlan:
    """`together`: on the same GPUs, or why that cannot be."""

    names: tuple[str, ...]
    requests: tuple[PlanRequest, ...]
    apart: tuple[Plan, ...]
    together: Together | str

    @property
    def gpus_apart(self) -> int:
        return sum(plan.chosen.candidate.gpus for plan in self.apart)

    @property
    def growth_apart(self) -> float:
        """By how much all rates may grow where each has its own."""
        rates = [request.rate or 0.0 for request in self.requests]
        return min(plan.chosen.goodput.value / rate for plan, rate in zip(self.apart, rates, strict=True))

    @property
    def shared(self) -> Together | None:
        """Where that is the answer: on fewer GPUs, or with more room to grow on as many."""
        together = self.together
        if isinstance(together, str):
            return None
        is_as_many = together.growth_gpus == self.gpus_apart
        is_roomier = is_as_many and together.growth > self.growth_apart * (1 + ALIKE)
        return together if together.gpus < self.gpus_apart or is_roomier else None

    @property
    def usd_per_hour(self) -> float:
        apart = sum(plan.chosen.usd_per_hour for plan in self.apart)
        return apart * self.shared.gpus / self.gpus_apart if self.shared is not None else apart


def plan_together(requests: Mapping[str, PlanRequest], on_progress: OnProgress | None = None) -> SharingPlan:
    """Of two models or more, by name. Raises PlanError and what make_plan raises."""
    for name, request in requests.items():
        _check(name, request)
    asked = list(requests.values())
    if len({request.hardware for request in asked}) > 1:
        kinds = ", ".join(f"{name} {' and '.join(request.hardware or ())}" for name, request in requests.items())
        raise PlanError(f"models that may share GPUs have one kind of them, and hardware is {kinds}; give the same")
    tenants = [_tenant(name, request) for name, request in requests.items()]
    apart = tuple(make_plan(request, _named(on_progress, name)) for name, request in requests.items())
    most_gpus = sum(plan.chosen.candidate.gpus for plan in apart)
    with open_runner(asked[0].processes, on_progress) as runner:
        tps = {request.tensor_parallel for request in asked if request.tensor_parallel is not None}
        together = find_together(tenants, most_gpus, runner, asked[0].workload.seed, tps)
    return SharingPlan(names=tuple(requests), requests=tuple(asked), apart=apart, together=together)


def named_by_file(paths: Sequence[Path]) -> list[str]:
    """What requests will call each model. Raises PlanError."""
    names = [path.stem for path in paths]
    for name, number in Counter(names).items():
        if number > 1:
            raise PlanError(f"{number} files are called {name}, by which a model is named; give each a name of its own")
        if not SERVED_NAME.fullmatch(name):
            raise PlanError(f"{name!r} is a file's name, by which a model is named; give letters, digits and . _ -")
    return names


def _check(name: str, request: PlanRequest) -> None:
    if request.rate is None:
        raise PlanError(f"{name}: rate is missing; several models are planned for the rate of each")
    if foreign := request.changed(("num_speculative_tokens", *FEW_BITS)):
        asked = getattr(request, foreign[0])
        raise PlanError(f"{name}: {foreign[0]} is {asked}, and several models are planned without; take it out")
    if request.latency_kind != "roofline" or len(request.hardware or ()) != 1:
        raise PlanError(f"{name}: several models are planned on one kind of GPU, by a roofline; give hardware alone")
    if request.margin is not None:
        raise PlanError(f"{name}: a margin is of one model; plan it alone, or take it out")
    if request.workload.trace_timestamps:
        raise PlanError(f"{name}: trace_timestamps are of one trace; give burstiness, so that all last as long")
    if request.what_if:
        raise PlanError(f"{name}: what_if is of one model; plan it alone, or take it out")


def _tenant(name: str, request: PlanRequest) -> Tenant:
    [catalog] = catalogs(_all_degrees(request))
    assert isinstance(catalog, RooflineCatalog), "it was checked"
    assert request.rate is not None, "it was checked"
    source = with_classes(workload_of(request), request.request_classes, request.workload.seed)
    workload = request.workload
    traffic = Traffic(source=source, burstiness=workload.burstiness, is_replay=workload.trace_timestamps)
    targets = Targets(slo=request.slo, classes=request.request_classes)
    return Tenant(name=name, catalog=catalog, traffic=traffic, targets=targets, rate=request.rate)


def _all_degrees(request: PlanRequest) -> PlanRequest:
    """Without what narrows a catalog: degrees that all can have are tried."""
    return request.model_copy(update={"tensor_parallel": None})


def _named(on_progress: OnProgress | None, name: str) -> OnProgress | None:
    if on_progress is None:
        return None
    return lambda what, done, total: on_progress(f"{name}: {what}", done, total)


# in words


def sentences(plan: SharingPlan) -> list[str]:
    """The answer, and what it is worth."""
    each = ", ".join(
        f"{name} {apart.chosen.candidate.gpus}" for name, apart in zip(plan.names, plan.apart, strict=True)
    )
    apart = f"{count(plan.gpus_apart, 'GPU')} ({each})"
    together = plan.together
    if isinstance(together, str):
        return [f"Give each model GPUs of its own, {apart}: {together}."]
    reason = (
        "bursts of one use what the others leave"
        if together.growth > plan.growth_apart
        else "steps of one wait for the others', and none are batched together"
    )
    grow = (
        f"On {count(together.growth_gpus, 'GPU')}, all rates could grow to {num(together.growth)} times together and "
        f"to {num(plan.growth_apart)} times apart: {reason}."
    )
    if plan.shared is None:
        why = f"together they take {count(together.gpus, 'GPU')}, each with a worker of every model"
        return [f"Give each model GPUs of its own, {apart}: {why}.", grow]
    groups = f"in groups of {together.degrees.gpus} with a worker of each model"
    return [f"Let the models share {count(together.gpus, 'GPU')}, {groups}, where apart they take {apart}.", grow]


def tables(plan: SharingPlan) -> Iterator[RenderableType]:
    yield Padding(Text(" ".join(sentences(plan))), (1, 0, 1, 0))
    table = Table(title="Apart", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("model", "requests/s", "placement", "GPUs", "meet both"):
        table.add_column(column, justify="left" if column in ("model", "placement") else "right", overflow="fold")
    for name, apart in zip(plan.names, plan.apart, strict=True):
        candidate, at = apart.chosen.candidate, apart.at_rate
        table.add_row(name, num(at.rate), candidate.label, f"{candidate.gpus}", percent(at.attainment.value))
    yield table
    if not isinstance(plan.together, str):
        yield _together(plan.together)


def _together(together: Together) -> Table:
    title = f"Together, {together.groups} x {together.degrees}, each with a mixed worker of every model"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("model", "of memory", "KV tokens", "chunks", "TTFT P90", "TPOT P90", "meet both"):
        table.add_column(column, justify="left" if column == "model" else "right", overflow="fold")
    for share in together.shares:
        pool, point = share.pool, share.point
        table.add_row(
            share.name,
            percent(share.memory),
            f"{pool.num_pages * pool.page_size:,}",
            f"{pool.chunk_tokens:,}",
            seconds(point.ttft_s["90"].value),
            seconds(point.tpot_s["90"].value),
            percent(point.attainment.value),
        )
    return table


# what is kept


def as_object(plan: SharingPlan) -> dict[str, Any]:
    answer = {
        "is_shared": plan.shared is not None,
        "gpus": plan.shared.gpus if plan.shared is not None else plan.gpus_apart,
        "gpus_apart": plan.gpus_apart,
        "growth_apart": plan.growth_apart,
        "usd_per_hour": plan.usd_per_hour,
        "words": sentences(plan),
    }
    apart = {name: to_json(each) for name, each in zip(plan.names, plan.apart, strict=True)}
    return {"kvrelay": version("kvrelay"), "answer": answer, "apart": apart, "together": to_json(plan.together)}


def save(plan: SharingPlan, folder: Path) -> Saved:
    """cluster.yaml and plan.json. Raises PlanError where nothing can be written."""
    data, notes = spec_data(plan), list[str]()
    if refusal := why_not_served(parse_spec(data)):  # workers of several processes that share GPUs
        data = spec_data(replace(plan, together=refusal))
        notes = [f"cluster.yaml has each model on GPUs of its own, as kvrelay up does not serve groups: {refusal}"]
    loosest = "Each request says what its model wants (slo_ttft_ms, slo_tpot_ms); the router has the loosest of all."
    told = "\n".join(f"# {line}" for line in (*sentences(plan), loosest, *(f"Note: {note}" for note in notes)))
    body = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=cluster_file.RULE)
    written = {"cluster.yaml": f"{told}\n{body}", "plan.json": json.dumps(as_object(plan), indent=1) + "\n"}
    return Saved(files=write_all(folder, written), notes=tuple(notes))


def spec_data(plan: SharingPlan) -> dict[str, Any]:
    """The cluster's spec: the first model is its own, and the others stand beside."""
    first, *others = zip(plan.names, plan.requests, strict=True)
    shares = {share.name: share for share in plan.shared.shares} if plan.shared is not None else {}
    pools = []
    for name, apart in zip(plan.names, plan.apart, strict=True):
        model = {} if name == first[0] else {"model": name}
        pools += [
            {**pool, "name": f"{cluster_file.cluster_name(name)[:28]}-{pool.get('name') or pool['role']}", **model}
            for pool in ([_shared_pool(shares[name], len(shares))] if shares else _own_pools(apart))
        ]
    return {
        "name": cluster_file.cluster_name("-".join(plan.names)),
        "model": _loaded(first[1]),
        "served_model_name": first[0],
        **({"router": targets} if (targets := _targets(plan)) else {}),
        "models": [{"name": name, "model": _loaded(request)} for name, request in others],
        "pools": pools,
    }


def _targets(plan: SharingPlan) -> dict[str, float]:
    """The loosest of all: a router tells them to all models where requests say nothing."""
    slos = [Targets(slo=request.slo, classes=request.request_classes).loosest for request in plan.requests]
    wanted_ms = {
        "slo_ttft_ms": 1e3 * max(slo.ttft_s for slo in slos),
        "slo_tpot_ms": 1e3 * max(slo.tpot_s for slo in slos),
    }
    return {key: ms for key, ms in wanted_ms.items() if ms < math.inf}


def _loaded(request: PlanRequest) -> str:
    assert request.model is not None, "it was checked"
    return loadable_name(request.model)


def _own_pools(apart: Plan) -> list[dict[str, Any]]:
    placement = cluster_file.to_run(apart) or apart.chosen
    pools: list[dict[str, Any]] = cluster_file.spec_data(placement, "", None, has_gpus=True)["pools"]
    return pools


def _floored(share: float) -> float:
    """Lest all of them together are more than there is."""
    return math.floor(share * 1000) / 1000


def _shared_pool(share: Share, num_models: int) -> dict[str, Any]:
    """A worker in each group, with its part of the GPU."""
    pool = cluster_file.pool_data(share.pool, "", None, has_gpus=True)
    part = {
        "num_gpus": _floored(share.pool.degrees.gpus / num_models),
        "gpu_memory_utilization": _floored(share.memory),
    }
    return pool | part
