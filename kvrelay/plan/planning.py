"""Plans what a PlanRequest asks: opens its catalogs, makes its workload, and has placement/ search.

    PlanRequest -> Catalog (one for each kind of machine) + Workload -> planner.plan | provision.provision -> Plan

It decides nothing about placements. `save` writes a plan's folder: cluster.yaml, plan.json, report.html, PNGs.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from kvrelay.bench.workload import fit, random_shapes
from kvrelay.plan import cluster_file as cluster
from kvrelay.plan import words
from kvrelay.plan.request import PlanRequest
from placement.catalogs.base import Catalog, Degrees, MachineCost, Offer, PlanError
from placement.catalogs.roofline import RooflineCatalog, open_catalog
from placement.checks.margin import load_margin
from placement.goodput.bounds import decode_bound, prefill_bound
from placement.latency.base import LatencyError
from placement.latency.hardware import load_hardware
from placement.latency.model_shape import load_shape, loadable_name
from placement.latency.profile import ProfileCatalog
from placement.latency.profile_file import read_profile
from placement.mixes.machines import MachineType, PowerCap, capped, machine_of
from placement.mixes.provision import Provisioning, provision
from placement.papers.distserve.coefficients import DistServeCatalog
from placement.plan import Plan, to_json
from placement.search import planner
from placement.simulator.cluster import SetupError
from placement.workload.requests import Workload, from_shapes
from placement.workload.traces import WorkloadError, read_trace

MAX_WORKERS = 1024
RANDOM_REQUESTS = 4096  # of which the search draws
Progress = Callable[[str, int, int], None]
ASKED_WRONGLY = (PlanError, LatencyError, SetupError, WorkloadError)


# From a request to a plan


def make_plan(request: PlanRequest, on_progress: Progress | None = None) -> Plan:
    """Raises PlanError, LatencyError or WorkloadError: what is asked for cannot be, in one sentence."""
    requests = workload(request)
    open_catalogs = catalogs(request)
    if len(open_catalogs) > 1:
        found = _provisioned(request, open_catalogs, requests, on_progress)
    else:
        found = _planned(request, open_catalogs[0], requests, on_progress)
    return replace(found, asked=asked(request), sources=sources(found, request))


def sources(plan: Plan, request: PlanRequest) -> dict[str, str]:
    """Where the figures come from: the plan's own words, and the margin."""
    told = {key: text for key, text in plan.sources.items() if (key, text) != ("power", "W")}
    if request.margin is None:
        return told
    margin = load_margin(request.margin)
    counted = sum(run.counts for run in margin.runs)
    found = f"{request.margin.name}: times were wrong by {margin.error:.0%} in {words.count(counted, 'verified run')}"
    return {**told, "margin": found}


def asked(request: PlanRequest) -> dict[str, Any]:
    """What was asked for, as plain data: the request's own keys, and its targets in seconds."""
    return {
        **request.model_dump(mode="json", exclude={"classes"}, exclude_none=True),
        "objective": request.wanted,
        "classes": to_json(request.request_classes),
        "command": request.command(),
    }


def workload(request: PlanRequest) -> Workload:
    """The requests whose lengths, and whose times where they are to be kept, the plan is for. Raises WorkloadError,
    PlanError."""
    found = _requests(request)
    if found.output_len.max() < 2:
        raise PlanError(
            f"{found.name}: every output is 1 token, which prefill makes, so there is nothing to decode; "
            "give requests with outputs of 2 tokens or more"
        )
    return found


def _requests(request: PlanRequest) -> Workload:
    if request.trace is not None:
        shapes = read_trace(request.trace, request.num_prompts)
        name = request.trace.name
        fitted = fit(
            shapes,
            scale=request.trace_scale,
            max_input_len=request.max_input_len,
            max_output_len=request.max_output_len,
        )
        return from_shapes(fitted, name)
    input_len, output_len = request.random_input_len, request.random_output_len
    assert input_len is not None
    assert output_len is not None
    rng = np.random.default_rng(request.seed)
    shapes = random_shapes(RANDOM_REQUESTS, input_len, output_len, request.random_range_ratio, 0, rng)
    return from_shapes(shapes, f"random lengths of {input_len} and {output_len} tokens")


def catalogs(request: PlanRequest) -> list[Catalog]:
    """One for each kind of machine, narrowed to what the request allows."""
    found = _catalogs(request)
    error = load_margin(request.margin).error if request.margin is not None else 0.0
    if not error and request.tensor_parallel is None:
        return found
    return [Narrowed(of=catalog, tp=request.tensor_parallel, error=error) for catalog in found]


def _catalogs(request: PlanRequest) -> list[Catalog]:
    if request.latency_kind == "profile":
        return [_measured(request)]
    assert request.model is not None
    if request.latency_kind == "distserve":
        return [DistServeCatalog(name=request.model, **_limits(request))]
    options = {"max_pp": request.max_pp, **_limits(request)}
    return [open_catalog(request.model, name, **options) for name in request.hardware or ()]


def _limits(request: PlanRequest) -> dict[str, Any]:
    limits = {"max_batch_tokens": request.max_batch_tokens, "max_batch_size": request.max_batch_size}
    return {key: value for key, value in limits.items() if value is not None}


def _measured(request: PlanRequest) -> Catalog:
    assert request.profile is not None
    cost = load_hardware(request.hardware[0]).cost() if request.hardware else None
    return ProfileCatalog(read_profile(request.profile), cost=cost)


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrowed:
    """A catalog with one tensor-parallel degree alone, and with the error that was found of its times where that is
    larger than its own."""

    of: Catalog
    tp: int | None
    error: float

    @property
    def model(self) -> str:
        return self.of.model

    @property
    def hardware(self) -> str:
        return self.of.hardware

    @property
    def gpus_per_node(self) -> int:
        return self.of.gpus_per_node

    @property
    def cost(self) -> MachineCost:
        return self.of.cost

    def degrees(self, max_gpus: int) -> Sequence[Degrees]:
        if self.tp is None:
            return self.of.degrees(max_gpus)
        found = [degrees for degrees in self.of.degrees(max_gpus) if degrees.tp == self.tp]
        return found or ([Degrees(self.tp)] if self.tp <= max_gpus else [])  # its offer says why there is none

    def offer(self, degrees: Degrees, *, within_node: bool = True) -> Offer | str:
        found = self.of.offer(degrees, within_node=within_node)
        return found if isinstance(found, str) else replace(found, error=max(found.error, self.error))


def _planned(request: PlanRequest, catalog: Catalog, requests: Workload, on_progress: Progress | None) -> Plan:
    if request.tensor_parallel is not None:
        refusal = catalog.offer(Degrees(request.tensor_parallel))
        if isinstance(refusal, str):
            raise PlanError(refusal)
    if request.rate is not None:
        _check_rate(request.rate, [catalog], requests, request.slo.tpot_s)
    else:
        _check_workers(request, catalog)
    return planner.plan(_ask(request), catalog, requests, on_progress=on_progress)


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
    price = catalog.cost.usd_per_gpu_hour
    gpus = request.num_gpus or (request.budget / price if request.budget and price else 0)
    known = catalog.degrees(min(math.ceil(gpus), catalog.gpus_per_node * request.max_pp))
    smallest = smallest or min((one.gpus for one in known if isinstance(catalog.offer(one), Offer)), default=0)
    if smallest and gpus / smallest > MAX_WORKERS:
        asked = f"num_gpus is {request.num_gpus:,}" if request.num_gpus else f"budget is {request.budget:,} USD an hour"
        raise PlanError(
            f"{asked}, which is for {gpus / smallest:,.0f} workers of {catalog.model} on {catalog.hardware}, and a "
            f"plan has {MAX_WORKERS:,} at most; plan for fewer GPUs and run several clusters"
        )


def _ask(request: PlanRequest) -> planner.Ask:
    return planner.Ask(
        slo=request.slo,
        objective=request.wanted,
        num_gpus=request.num_gpus,
        rate=request.rate,
        budget_usd_per_hour=request.budget,
        classes=request.request_classes,
        max_pp=request.max_pp,
        colocated=request.colocated,
        algorithm=request.algorithm,
        burstiness=request.burstiness,
        is_replay=request.trace_timestamps,
        seed=request.seed,
        processes=request.processes,
    )


def _provisioned(
    request: PlanRequest, kinds: Sequence[Catalog], requests: Workload, on_progress: Progress | None
) -> Plan:
    """By the rules of the live cluster, whose machines keep their role."""
    for catalog in kinds:  # a worker is a machine
        _check_workers(request, catalog, request.tensor_parallel or catalog.gpus_per_node)
    if request.rate is not None:
        _check_rate(request.rate, kinds, requests, request.slo.tpot_s)
    machines = [machine for catalog in kinds for machine in _machines(request, catalog, [k.hardware for k in kinds])]
    return provision(_ask(request), machines, requests, options=Provisioning(rules="live"), on_progress=on_progress)


def _machines(request: PlanRequest, catalog: Catalog, names: Sequence[str]) -> list[MachineType]:
    """A worker of it, of a whole node where nothing else is asked; and the same under each power cap of its file."""
    short = short_name(catalog.hardware, names)
    whole = machine_of(catalog, Degrees(request.tensor_parallel or catalog.gpus_per_node), short=short)
    full = replace(whole, title=gpu_name(catalog.hardware))
    roofline = catalog.of if isinstance(catalog, Narrowed) else catalog
    caps = roofline.machine.power_caps if isinstance(roofline, RooflineCatalog) else ()
    return [
        full,
        *(
            capped(full, PowerCap(share=cap.power, prompt_factor=cap.prefill_time, token_factor=cap.decode_time))
            for cap in caps
        ),
    ]


def gpu_name(hardware: str) -> str:
    """H100 of "NVIDIA H100 SXM 80 GB"; the first word where none looks like it."""
    found = re.search(r"\b[A-Z]+\d+\w*", hardware)
    return found[0] if found else hardware.split()[0]


def short_name(hardware: str, among: Sequence[str]) -> str:
    """H of "NVIDIA H100 SXM 80 GB" where no other begins with it, else H100."""
    own = gpu_name(hardware)
    alike = [name for name in among if gpu_name(name)[:1] == own[:1]]
    return own[:1].upper() if len(alike) == 1 else own


# From a plan to a folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """`notes`: sentences that a person should read, about what was written."""

    files: tuple[Path, ...]
    notes: tuple[str, ...]


def save(plan: Plan, request: PlanRequest, folder: Path) -> Saved:
    """Writes the folder; files of the same names are replaced. Raises PlanError where nothing can be written."""
    from kvrelay.plan import plots as plan_plots
    from kvrelay.plan import report as plan_report

    spec, no_spec, notes = cluster_spec(plan, request)
    context = plan_report.Context(
        title=title(plan, request),
        asked=asked_words(plan, request),
        commands=_commands(plan, request, has_spec=bool(spec)),
        spec=spec,
        no_spec=no_spec,
    )
    wide, narrow = plan_plots.figures(plan, "wide"), plan_plots.figures(plan, "narrow")
    written: dict[str, str | bytes] = {
        "plan.json": json.dumps(plan_object(plan), indent=1) + "\n",
        "report.html": plan_report.report(plan, context, wide, narrow),
    }
    if spec:
        written["cluster.yaml"] = spec
    written |= {f"{name}.png": plan_plots.png(figure) for name, figure in wide.items()}
    return Saved(files=tuple(_write(folder, name, content) for name, content in written.items()), notes=tuple(notes))


def check_folder(folder: Path) -> None:
    """Raises PlanError where nothing can be written, before a search that would be in vain."""
    at = folder.resolve()
    while not at.exists():
        at = at.parent
    if not at.is_dir() or not os.access(at, os.W_OK | os.X_OK):
        raise PlanError(f"--out is {folder}, and {at} is no folder that can be written to; give another")


def _write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise PlanError(f"--out is {folder}, where {name} cannot be written ({error.strerror}); give another") from None
    return path


def plan_object(plan: Plan) -> dict[str, Any]:
    """Everything, as plain data: the plan's own fields, and in `answer` what a program wants first."""
    chosen = plan.chosen
    answer = {
        "placement": words.label(chosen.candidate),
        "is_disaggregated": plan.is_disaggregated,
        "gpus": chosen.candidate.gpus,
        "goodput": to_json(chosen.goodput),
        "goodput_per_gpu": chosen.per_gpu,
        "usd_per_hour": chosen.usd_per_hour,
        "watts": chosen.watts,
        "words": words.answer(plan),
    }
    return {"kvrelay": version("kvrelay"), "answer": answer, **to_json(plan)}


def cluster_spec(plan: Plan, request: PlanRequest) -> tuple[str, str, list[str]]:
    """(the spec's text, or why there is none, sentences to tell)."""
    found = cluster.to_run(plan)
    if found is None:
        return "", "There is none: only colocated workers meet the targets, and kvrelay serves two pools.", []
    model, kv_bytes = _model_and_kv(request, plan)
    name = cluster.cluster_name(model)
    data = cluster.spec_data(found, model, kv_bytes, has_gpus=request.latency_kind != "profile", name=name)
    refusal = cluster.checked(data)
    text = cluster.spec_text(plan, found, data, request.command())
    if isinstance(refusal, str):
        note = f"kvrelay up of this version does not take the spec yet: {refusal}"
        return f"# Note: {note}\n{text}", "", [note]
    return text, "", []


def _model_and_kv(request: PlanRequest, plan: Plan) -> tuple[str, dict[str, int] | None]:
    """What workers load, and the KV bytes of a token in a worker of each hardware; None where no config tells."""
    model = _loaded_model(request)
    try:
        kv_bytes = int(load_shape(request.model or model).kv_bytes_per_token)
    except PlanError:
        return model, None
    kinds = {pool.hardware for found in plan.tried for pool in found.candidate.pools}
    return model, dict.fromkeys(kinds, kv_bytes)


def _loaded_model(request: PlanRequest) -> str:
    """A model's directory by its full path, or its hub id."""
    given = request.model
    if given is None:
        assert request.profile is not None
        given = str(read_profile(request.profile).model.get("name", "model"))
    return loadable_name(given)


def _commands(plan: Plan, request: PlanRequest, *, has_spec: bool) -> list[tuple[str, str]]:
    """(sentence, what to type). Two pools can be run and verified; of colocated workers kvrelay has none."""
    again = ("Plan again:", request.command())
    if not has_spec:
        return [again]
    if not plan.is_disaggregated:
        split = "kvrelay serves two pools. If that is what you want all the same, this starts the best split:"
        return [(split, "kvrelay up cluster.yaml"), again]
    verify = "Play the same workload against it, and keep the error found as the next plan's margin:"
    return [
        ("Start this cluster:", "kvrelay up cluster.yaml"),
        (verify, "kvrelay verify plan.json --endpoint 127.0.0.1:50051"),
        again,
    ]


def title(plan: Plan, request: PlanRequest) -> str:
    kinds = " and ".join(dict.fromkeys(words.hardware_words(pool) for pool in plan.chosen.candidate.pools))
    return f"{Path(request.model or _loaded_model(request)).name.removesuffix('.json')} on {kinds}"


def asked_words(plan: Plan, request: PlanRequest) -> str:
    """What was asked, in one sentence."""
    size = (
        f"on {words.count(request.num_gpus, 'GPU')}"
        if request.num_gpus is not None
        else f"for {words.num(request.rate)} requests/s"
        if request.rate is not None
        else f"for {words.usd(request.budget or 0.0)} an hour"
    )
    aim = {"goodput": "the highest goodput", "cost": "the least cost", "power": "the least power"}[request.wanted]
    targets = (
        "; ".join(f"{one.name}: {words.targets(one.slo)}" for one in request.request_classes)
        or f"{words.targets(plan.slo)} for {words.percent(plan.slo.attainment)} of requests"
    )
    return f"Asked: {aim} {size}, with {targets}; requests after {workload_words(request)}."


def workload_words(request: PlanRequest) -> str:
    if request.trace is None:
        return f"random lengths of {request.random_input_len} and {request.random_output_len} tokens"
    scale = f", lengths times {request.trace_scale:g}" if request.trace_scale != 1 else ""
    return f"{request.trace.name}{scale}{', at its own times' if request.trace_timestamps else ''}"
