"""Writes a plan's folder: cluster.yaml, plan.json, report.html and its plots as PNG. It decides nothing of the plan."""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvrelay.bench.options import WorkloadOptions
from kvrelay.plan import amounts, words
from kvrelay.plan import cluster_file as cluster
from kvrelay.plan.assumptions import assumed_by
from kvrelay.plan.catalogs import catalogs, guesses_of
from kvrelay.plan.command import command_of
from kvrelay.plan.request import PlanRequest
from placement.catalogs.base import PlanError
from placement.goodput.targets import Targets
from placement.latency.model_files import load_shape, loadable_name
from placement.latency.model_shape import FEW_BITS, ModelShape
from placement.latency.profile_file import read_profile
from placement.plan import Plan, to_json
from placement.whole_file import write_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """`notes`: sentences that a person should read, about what was written."""

    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()


def save(plan: Plan, request: PlanRequest, folder: Path) -> Saved:
    """Writes the folder; files of an earlier plan are replaced, or go. Raises PlanError: nothing can be written."""
    from kvrelay.plan import report as plan_report
    from kvrelay.plan.plots import figures as plots
    from kvrelay.plan.plots.style import png

    spec, no_spec, notes = cluster_spec(plan, request)
    context = plan_report.Context(
        title=title(plan, request),
        asked=asked_words(plan, request),
        commands=_commands(plan, request, folder, has_spec=bool(spec)),
        spec=spec,
        no_spec=no_spec,
    )
    wide, narrow = plots.figures(plan, "wide"), plots.figures(plan, "narrow")
    written: dict[str, str | bytes] = {
        "plan.json": json.dumps(plan_object(plan), indent=1) + "\n",
        "report.html": plan_report.report(plan, context, wide, narrow),
    }
    if spec:
        written["cluster.yaml"] = spec
    written |= {f"{name}.png": png(figure) for name, figure in wide.items()}
    return Saved(files=write_all(folder, written), notes=notes)


def write_all(folder: Path, written: Mapping[str, str | bytes]) -> tuple[Path, ...]:
    """All files of a plan; those of an earlier one that this one has not go. Raises PlanError."""
    from kvrelay.plan.plots.figures import DRAWN

    files = tuple(write(folder, name, content) for name, content in written.items())
    for name in {"cluster.yaml", "report.html", *(f"{name}.png" for name in DRAWN)} - written.keys():
        (folder / name).unlink(missing_ok=True)
    return files


def check_folder(folder: Path) -> None:
    """Raises PlanError where nothing can be written, before a search that would be in vain."""
    at = folder.resolve()
    while not at.exists():
        at = at.parent
    if not at.is_dir() or not os.access(at, os.W_OK | os.X_OK):
        raise PlanError(f"--out is {folder}, and {at} is no folder that can be written to; give another")


def write(folder: Path, name: str, content: str | bytes) -> Path:
    """A file of the folder, which is made. Raises PlanError."""
    path = folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    except OSError as error:
        raise PlanError(f"--out is {folder}, where {name} cannot be written ({error.strerror}); give another") from None
    return path


def plan_object(plan: Plan) -> dict[str, Any]:
    """Everything, as plain data: the plan's own fields, and in `answer` what a program wants first."""
    chosen = plan.chosen
    answer = {
        "placement": chosen.candidate.label,
        "is_disaggregated": plan.is_disaggregated,
        "gpus": chosen.candidate.gpus,
        "goodput": to_json(chosen.goodput),
        "goodput_per_gpu": chosen.per_gpu,
        "usd_per_hour": chosen.usd_per_hour,
        "watts": chosen.watts,
        "words": words.answer(plan),
    }
    return {"kvrelay": version("kvrelay"), "answer": answer, **to_json(plan)}


def cluster_spec(plan: Plan, request: PlanRequest) -> tuple[str, str, tuple[str, ...]]:
    """(the spec's text, or why there is none, sentences to tell)."""
    has_gpus = request.latency_kind != "profile" and plan.chosen.candidate.unit == "GPU"
    most_gpus = min(catalog.gpus_per_node for catalog in catalogs(request)) if has_gpus else math.inf
    narrowed = _narrowed(request)
    model, shape = _model_and_shape(request, narrowed)
    cut = None if request.profile else shape  # what was measured was loaded
    placement, why_not = cluster.to_run(plan, most_gpus, cut), cluster.why_not_started(plan.chosen, most_gpus, cut)
    if placement is None:
        why = why_not or "only a published system's machines meet the targets, and kvrelay does not serve them"
        return "", f"There is none: {why}.", (f"no cluster.yaml is written: {why}",)
    name = cluster.cluster_name(model)
    slo = Targets(slo=plan.slo, classes=request.request_classes).loosest
    guesses = guesses_of(request)
    data = cluster.spec_data(
        placement,
        model,
        shape,
        has_gpus=has_gpus,
        slo=slo,
        name=name,
        narrowed=narrowed,
        assumed=assumed_by(request, placement.one_cluster),
        speculative_model=loadable_name(request.speculative_model) if request.speculative_model else "",
        draft_bytes_per_token=int(guesses.kv_bytes_per_token) if guesses is not None else 0,
    )
    notes = []
    if why_not:
        notes.append(f"cluster.yaml has the best that kvrelay up starts, {placement.candidate.label}: {why_not}")
    if request.model is None and "/" not in model:  # what the profile's workers called a directory
        notes.append(
            f"cluster.yaml has model {model}, as {request.profile[0].name} calls it, which kvrelay up may not find; "
            "give --model its directory, or write that there"
        )
    told = "".join(f"# Note: {note}\n" for note in notes)
    return f"{told}{cluster.spec_text(plan, placement, data, command_of(request))}", "", tuple(notes)


def _narrowed(request: PlanRequest) -> dict[str, str]:
    """What a spec has to say of how workers have the model: as it asks, or as the workers of its profiles had it, which
    are alike in that."""
    if not request.profile:
        return request.model_dump(include=set(FEW_BITS), exclude_defaults=True)
    profile = read_profile(request.profile[0])
    measured = {key: str(profile.prefill_pool.options.get(key, "")) for key in FEW_BITS}
    return {"dtype": str(profile.model.get("dtype", "")), **measured}


def _model_and_shape(request: PlanRequest, narrowed: Mapping[str, str]) -> tuple[str, ModelShape | None]:
    """What workers load, and its shape as they have it; None where no config tells."""
    model = _loaded_model(request)
    try:
        shape = load_shape(request.model or model).with_dtype(narrowed.get("dtype") or "auto")
        return model, shape.in_few_bits(kv_dtype=narrowed.get("kv_dtype", ""))
    except PlanError:
        return model, None


def _loaded_model(request: PlanRequest) -> str:
    """A model's directory by its full path, or its hub id."""
    given = request.model
    if given is None:
        given = str(read_profile(request.profile[0]).model.get("name", "model"))
    return loadable_name(given)


def _commands(plan: Plan, request: PlanRequest, folder: Path, *, has_spec: bool) -> list[tuple[str, str]]:
    """(sentence, what to type where the plan was made: its model, hardware and trace may be paths from there). What a
    published system alone serves cannot be run."""
    again = ("Plan again:", command_of(request))
    spec, kept = (shlex.quote(str(folder / name)) for name in ("cluster.yaml", "plan.json"))
    if not has_spec:
        return [again]
    if not plan.chosen.candidate.is_served:
        split = "kvrelay does not serve that. If that is what you want all the same, this starts the best split:"
        return [(split, f"kvrelay up {spec}"), again]
    verify = "Play the same workload against it, and keep the error found as the next plan's margin:"
    return [
        ("Start this cluster:", f"kvrelay up {spec}"),
        (verify, f"kvrelay verify {kept} --endpoint 127.0.0.1:50051"),
        again,
    ]


def title(plan: Plan, request: PlanRequest) -> str:
    kinds = " and ".join(dict.fromkeys(words.hardware_words(pool) for pool in plan.chosen.candidate.pools))
    return f"{Path(request.model or _loaded_model(request)).name.removesuffix('.json')} on {kinds}"


def asked_words(plan: Plan, request: PlanRequest) -> str:
    """What was asked, in one sentence."""
    size = (
        f"on {_there_are(request) or amounts.count(request.num_gpus, plan.chosen.candidate.unit)}"
        if request.num_gpus is not None
        else f"for {amounts.num(request.rate)} requests/s"
        if request.rate is not None
        else f"for {amounts.usd(request.budget or 0.0)} an hour"
    )
    aim = {"goodput": "the highest goodput", "cost": "the least cost", "power": "the least power"}[request.wanted]
    targets = (
        "; ".join(f"{asked_class.name}: {words.targets(asked_class.slo)}" for asked_class in request.request_classes)
        or f"{words.targets(plan.slo)} for {amounts.percent(plan.slo.attainment)} of requests"
    )
    return f"Asked: {aim} {size}, with {targets}; requests after {workload_words(request.workload)}."


def _there_are(request: PlanRequest) -> str:
    """So many GPUs of each kind, where it is said."""
    return " and ".join(f"{count} x {name}" for name, count in request.gpus_of.items())


def workload_words(workload: WorkloadOptions) -> str:
    if workload.trace is None:
        return workload.name
    scale = f", lengths times {workload.trace_scale:g}" if workload.trace_scale != 1 else ""
    return f"{workload.name}{scale}{', at its own times' if workload.trace_timestamps else ''}"
