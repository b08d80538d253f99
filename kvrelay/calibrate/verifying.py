"""Verifies a prediction against a running cluster: the very same requests at the same times, simulated and sent.

    WorkloadOptions --> Workload --> simulated: Prediction
                    \\-> played against the router: Seen --> Verification

What a plan file asks for becomes WorkloadOptions and a SimCluster here. Nothing is judged: see
placement/checks/verification.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from kvrelay.bench.metrics import Outcome
from kvrelay.bench.options import PlayOptions, WorkloadOptions
from kvrelay.bench.run import run
from kvrelay.bench.workload import timed_workload
from kvrelay.calibrate.correcting import why_other_model
from kvrelay.client.access import FOUND, Access
from kvrelay.client.types import ClusterStatus, ServedModel
from kvrelay.plan.reading import request_of
from placement.build.from_profile import sim_cluster
from placement.catalogs.base import PlanError
from placement.checks.margin import MarginRun
from placement.checks.verification import Doubt, Prediction, Seen, Verification, compare, predict
from placement.latency.profile import Profile
from placement.latency.profile_file import read_profile
from placement.plan import Candidate, PoolPlan, Slo
from placement.simulator.cluster import SIMULATED, SimCluster

Watch = Callable[[int], AbstractContextManager[Callable[[Outcome], None]]]
AT_A_RATE: dict[str, Any] = {"num_prompts": 1000, "trace_timestamps": False}  # whatever the plan drew from


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What is verified: a cluster as it is simulated, what is sent, and how wrong the times may be. `source`: the file
    that predicts, for the margin; `profile`: what its times are from, where they were measured."""

    cluster: SimCluster
    workload: WorkloadOptions
    slo: Slo
    source: str
    doubt: Doubt = field(default_factory=Doubt)
    profile: Profile | None = None


def foretell(claim: Claim) -> Prediction:
    return predict(claim.cluster, timed_workload(claim.workload), claim.doubt)


async def play(
    endpoint: str, workload: WorkloadOptions, playing: PlayOptions, *, access: Access = FOUND, watch: Watch
) -> Seen:
    """Serve it. Raises what kvrelay.bench.run.run does."""
    _, outcomes, _ = await run(endpoint, workload, playing, access=access, watch=watch)
    return measured_of(outcomes)


def judge(claim: Claim, prediction: Prediction, measured: Seen) -> Verification:
    return compare(prediction, measured, claim.slo)


def measured_of(outcomes: Sequence[Outcome]) -> Seen:
    """A column for each figure, in the order of the requests."""
    good = [outcome for outcome in outcomes if outcome.succeeded]
    sums: dict[str, float] = {}
    for outcome in good:
        for name, seconds in (outcome.timeline.phases_s if outcome.timeline else {}).items():
            sums[name] = sums.get(name, 0.0) + seconds
    return Seen(
        ttft_s=_column(outcomes, lambda outcome: outcome.ttft_s),
        tpot_s=_column(outcomes, lambda outcome: outcome.tpot_s),
        e2e_s=_column(outcomes, lambda outcome: outcome.e2e_s),
        phases_s={name: total / len(good) for name, total in sums.items()},
    )


def _column(outcomes: Sequence[Outcome], of: Callable[[Outcome], float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array([of(outcome) if outcome.succeeded else math.nan for outcome in outcomes], dtype=np.float64)


def margin_run(claim: Claim, verified: Verification) -> MarginRun:
    """Of a run in which no request failed."""
    return MarginRun(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        source=claim.source,
        rate=verified.rate,
        num_requests=verified.num_requests,
        ttft=verified.row("ttft", 90.0).error,
        tpot=verified.row("tpot", 90.0).error,
        attainment=verified.measured_attainment - verified.attainment.value,
        counts=not verified.is_past_knee,
    )


# What is verified


def of_profile(path: Path, workload: WorkloadOptions, slo: Slo) -> Claim:
    return of_profile_values(read_profile(path), workload, slo, path.name)


def of_profile_values(profile: Profile, workload: WorkloadOptions, slo: Slo, source: str) -> Claim:
    """The cluster that was measured."""
    return _calibrated(profile, sim_cluster(profile), workload, slo, source)


def _calibrated(profile: Profile, cluster: SimCluster, workload: WorkloadOptions, slo: Slo, source: str) -> Claim:
    doubt = doubt_of(profile)
    return Claim(cluster=cluster, workload=workload, slo=slo, source=source, doubt=doubt, profile=profile)


def doubt_of(profile: Profile) -> Doubt:
    error = profile.error
    return Doubt(prefill=error.prefill, decode=error.decode, load=profile.load, client_s=profile.client_s)


def of_plan(path: Path, changed: Mapping[str, Any], targets_s: Mapping[str, float] | None = None) -> Claim:
    """`changed`: workload options that differ from the plan's; `targets_s`: targets in place of its own. Raises
    PlanError naming the file and what it lacks."""
    plan = _read_plan(path)
    try:
        request, copies = request_of(plan["asked"]), int(plan["chosen"].get("copies", 1))
        candidate = _candidate(plan["chosen"]["candidate"]).one_of(copies)
        slo = Slo(**{key: math.inf if value is None else value for key, value in plan["slo"].items()})
        rate = float(plan["at_rate"]["rate"]) / copies
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, PlanError):
            raise
        why = f"it lacks {error.args[0]}" if isinstance(error, KeyError) else str(error)
        raise PlanError(f"{path} is no plan of this version: {why}; make one with kvrelay plan --out") from None
    if request.classes and not targets_s:
        names = ", ".join(each.name for each in request.classes)
        raise PlanError(
            f"{path} has classes ({names}), whose targets verify does not play; give --ttft, --tpot or both, for all "
            "requests"
        )
    slo = replace(slo, **(targets_s or {}))
    if not candidate.is_served:
        raise PlanError(
            f"{path} chose a published system's machines, which kvrelay does not serve; plan with --no-colocated"
        )
    workload = replace(request.workload, **AT_A_RATE | {"request_rate": rate, **changed})
    counts = [pool.replicas for pool in candidate.pools]  # prefill, decode
    if len(request.profile) == 1 and candidate.kind == "two pools" and not candidate.num_guesses:
        profile = read_profile(request.profile[0])
        return _calibrated(profile, sim_cluster(profile, *counts), workload, slo, path.name)
    cluster, share = _by_catalog(request, candidate)
    measured = read_profile(request.profile[0]) if request.profile else None  # all are of one model
    doubt = Doubt(prefill=share, decode=share, client_s=measured.client_s if measured else 0.0)
    return Claim(cluster=cluster, workload=workload, slo=slo, source=path.name, doubt=doubt, profile=measured)


def _read_plan(path: Path) -> Mapping[str, Any]:
    try:
        plan: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"plan {path} cannot be read: {error.strerror}; make one with kvrelay plan --out") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        raise PlanError(f"{path} is not JSON; give the plan.json that kvrelay plan --out wrote") from None
    if not isinstance(plan, Mapping):
        raise PlanError(f"{path} is no plan; give the plan.json that kvrelay plan --out wrote")
    return plan


def _candidate(plain: Mapping[str, Any]) -> Candidate:
    from placement.catalogs.base import Degrees

    pools = tuple(PoolPlan(**{**pool, "degrees": Degrees(**pool["degrees"])}) for pool in plain["pools"])
    return Candidate(pools=pools, design=plain.get("design", ""))


def _by_catalog(request: Any, candidate: Candidate) -> tuple[SimCluster, float]:
    from kvrelay.plan.catalogs import catalogs
    from kvrelay.plan.planning import machines_of
    from placement.build.from_offers import assemble, offers_of
    from placement.goodput.targets import Targets
    from placement.mixes.designs import Mix, all_designs
    from placement.mixes.rules import live_cluster
    from placement.simulator.systems import LiveSystem

    catalog, *others = catalogs(request)
    if others:
        (design,) = all_designs(machines_of(request, (catalog, *others)), [candidate.design], are_pooled=True)
        first, second = ([pool.replicas for pool in candidate.pools] + [0])[:2]
        cluster = live_cluster(Mix(design=design, num_prompt=first, num_token=second), request.slo)
        return cluster, max(machine.offer.error for machine in design.machines)
    offer_of = offers_of(catalog)
    within_node = candidate.gpus <= catalog.gpus_per_node
    slo = Targets(slo=request.slo, classes=request.request_classes).loosest
    system = assemble(candidate, offer_of, within_node=within_node, slo=slo)
    assert isinstance(system, LiveSystem)
    return system.cluster, max(offer_of(pool.degrees, within_node).error for pool in candidate.pools)


def check_alike(claim: Claim, status: ClusterStatus, model: ServedModel) -> None:
    """Raises PlanError: the cluster that runs is not the one that is predicted."""
    if claim.profile is not None and (other := why_other_model(claim.profile, model)):
        raise PlanError(other)
    for role in SIMULATED:
        wanted = sum(worker.role == role for worker in claim.cluster.workers)
        ready = sum(worker.role == role and worker.state == "ready" for worker in status.workers)
        if wanted != ready:
            raise PlanError(
                f"{claim.source} is for {wanted} {role} workers, and {ready} are ready; start the cluster that it "
                "is for (kvrelay plan --out writes its spec), or calibrate this one"
            )
