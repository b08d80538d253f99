"""Simulates a cluster spec under a load, rate by rate: what `kvrelay simulate` asks, without its flags and tables.

    spec + hardware | profile -> SimCluster                            placement/build/from_spec.py
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

from cluster.spec.errors import SpecError
from cluster.spec.model import ClusterSpec
from kvrelay.bench.options import WorkloadOptions
from kvrelay.bench.workload import source_workload
from placement.build.from_spec import latency_error, latency_sources, mixed_spec, not_simulated, sim_cluster
from placement.build.sources import ProfileWorkers, RooflineWorkers, WorkerSource, num_guesses
from placement.catalogs.base import PlanError
from placement.catalogs.profile import check_model
from placement.goodput.estimate import Effort, burst, estimate
from placement.goodput.targets import Targets
from placement.latency.base import LatencyError
from placement.latency.hardware import load_hardware
from placement.latency.model_files import load_shape, shape_if_known
from placement.latency.profile_file import read_profile
from placement.plan import Interval, RatePoint, Slo, to_json
from placement.simulator.cluster import SetupError
from placement.simulator.systems import LiveSystem, System
from placement.workload.closed_loop import ClosedLoop
from placement.workload.positions import beyond_positions
from placement.workload.traces import WorkloadError
from placement.workload.traffic import Traffic
from worker.options import pool_of

LEAST_COUNTED, MOST_COUNTED = 2000, 16_000  # requests of the run that counters are taken from
MAX_REQUESTS = 32_000
OnProgress = Callable[[str, int, int], None]
ASKED_WRONGLY = (PlanError, LatencyError, SetupError, SpecError, WorkloadError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Each rate with each number of clients and each seed. `rates` empty: the trace's own; of clients in a closed loop
    (`loops`) as fast as they are answered. `num_requests` None: the long run."""

    slo: Slo
    rates: tuple[float, ...]
    loops: tuple[ClosedLoop, ...] = ()
    num_requests: int | None = None
    seeds: tuple[int, ...] = (0,)
    colocated: bool = False  # the spec's workers, all of them mixed


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """`error`: of the latency model, taken into the intervals. `counters`: by point, of a run of the first seed with
    `counted` requests. `clients`: of each point, in a closed loop; empty: requests come at a rate."""

    points: tuple[RatePoint, ...]
    counters: tuple[Mapping[str, int], ...]
    counted: tuple[int, ...]
    workers: Mapping[str, int]
    kv_tokens: Mapping[str, int]  # of one worker
    sources: tuple[str, ...]
    error: float
    clients: tuple[int, ...] = ()
    notes: tuple[str, ...] = field(default=())


def source_of(
    spec: ClusterSpec,
    *,
    hardware: str | None,
    profile: Path | None,
    model: str | None,
    acceptance_rate: float | None = None,
) -> WorkerSource:
    """Where the times come from: a hardware file and the model's config, or a profile. Raises PlanError."""
    if acceptance_rate is not None:
        _check_acceptance(spec, acceptance_rate)
    if (hardware is None) == (profile is None):
        given = "both --hardware and --profile are" if hardware else "neither --hardware nor --profile is"
        raise PlanError(f"{given} given; give one: a name of configs/hardware, or what kvrelay calibrate measured")
    if profile is not None:
        measured, shape = read_profile(profile), shape_if_known(model or spec.model)
        if shape is not None:
            check_model(measured, shape)
        return ProfileWorkers(measured, shape, acceptance_rate)
    assert hardware is not None
    return RooflineWorkers(load_shape(model or spec.model), load_hardware(hardware), acceptance_rate)


def _check_acceptance(spec: ClusterSpec, rate: float) -> None:
    if not 0 <= rate <= 1:
        raise PlanError(f"--acceptance-rate is {rate:g}; give the chance of a guess to be right, from 0 to 1")
    if not any(num_guesses(pool) for pool in spec.pools):
        raise PlanError(
            f"--acceptance-rate is {rate:g}, but no pool guesses tokens ahead; give --num-speculative-tokens, too"
        )


def traffic_of(options: WorkloadOptions) -> Traffic:
    """Raises WorkloadError, PlanError."""
    if options.trace is not None and (options.random_input_len or options.random_output_len):
        raise PlanError("--trace and --random-input-len do not go together; give one of the two")
    if options.trace_timestamps and options.burstiness != 1:
        raise PlanError("--burstiness does not go with --trace-timestamps; the trace has its own bursts")
    if options.trace is None and options.trace_timestamps:
        raise PlanError("--trace-timestamps is of a trace and there is none; give --trace")
    source = source_workload(options)
    return Traffic(source=source, burstiness=options.burstiness, is_replay=options.trace_timestamps)


def simulate_spec(
    spec: ClusterSpec, source: WorkerSource, traffic: Traffic, sweep: Sweep, on_progress: OnProgress
) -> SweepResult:
    """Raises PlanError, SetupError, WorkloadError."""
    spec = mixed_spec(spec) if sweep.colocated else spec
    system = LiveSystem(sim_cluster(spec, source))
    error = latency_error(spec, source)
    notes = [*_notes(spec, source), *_beyond_positions(spec, source, traffic, sweep)]
    loads = [(rate, loop) for rate in _rates(sweep, traffic) for loop in sweep.loops or (None,)]
    total, done = len(loads) * len(sweep.seeds), 0
    points, counters, counted = [], [], []
    for rate, loop in loads:
        by_seed, load = [], replace(traffic, loop=loop)
        for seed in sweep.seeds:
            on_progress(f"{loop.max_concurrency} clients" if loop else f"{rate:g} requests/s", done, total)
            by_seed.append(_point(system, load, rate, sweep, seed, error))
            done += 1
        points.append(merged(by_seed))
        counted.append(_counted(sweep, points[-1]))
        counters.append(_counters(system, load, rate, sweep.seeds[0], counted[-1]))
    on_progress("done", total, total)
    return SweepResult(
        points=tuple(points),
        counters=tuple(counters),
        counted=tuple(counted),
        workers={pool.label: pool.replicas for pool in spec.pools},
        kv_tokens=_kv_tokens(system),
        sources=tuple(latency_sources(spec, source)),
        error=error,
        clients=tuple(loop.max_concurrency for _, loop in loads if loop is not None),
        notes=tuple(notes),
    )


def _beyond_positions(spec: ClusterSpec, source: WorkerSource, traffic: Traffic, sweep: Sweep) -> list[str]:
    """More than the model's own are those to which a spec has its RoPE stretched. Raises WorkloadError."""
    if source.shape is None:
        return []
    shape, slack = source.shape, 1 - sweep.slo.attainment
    positions = max(shape.max_positions, spec.max_model_len or 0)
    told = beyond_positions(traffic.source, shape.name, positions, slack)
    return [f"{told}; here they are served"] if told else []


def _rates(sweep: Sweep, traffic: Traffic) -> tuple[float, ...]:
    if sweep.rates:
        return sweep.rates
    return (math.inf,) if sweep.loops and not traffic.is_replay else (_own_rate(traffic),)


def _own_rate(traffic: Traffic) -> float:
    if not traffic.is_replay:
        raise PlanError("no rate is given; give --rate, --max-concurrency, or --trace-timestamps for the trace's own")
    return traffic.source.rate


def _point(system: System, traffic: Traffic, rate: float, sweep: Sweep, seed: int, error: float) -> RatePoint:
    targets = Targets(slo=sweep.slo)
    if sweep.num_requests is not None:
        return burst(system, traffic, rate, targets, sweep.num_requests, seed, error=error)
    effort = Effort(max_requests=MAX_REQUESTS)
    return estimate(system, traffic, rate, targets, effort=effort, seed=seed, error=error).point


def merged(points: Sequence[RatePoint]) -> RatePoint:
    """The mean of several seeds' estimates. An interval is the mean of theirs, widened to hold every seed's value."""
    first = points[0]
    if len(points) == 1:
        return first
    return replace(
        first,
        rate=_mean([point.rate for point in points]),
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


def _counted(sweep: Sweep, point: RatePoint) -> int:
    """As many as were simulated, within limits: what is rare, or comes late, is seen in a long run only."""
    return sweep.num_requests or min(max(LEAST_COUNTED, point.num_requests), MOST_COUNTED)


def _counters(system: System, traffic: Traffic, rate: float, seed: int, count: int) -> Mapping[str, int]:
    outcome = system.play(traffic.draw(rate, count, seed))
    return {key: count for key, count in sorted(Counter(outcome.counters).items()) if count}


def _kv_tokens(system: LiveSystem) -> dict[str, int]:
    workers = system.cluster.workers  # of pools by their labels: there may be several of a role
    return {pool_of(worker.name): worker.num_pages * worker.page_size for worker in workers}


def _notes(spec: ClusterSpec, source: WorkerSource) -> list[str]:
    notes = not_simulated(spec, source.acceptance)
    has_mixed = any(pool.role == "mixed" for pool in spec.pools)
    if isinstance(source, ProfileWorkers) and source.profile.is_shared_host and has_mixed:
        notes.append("workers slow each other down on the profile's host; mixed ones are simulated without that")
    if isinstance(source, RooflineWorkers) and not source.is_one_node(spec):
        per_node, unit = source.hardware.gpus_per_node, source.hardware.unit
        notes.append(f"the workers do not fit in one node of {per_node} {unit}s, so all KV goes between nodes")
    return notes


def result_object(result: SweepResult, sweep: Sweep, **asked: Any) -> dict[str, Any]:
    """What --json prints."""
    rows = [
        to_json(point) | {"counters": dict(counters), "counted_requests": counted}
        for point, counters, counted in zip(result.points, result.counters, result.counted, strict=True)
    ]
    if result.clients:
        rows = [{"max_concurrency": n} | row for n, row in zip(result.clients, rows, strict=True)]
    return {
        **asked,
        "slo": to_json(sweep.slo),
        "colocated": sweep.colocated,
        "workers": dict(result.workers),
        "kv_tokens": dict(result.kv_tokens),
        "latency": list(result.sources),
        "latency_error": result.error,
        "rates": rows,
        "notes": list(result.notes),
    }
