"""Simulates a cluster spec under a load, rate by rate: what `kvrelay simulate` asks, without its flags and tables.

    spec + hardware | profile -> SimCluster (or ColocatedCluster)      placement/build/from_spec.py
    trace | random lengths    -> Traffic                               placement/workload/traffic.py
    rate by rate, seed by seed -> RatePoint with intervals             placement/goodput/estimate.py

It decides nothing and prints nothing. Without `num_requests` the answer is that of the long run: warm-up cut off, as
many requests as the interval wants. With it, exactly so many from an empty cluster, as `kvrelay bench` plays them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from cluster.spec.errors import SpecError
from cluster.spec.model import ClusterSpec
from kvrelay.bench.workload import fit, random_shapes
from placement.build.from_spec import colocated_cluster, latency_error, latency_sources, not_simulated, sim_cluster
from placement.build.sources import ProfileWorkers, RooflineWorkers, WorkerSource
from placement.catalogs.base import PlanError
from placement.goodput.estimate import Effort, burst, estimate
from placement.goodput.targets import Targets
from placement.latency.base import LatencyError
from placement.latency.hardware import load_hardware
from placement.latency.model_shape import ModelShape, load_shape
from placement.latency.profile_file import read_profile
from placement.plan import Interval, RatePoint, Slo, to_json
from placement.simulator.cluster import SetupError
from placement.simulator.colocated import Sharing
from placement.simulator.systems import LiveSystem, System
from placement.workload.requests import Workload, from_shapes
from placement.workload.traces import WorkloadError, read_trace
from placement.workload.traffic import Traffic

RANDOM_REQUESTS = 4096  # of which a run draws
LEAST_COUNTED, MOST_COUNTED = 2000, 16_000  # requests of the run that counters are taken from
MAX_REQUESTS = 32_000
Progress = Callable[[str, int, int], None]
ASKED_WRONGLY = (PlanError, LatencyError, SetupError, SpecError, WorkloadError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What requests look like and when they come."""

    trace: Path | None = None
    trace_scale: float = 1.0
    trace_timestamps: bool = False
    max_input_len: int | None = None
    max_output_len: int | None = None
    random_input_len: int | None = None
    random_output_len: int | None = None
    random_range_ratio: float = 0.0
    burstiness: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """`rates` empty: the trace's own rate. `num_requests` None: the long run."""

    slo: Slo
    rates: tuple[float, ...]
    num_requests: int | None = None
    seeds: tuple[int, ...] = (0,)
    sharing: Sharing | None = None  # None: the two pools of the spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """`error`: of the latency model, taken into the intervals. `counters`: by rate, of a run of the first seed with
    `counted` requests."""

    points: tuple[RatePoint, ...]
    counters: tuple[Mapping[str, int], ...]
    counted: tuple[int, ...]
    workers: Mapping[str, int]
    kv_tokens: Mapping[str, int]  # of one worker
    sources: tuple[str, ...]
    error: float
    notes: tuple[str, ...] = field(default=())


def source_of(spec: ClusterSpec, *, hardware: str | None, profile: Path | None, model: str | None) -> WorkerSource:
    """Where the times come from: a hardware file and the model's config, or a profile. Raises PlanError."""
    if (hardware is None) == (profile is None):
        given = "both --hardware and --profile are" if hardware else "neither --hardware nor --profile is"
        raise PlanError(f"{given} given; give one: a name of configs/hardware, or what kvrelay calibrate measured")
    if profile is not None:
        return ProfileWorkers(read_profile(profile), _shape_if_known(model or spec.model))
    assert hardware is not None
    return RooflineWorkers(load_shape(model or spec.model), load_hardware(hardware))


def _shape_if_known(model: str) -> ModelShape | None:
    try:
        return load_shape(model)
    except PlanError:
        return None


def traffic_of(load: Load, seed: int = 0) -> Traffic:
    """Raises WorkloadError, PlanError."""
    if load.trace is not None and (load.random_input_len or load.random_output_len):
        raise PlanError("--trace and --random-input-len do not go together; give one of the two")
    if load.trace_timestamps and load.burstiness != 1:
        raise PlanError("--burstiness does not go with --trace-timestamps; the trace has its own bursts")
    if load.trace is None and load.trace_timestamps:
        raise PlanError("--trace-timestamps is of a trace and there is none; give --trace")
    return Traffic(source=_requests(load, seed), burstiness=load.burstiness, is_replay=load.trace_timestamps)


def _requests(load: Load, seed: int) -> Workload:
    if load.trace is not None:
        shapes, name, scale = read_trace(load.trace), load.trace.name, load.trace_scale
    elif load.random_input_len is None or load.random_output_len is None:
        raise PlanError("no requests are given; give --trace, or --random-input-len and --random-output-len")
    else:
        rng = np.random.default_rng(seed)
        inputs, outputs = load.random_input_len, load.random_output_len
        shapes = random_shapes(RANDOM_REQUESTS, inputs, outputs, load.random_range_ratio, 0, rng)
        name, scale = f"random lengths of {inputs} and {outputs} tokens", 1.0
    fitted = fit(shapes, scale=scale, max_input_len=load.max_input_len, max_output_len=load.max_output_len)
    return from_shapes(fitted, name)


def simulate_spec(
    spec: ClusterSpec, source: WorkerSource, traffic: Traffic, question: Question, on_progress: Progress
) -> Found:
    """Raises PlanError, SetupError, WorkloadError."""
    system = _system(spec, source, question.sharing)
    error = latency_error(spec, source)
    rates = question.rates or (_own_rate(traffic),)
    total, done = len(rates) * len(question.seeds), 0
    points, counters, counted = [], [], []
    for rate in rates:
        found = []
        for seed in question.seeds:
            on_progress(f"{rate:g} requests/s", done, total)
            found.append(_point(system, traffic, rate, question, seed, error))
            done += 1
        points.append(merged(found))
        counted.append(_counted(question, points[-1]))
        counters.append(_counters(system, traffic, rate, question.seeds[0], counted[-1]))
    on_progress("done", total, total)
    return Found(
        points=tuple(points),
        counters=tuple(counters),
        counted=tuple(counted),
        workers=_workers(spec, question.sharing),
        kv_tokens=_kv_tokens(system),
        sources=tuple(latency_sources(spec, source)),
        error=error,
        notes=tuple(_notes(spec, source, question.sharing)),
    )


def _own_rate(traffic: Traffic) -> float:
    if not traffic.is_replay:
        raise PlanError("no rate is given; give --rate, or --trace-timestamps for the trace's own")
    return traffic.source.rate


def _system(spec: ClusterSpec, source: WorkerSource, sharing: Sharing | None) -> System:
    if sharing is None:
        return LiveSystem(sim_cluster(spec, source))
    return colocated_cluster(spec, source, sharing)


def _point(system: System, traffic: Traffic, rate: float, question: Question, seed: int, error: float) -> RatePoint:
    targets = Targets(slo=question.slo)
    if question.num_requests is not None:
        return burst(system, traffic, rate, targets, question.num_requests, seed)
    effort = Effort(max_requests=MAX_REQUESTS)
    return estimate(system, traffic, rate, targets, effort=effort, seed=seed, error=error).point


def merged(points: Sequence[RatePoint]) -> RatePoint:
    """The mean of several seeds' estimates. An interval is the mean of theirs, widened to hold every seed's value."""
    first = points[0]
    if len(points) == 1:
        return first
    return replace(
        first,
        attainment=_mean_interval([point.attainment for point in points]),
        ttft_s={at: _mean_interval([point.ttft_s[at] for point in points]) for at in first.ttft_s},
        tpot_s={at: _mean_interval([point.tpot_s[at] for point in points]) for at in first.tpot_s},
        phases_s={name: _mean([point.phases_s[name] for point in points]) for name in first.phases_s},
        busy={name: _mean([point.busy.get(name, 0.0) for point in points]) for name in first.busy},
        num_requests=sum(point.num_requests for point in points),
        is_settled=all(point.is_settled for point in points),
    )


def _mean_interval(intervals: Sequence[Interval]) -> Interval:
    values = [interval.value for interval in intervals]
    low, high = _mean([i.low for i in intervals]), _mean([i.high for i in intervals])
    return Interval(_mean(values), min(low, *values), max(high, *values))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if all(map(math.isfinite, values)) else math.inf


def _counted(question: Question, point: RatePoint) -> int:
    """As many as were simulated, within limits: what is rare, or comes late, is seen in a long run only."""
    return question.num_requests or min(max(LEAST_COUNTED, point.num_requests), MOST_COUNTED)


def _counters(system: System, traffic: Traffic, rate: float, seed: int, count: int) -> Mapping[str, int]:
    outcome = system.play(traffic.draw(rate, count, seed))
    return {key: found for key, found in sorted(Counter(outcome.counters).items()) if found}


def _workers(spec: ClusterSpec, sharing: Sharing | None) -> dict[str, int]:
    if sharing is not None:
        return {"colocated": sum(pool.replicas for pool in spec.pools)}
    return {pool.label: pool.replicas for pool in spec.pools}


def _kv_tokens(system: System) -> dict[str, int]:
    if not isinstance(system, LiveSystem):
        return {pool: tokens // system.workers_by_pool[pool] for pool, tokens in system.kv_tokens_by_pool.items()}
    workers = system.cluster.workers  # of pools by their labels: there may be several of a role
    return {worker.name.rpartition("-")[0]: worker.num_pages * worker.page_size for worker in workers}


def _notes(spec: ClusterSpec, source: WorkerSource, sharing: Sharing | None) -> list[str]:
    notes = not_simulated(spec)
    if isinstance(source, ProfileWorkers) and source.profile.is_shared_host and sharing is not None:
        notes.append("workers slow each other down on the profile's host; colocated ones are simulated without that")
    if isinstance(source, RooflineWorkers) and not source.is_one_node(spec):
        per_node, unit = source.hardware.gpus_per_node, source.hardware.unit
        notes.append(f"the workers do not fit in one node of {per_node} {unit}s, so all KV goes between nodes")
    return notes


def found_object(found: Found, question: Question, **asked: Any) -> dict[str, Any]:
    """What --json prints."""
    rows = [
        to_json(point) | {"counters": dict(counters), "counted_requests": counted}
        for point, counters, counted in zip(found.points, found.counters, found.counted, strict=True)
    ]
    return {
        **asked,
        "slo": to_json(question.slo),
        "sharing": question.sharing,
        "workers": dict(found.workers),
        "kv_tokens": dict(found.kv_tokens),
        "latency": list(found.sources),
        "latency_error": found.error,
        "rates": rows,
        "notes": list(found.notes),
    }
