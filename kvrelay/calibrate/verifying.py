"""Verifies a prediction against a running cluster: the very same requests at the same times, simulated and sent.

    Settings (of kvrelay.bench.run) --> Workload --> simulated: Prediction
                                    \\-> played against the router: Seen       --> Verification

What a plan file asks for becomes Settings and a SimCluster here. Nothing is judged: see
placement/checks/verification.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from kvrelay.bench.metrics import Outcome
from kvrelay.bench.run import Settings, run, timed_shapes
from kvrelay.client.types import ClusterStatus
from kvrelay.plan.reading import request_of
from placement.build.from_profile import sim_cluster
from placement.catalogs.base import PlanError
from placement.checks.margin import MarginRun
from placement.checks.verification import Prediction, Seen, Verification, compare, predict
from placement.latency.profile import Profile
from placement.latency.profile_file import read_profile
from placement.plan import Candidate, PoolPlan, Slo
from placement.simulator.cluster import SimCluster
from placement.workload.requests import Workload, from_shapes

Watch = Callable[[int], AbstractContextManager[Callable[[Outcome], None]]]
ROLES = ("prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is verified: a cluster as it is simulated, what is sent, and how wrong the times may be. `source`: the file
    that predicts, for the margin. `client_s`: between the client and the router."""

    cluster: SimCluster
    settings: Settings
    slo: Slo
    source: str
    client_s: float = 0.0
    error: float = 0.0


def workload_of(settings: Settings) -> Workload:
    """What `run` sends with the same settings."""
    timed = timed_shapes(settings)
    name = settings.trace.name if settings.trace is not None else "random lengths"
    return from_shapes([replace(shape, at_s=at_s) for shape, at_s in timed], name)


def foretell(question: Question) -> Prediction:
    workload = workload_of(question.settings)
    return predict(question.cluster, workload, client_s=question.client_s, error=question.error)


async def play(endpoint: str, settings: Settings, *, secret: str = "", watch: Watch) -> Seen:
    """Serve it. Raises what kvrelay.bench.run.run does."""
    _, outcomes, _ = await run(endpoint, settings, secret=secret, watch=watch)
    return seen(outcomes)


def judge(question: Question, prediction: Prediction, measured: Seen) -> Verification:
    return compare(prediction, measured, question.slo)


def seen(outcomes: Sequence[Outcome]) -> Seen:
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


def margin_run(question: Question, verified: Verification) -> MarginRun:
    """Of a run in which no request failed."""
    return MarginRun(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        source=question.source,
        rate=verified.rate,
        num_requests=verified.num_requests,
        ttft=verified.row("ttft", 90.0).error,
        tpot=verified.row("tpot", 90.0).error,
        attainment=verified.measured_attainment - verified.attainment.value,
        counts=not verified.is_past_knee,
    )


# What is verified


def of_profile(path: Path, settings: Settings, slo: Slo) -> Question:
    return of_profile_values(read_profile(path), settings, slo, path.name)


def of_profile_values(profile: Profile, settings: Settings, slo: Slo, source: str) -> Question:
    """The cluster that was measured."""
    return _measured(profile, sim_cluster(profile), settings, slo, source)


def _measured(profile: Profile, cluster: SimCluster, settings: Settings, slo: Slo, source: str) -> Question:
    error = max(profile.error.prefill, profile.error.decode)
    return Question(cluster=cluster, settings=settings, slo=slo, source=source, client_s=profile.client_s, error=error)


def of_plan(path: Path, changed: Mapping[str, Any]) -> Question:
    """`changed`: settings that differ from the plan's. Raises PlanError naming the file and what it lacks."""
    plan = _read_plan(path)
    try:
        request, candidate = request_of(plan["asked"]), _candidate(plan["chosen"]["candidate"])
        slo = Slo(**{key: math.inf if value is None else value for key, value in plan["slo"].items()})
        rate = float(plan["at_rate"]["rate"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, PlanError):
            raise
        why = f"it lacks {error.args[0]}" if isinstance(error, KeyError) else str(error)
        raise PlanError(f"{path} is no plan of this version: {why}; make one with kvrelay plan --out") from None
    if candidate.is_colocated:
        raise PlanError(
            f"{path} chose colocated workers, which kvrelay does not serve; plan with --no-colocated for two pools"
        )
    settings = replace(_settings(request, rate), **changed)
    counts = [sum(pool.replicas for pool in candidate.pools if pool.role == role) for role in ROLES]
    if request.profile is not None:
        profile = read_profile(request.profile)
        return _measured(profile, sim_cluster(profile, *counts), settings, slo, path.name)
    cluster, share = _by_catalog(request, candidate)
    return Question(cluster=cluster, settings=settings, slo=slo, source=path.name, error=share)


def _read_plan(path: Path) -> Mapping[str, Any]:
    try:
        plan: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"plan {path} cannot be read: {error.strerror}; make one with kvrelay plan --out") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise PlanError(f"{path} is not JSON; give the plan.json that kvrelay plan --out wrote") from None
    if not isinstance(plan, Mapping):
        raise PlanError(f"{path} is no plan; give the plan.json that kvrelay plan --out wrote")
    return plan


def _candidate(plain: Mapping[str, Any]) -> Candidate:
    from placement.catalogs.base import Degrees

    pools = tuple(PoolPlan(**{**pool, "degrees": Degrees(**pool["degrees"])}) for pool in plain["pools"])
    return Candidate(pools=pools, sharing=plain.get("sharing", ""), design=plain.get("design", ""))


def _settings(request: Any, rate: float) -> Settings:
    """The plan's workload at the plan's rate."""
    same = ("trace", "trace_scale", "max_input_len", "max_output_len", "burstiness", "seed")
    values = {name: getattr(request, name) for name in same}
    for name in ("random_input_len", "random_output_len", "random_range_ratio"):
        if getattr(request, name) is not None:
            values[name] = getattr(request, name)
    return Settings(request_rate=rate, **values)


def _by_catalog(request: Any, candidate: Candidate) -> tuple[SimCluster, float]:
    from kvrelay.plan.catalogs import catalogs
    from placement.build.from_offers import assemble, offers_of
    from placement.simulator.systems import LiveSystem

    catalog = catalogs(request)[0]
    offer_of = offers_of(catalog)
    within_node = candidate.gpus <= catalog.gpus_per_node
    system = assemble(candidate, offer_of, within_node=within_node)
    assert isinstance(system, LiveSystem)
    return system.cluster, max(offer_of(pool.degrees, within_node).error for pool in candidate.pools)


def check_alike(question: Question, status: ClusterStatus) -> None:
    """Raises PlanError: the cluster that runs is not the one that is predicted."""
    for role in ROLES:
        wanted = sum(worker.role == role for worker in question.cluster.workers)
        ready = sum(worker.role == role and worker.state == "ready" for worker in status.workers)
        if wanted != ready:
            raise PlanError(
                f"{question.source} is for {wanted} {role} workers, and {ready} are ready; start the cluster that it "
                "is for (kvrelay plan --out writes its spec), or calibrate this one"
            )
