"""Plans what a PlanRequest asks: opens its catalogs, makes its workload, and has placement/ search.

    PlanRequest -> Catalog (one for each kind of machine) + Workload -> planner.plan | provision.provision -> Plan

It decides nothing about placements. What is written of a plan: kvrelay.plan.folder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kvrelay.bench.workload import source_workload
from kvrelay.plan import amounts
from kvrelay.plan.catalogs import Narrowed, catalogs
from kvrelay.plan.command import command_of
from kvrelay.plan.request import PlanRequest
from placement.catalogs.base import Catalog, Degrees, Offer, PlanError
from placement.catalogs.roofline import RooflineCatalog
from placement.checks.margin import load_margin
from placement.checks.nearest import nearest
from placement.goodput.bounds import decode_bound, prefill_bound
from placement.goodput.targets import Targets
from placement.latency.base import LatencyError
from placement.mixes.machines import MachineType, capped, gpu_name, machine_of, short_name
from placement.mixes.options import Provisioning
from placement.mixes.provision import provision
from placement.plan import Near, Plan, to_json
from placement.search import planner
from placement.search.problem import OnFirst
from placement.search.question import PlanQuestion
from placement.simulator.cluster import SetupError
from placement.workload.positions import beyond_positions
from placement.workload.requests import Workload
from placement.workload.traces import WorkloadError

MAX_WORKERS = 1024
OnProgress = Callable[[str, int, int], None]
ASKED_WRONGLY = (PlanError, LatencyError, SetupError, WorkloadError)


def make_plan(request: PlanRequest, on_progress: OnProgress | None = None, on_first: OnFirst | None = None) -> Plan:
    """`on_first` is told a coarse answer before, where there is one kind of machine. Raises PlanError, LatencyError or
    WorkloadError: what is asked for cannot be, in one sentence."""
    requests = workload_of(request)
    open_catalogs = catalogs(request)
    beyond = _beyond_positions(request, open_catalogs[0], requests)
    told = [f"{beyond}."] if beyond else []
    if len(open_catalogs) > 1:
        planned = _provisioned(request, open_catalogs, requests, on_progress)
        told += _on_whole_nodes(request, open_catalogs)
    else:
        planned = _planned(request, open_catalogs[0], requests, on_progress, on_first)
    near = _nearest(planned, open_catalogs[0], requests) if len(open_catalogs) == 1 else ()
    advice = (*planned.advice[:1], *told, *planned.advice[1:])  # behind the answer
    refused = {**planned.refused, **_never_cut(open_catalogs[0])}
    return replace(
        planned,
        asked=asked(request),
        sources=sources(planned, request),
        nearest=near,
        advice=advice,
        refused=refused,
    )


def _beyond_positions(request: PlanRequest, catalog: Catalog, requests: Workload) -> str:
    """Which requests the model has no positions for. Raises WorkloadError where too many meet no target for that."""
    roofline = _roofline(catalog)
    if roofline is None:
        return ""
    slack = Targets(slo=request.slo, classes=request.request_classes).most_slack
    return beyond_positions(requests, roofline.model, roofline.shape.max_positions, slack)


def _roofline(catalog: Catalog) -> RooflineCatalog | None:
    whole = catalog.of if isinstance(catalog, Narrowed) else catalog
    return whole if isinstance(whole, RooflineCatalog) else None


def _never_cut(catalog: Catalog) -> dict[str, str]:
    """Why TP 1 alone was tried, where that was not asked for."""
    if _roofline(catalog) is not catalog or any(degrees.tp > 1 for degrees in catalog.degrees(catalog.gpus_per_node)):
        return {}
    why = catalog.offer(Degrees(2))
    return {"TP 2": why} if isinstance(why, str) else {}


def _nearest(planned: Plan, catalog: Catalog, requests: Workload) -> tuple[Near, ...]:
    roofline = _roofline(catalog)
    if roofline is None or roofline.machine.unit != "GPU":
        return ()
    return nearest(roofline.shape, roofline.machine, planned.chosen.candidate, float(requests.prompt_len.mean()))


def sources(plan: Plan, request: PlanRequest) -> dict[str, str]:
    """Where the figures come from: the plan's own words, and the margin."""
    told = {key: text for key, text in plan.sources.items() if (key, text) != ("power", "W")}
    if request.margin is None:
        return told
    margin = load_margin(request.margin)
    counted = sum(run.counts for run in margin.runs)
    sentence = (
        f"{request.margin.name}: times were wrong by {margin.error:.0%} in {amounts.count(counted, 'verified run')}"
    )
    return {**told, "margin": sentence}


def asked(request: PlanRequest) -> dict[str, Any]:
    """What was asked for, as plain data: the request's own keys, and its targets in seconds."""
    return {
        **request.model_dump(mode="json", exclude={"classes"}, exclude_none=True),
        "objective": request.wanted,
        "classes": to_json(request.request_classes),
        "command": command_of(request),
    }


def workload_of(request: PlanRequest) -> Workload:
    """The requests whose lengths, and whose times where they are to be kept, the plan is for. Raises WorkloadError,
    PlanError."""
    workload = source_workload(request.workload)
    if len(workload.cancel_after_s) and workload.cancel_after_s.max() <= 0:
        raise PlanError(
            f"{workload.name}: every client leaves at once (cancel_after_s is 0), so there is nothing to answer; give "
            "requests whose clients wait"
        )
    if not workload.has_decode and (len(request.hardware or ()) > 1 or not request.colocated):
        raise PlanError(
            f"{workload.name}: every output is 1 token, which prefill makes, so there is nothing to decode: that is "
            "planned of mixed workers on one kind of hardware; give one kind, and leave colocated on"
        )
    return workload


def _planned(
    request: PlanRequest,
    catalog: Catalog,
    requests: Workload,
    on_progress: OnProgress | None,
    on_first: OnFirst | None,
) -> Plan:
    if request.tensor_parallel is not None:
        _check_degree(request, request.tensor_parallel, catalog)
    _check_room(request, catalog)
    if request.rate is not None:
        _check_rate(request.rate, [catalog], requests, request.slo.tpot_s)
    else:
        _check_workers(request, catalog)
    _check_draft(request, catalog)
    return planner.plan(_question(request), catalog, requests, on_progress=on_progress, on_first=on_first)


def _check_degree(request: PlanRequest, tp: int, catalog: Catalog) -> None:
    """Raises PlanError for a degree that takes more GPUs than there may be."""
    gpus = int(_most_gpus(request, catalog) + 1e-9)
    if not 1 <= gpus < tp:
        return
    given, enough = f"num_gpus is {gpus}", f"num_gpus {tp}"
    if not request.num_gpus:
        given = f"budget is {request.budget:g} USD an hour, which pays for {gpus}"
        enough = f"budget {tp * catalog.cost.usd_per_gpu_hour:g}"
    raise PlanError(
        f"tensor_parallel is {tp}, GPUs of one worker, and {given}; give {enough} or more, or tensor_parallel {gpus} "
        "or less"
    )


def _check_room(request: PlanRequest, catalog: Catalog) -> None:
    """Raises PlanError where none of the degrees that may be tried makes a worker: of the largest why, and what to give
    where other degrees have room. Without a degree of its own a request is told by the planner of all else."""
    most = min(_most_gpus(request, catalog) or math.inf, catalog.gpus_per_node * request.max_pp)
    tried = catalog.degrees(max(request.tensor_parallel or 1, math.floor(most + 1e-9)))
    refusals = [refusal for degrees in tried if isinstance(refusal := catalog.offer(degrees), str)]
    if not tried or len(refusals) < len(tried):
        return
    roofline = _roofline(catalog)
    why = roofline.why_no_room(tried[-1]) if roofline is not None else ""
    if roofline is not None and why and (mend := _roomier(request, roofline)):
        raise PlanError(f"{why}; give {mend}")
    if request.tensor_parallel is not None:
        raise PlanError(refusals[-1])


def _roomier(request: PlanRequest, catalog: RooflineCatalog) -> str:
    """The keys with which degrees may be tried that have room, as they are given; empty: no degrees have."""
    degrees = catalog.smallest_that_fits()
    if degrees is None:
        return ""
    if degrees.pp > request.max_pp:  # stages have to be more anyhow
        degrees = catalog.smallest_that_fits(request.tensor_parallel) or degrees
    gpus, price = _most_gpus(request, catalog), catalog.cost.usd_per_gpu_hour
    keys = []
    if request.tensor_parallel is not None and degrees.tp != request.tensor_parallel:
        keys.append(f"tensor_parallel {degrees.tp}")
    if degrees.pp > request.max_pp:
        keys.append(f"max_pp {degrees.pp}")
    if 0 < gpus < degrees.gpus:
        keys.append(f"num_gpus {degrees.gpus}" if request.num_gpus else f"budget {degrees.gpus * price:g}")
    return f"{' and '.join(keys)} or more" if keys else ""


def _most_gpus(request: PlanRequest, catalog: Catalog) -> float:
    """0: nothing limits them."""
    price = catalog.cost.usd_per_gpu_hour
    return request.num_gpus or (request.budget / price if request.budget and price else 0)


def _check_rate(rate: float, kinds: Sequence[Catalog], requests: Workload, tpot_s: float) -> None:
    """Raises PlanError for a rate that asks for more workers, by arithmetic alone, than one router can know."""
    offers = [catalog.offer(degrees) for catalog in kinds for degrees in catalog.degrees(catalog.gpus_per_node)]
    had = [offer for offer in offers if isinstance(offer, Offer)]
    if not had:
        return  # the planner says why
    prefills = min(math.ceil(rate / prefill_bound(offer, requests)) for offer in had)
    decodes = min(math.ceil(rate / decode_bound(offer, requests, tpot_s)) for offer in had)
    if prefills + decodes > MAX_WORKERS:
        machines = " and ".join(catalog.hardware for catalog in kinds)
        raise PlanError(
            f"rate is {rate:g} requests/s, which takes {prefills + decodes:,} workers of {kinds[0].model} on "
            f"{machines} or more, and a plan has {MAX_WORKERS:,} at most; divide the rate over several clusters"
        )


def _check_workers(request: PlanRequest, catalog: Catalog, smallest: int = 0) -> None:
    """Raises PlanError for more GPUs than make as many of the smallest workers as one router can know. `smallest`: a
    worker's GPUs; 0: those of the catalog's smallest."""
    gpus = _most_gpus(request, catalog)
    known = catalog.degrees(min(math.ceil(gpus), catalog.gpus_per_node * request.max_pp))
    smallest = smallest or min(
        (degrees.gpus for degrees in known if isinstance(catalog.offer(degrees), Offer)), default=0
    )
    if smallest and gpus / smallest > MAX_WORKERS:
        asked = f"num_gpus is {request.num_gpus:,}" if request.num_gpus else f"budget is {request.budget:,} USD an hour"
        raise PlanError(
            f"{asked}, which is for {gpus / smallest:,.0f} workers of {catalog.model} on {catalog.hardware}, and a "
            f"plan has {MAX_WORKERS:,} at most; plan for fewer GPUs and run several clusters"
        )


def _check_draft(request: PlanRequest, catalog: Catalog) -> None:
    """Raises PlanError for a draft model that has no room beside the model on any worker that there is."""
    offers = [catalog.offer(degrees) for degrees in catalog.degrees(catalog.gpus_per_node * request.max_pp)]
    had = [offer for offer in offers if isinstance(offer, Offer)]
    if request.num_speculative_tokens and had and not any(offer.speculation for offer in had):
        raise PlanError(
            f"speculative_model is {request.speculative_model}, which has no room beside {catalog.model} on "
            f"{catalog.hardware}; give a smaller one"
        )


def _question(request: PlanRequest) -> PlanQuestion:
    return PlanQuestion(
        slo=request.slo,
        objective=request.wanted,
        num_gpus=request.num_gpus,
        rate=request.rate,
        budget_usd_per_hour=request.budget,
        classes=request.request_classes,
        max_pp=request.max_pp,
        colocated=request.colocated,
        algorithm=request.algorithm,
        burstiness=request.workload.burstiness,
        is_replay=request.workload.trace_timestamps,
        seed=request.workload.seed,
        processes=request.processes,
        what_if=request.what_if,
    )


def _provisioned(
    request: PlanRequest, kinds: Sequence[Catalog], requests: Workload, on_progress: OnProgress | None
) -> Plan:
    """By the rules of the live cluster, whose machines keep their role."""
    for catalog in kinds:  # a worker is a machine
        _check_workers(request, catalog, _machine_degrees(request, catalog).gpus)
    if request.rate is not None:
        _check_rate(request.rate, kinds, requests, request.slo.tpot_s)
    return provision(
        _question(request),
        machines_of(request, kinds),
        requests,
        options=Provisioning(rules="live", gpus_of=_gpus_of(request, kinds)),
        on_progress=on_progress,
    )


def _on_whole_nodes(request: PlanRequest, kinds: Sequence[Catalog]) -> list[str]:
    """That a machine is one, where nothing else was asked for and a smaller one has room."""
    if request.tensor_parallel is not None:
        return []
    fitting = [{degrees.tp for degrees in _that_fit(catalog) if degrees.pp == 1} for catalog in kinds]
    common = set.intersection(*fitting)
    if not common or min(common) >= max(catalog.gpus_per_node for catalog in kinds):
        return []
    if request.gpus_of:
        workers = " or ".join(f"{_machine_degrees(request, each).gpus} x {each.hardware}" for each in kinds)
        return [f"With several kinds a machine is the smallest worker, {workers}: --tensor-parallel makes larger ones."]
    nodes = " or ".join(f"{catalog.gpus_per_node} x {catalog.hardware}" for catalog in kinds)
    return [
        f"With several kinds a machine is a whole node with one worker, {nodes}: --tensor-parallel {min(common)} makes "
        "smaller ones, which may be cheaper."
    ]


def _that_fit(catalog: Catalog) -> list[Degrees]:
    tried = catalog.degrees(catalog.gpus_per_node)
    return [degrees for degrees in tried if isinstance(catalog.offer(degrees), Offer)]


def machines_of(request: PlanRequest, kinds: Sequence[Catalog]) -> list[MachineType]:
    """What is provisioned of several kinds. Raises PlanError."""
    names = [catalog.hardware for catalog in kinds]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise PlanError(f"name is {twice} in two hardware files; give each its own")
    return [machine for catalog in kinds for machine in _machines(request, catalog, names)]


def _machines(request: PlanRequest, catalog: Catalog, names: Sequence[str]) -> list[MachineType]:
    """A worker of it, of a whole node where nothing else is asked; and the same under each power cap of its file."""
    short, degrees = short_name(catalog.hardware, names), _machine_degrees(request, catalog)
    roofline = _roofline(catalog)
    why = roofline.why_no_room(degrees) if roofline is not None else ""
    fitting = roofline.smallest_that_fits() if roofline is not None and why else None
    if fitting is not None and fitting.pp > 1:  # which machines of several kinds do not have
        raise PlanError(f"{why}; give one kind of hardware, for which max_pp may be {fitting.pp} or more")
    whole = machine_of(catalog, degrees, short=short)
    full = replace(whole, title=gpu_name(catalog.hardware, names))
    caps = roofline.machine.power_caps if roofline is not None else ()
    return [full, *(capped(full, cap) for cap in caps)]


def _machine_degrees(request: PlanRequest, catalog: Catalog) -> Degrees:
    """A whole node, but of GPUs that are counted the fewest that the model fits on, which leave the fewest over."""
    if request.tensor_parallel is not None:
        return Degrees(request.tensor_parallel)
    fitting = [degrees for degrees in _that_fit(catalog) if degrees.pp == 1]
    return fitting[0] if request.gpus_of and fitting else Degrees(catalog.gpus_per_node)


def _gpus_of(request: PlanRequest, kinds: Sequence[Catalog]) -> dict[str, int]:
    counts = request.gpus_of
    return {each.hardware: counts[name] for name, each in zip(request.kinds, kinds, strict=True) if name in counts}
