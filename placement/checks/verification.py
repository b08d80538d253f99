"""Verification is a prediction and what was measured, side by side: the very same requests, simulated and served.

It compares and judges; it plays nothing. All times are the client's: what lies between client and router is added to
the simulated ones. Every predicted figure comes of many simulations of these requests, each in one Way that the times
may be (placement/checks/ways.py): the value is their median, the interval holds nine in ten of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from placement.checks.ways import Way, way_latency, ways_of
from placement.latency.under_load import NINE_IN_TEN, LoadRun, UnderLoad, Work, wrong_by
from placement.plan import Interval, Slo, to_json
from placement.simulator.cluster import SimCluster
from placement.simulator.outcome import Outcome, percentiles
from placement.simulator.simulate import simulate
from placement.workload.requests import Floats, Workload

PERCENTILES = (50.0, 90.0, 99.0)
METRICS = ("ttft", "tpot", "e2e")
WAYS = 24
LEAST_ERROR = 0.02  # of a time: no measured table is better than that
# Of a P99, a standard deviation beyond that of the ways: the few requests that a machine's rare stalls meet. It is what
# P99s of bench.coverage were off by more than the P90s of the same runs, on one kind of CPU.
RARE, STALLS = 99.0, 0.2
KNEE_ATTAINMENT = 0.5  # with less of the requests in time, a run is past the knee


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Seen:
    """What a client measured, one row for each request of the workload; nan where it failed. `phases_s`: means of what
    the server's timelines say."""

    ttft_s: Floats
    tpot_s: Floats
    e2e_s: Floats
    phases_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def failed(self) -> int:
        return int(np.isnan(self.e2e_s).sum())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prediction:
    """`expected`: by the times as they were fitted; `ways`: as they may be instead."""

    workload: Workload
    expected: Seen
    ways: tuple[Seen, ...]
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Seconds. `error`: measured against predicted, as a share."""

    metric: str
    percentile: float
    predicted: Interval
    measured: float

    @property
    def error(self) -> float:
        return self.measured / self.predicted.value - 1 if self.predicted.value else 0.0

    @property
    def is_inside(self) -> bool:
        return self.predicted.low <= self.measured <= self.predicted.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    rate: float
    num_requests: int
    failed: int
    slo: Slo
    rows: tuple[Row, ...]
    attainment: Interval  # predicted
    measured_attainment: float
    phases_s: Mapping[str, tuple[float, float]]  # predicted, measured: means, which sum to that of the whole
    error: float  # of the latency model, that the intervals come from

    def row(self, metric: str, percentile: float) -> Row:
        return next(row for row in self.rows if (row.metric, row.percentile) == (metric, percentile))

    @property
    def is_past_knee(self) -> bool:
        return min(self.attainment.value, self.measured_attainment) < KNEE_ATTAINMENT

    def to_json(self) -> dict[str, Any]:
        plain: dict[str, Any] = to_json(self)
        for made, row in zip(plain["rows"], self.rows, strict=True):
            made |= {"error": to_json(row.error), "is_inside": row.is_inside}
        return plain | {"is_past_knee": self.is_past_knee}


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """How wrong a prediction's times may be: by the tables, nine times in ten, as shares, and what a load showed.
    `client_s`: between client and router, where no load says more."""

    prefill: float = 0.0
    decode: float = 0.0
    load: UnderLoad | None = None
    client_s: float = 0.0

    @property
    def error(self) -> float:
        """Of a time of either phase."""
        prefill = wrong_by(self.prefill, self.load.prefill if self.load else None)
        decode = wrong_by(self.decode, self.load.decode if self.load else None)
        return max(LEAST_ERROR, prefill, decode)


def predict(cluster: SimCluster, workload: Workload, doubt: Doubt, *, seed: int = 0) -> Prediction:
    """Simulate the workload, and again in each of WAYS."""
    outcome = simulate(cluster, workload)
    work = _work(cluster, outcome)
    like = doubt.load.runs_like(work) if doubt.load else []
    prefill, decode = (0.0, 0.0) if doubt.load else (doubt.prefill, doubt.decode)  # the swing holds what is left of it
    ways = ways_of(doubt.load, work, max(prefill, LEAST_ERROR), max(decode, LEAST_ERROR), WAYS, seed)
    return Prediction(
        workload=workload,
        expected=_expected(outcome, doubt, like),
        ways=tuple(in_way(cluster, workload, doubt, like, way) for way in ways),
        error=doubt.error,
    )


def _work(cluster: SimCluster, outcome: Outcome) -> Work:
    span_s = float(np.nanmax(outcome.finish_s, initial=0.0) - outcome.workload.arrival_s[0]) or 1.0
    reading = sum(worker.role != "decode" for worker in cluster.workers)
    busy_s = outcome.busy_s.get("prefill", 0.0) + outcome.busy_s.get("mixed", 0.0)
    tokens = float(outcome.workload.output_len.sum())
    return Work(busy=busy_s / span_s / reading, tokens_per_s=tokens / span_s)


def _expected(outcome: Outcome, doubt: Doubt, like: Sequence[LoadRun]) -> Seen:
    client_s = float(np.median([run.client_s for run in like])) if like else doubt.client_s
    served = np.isfinite(outcome.finish_s)
    phases = {name: float(spent[served].mean()) for name, spent in outcome.phases.items()} if served.any() else {}
    return Seen(
        ttft_s=outcome.ttft_s + client_s, tpot_s=outcome.tpot_s, e2e_s=outcome.e2e_s + client_s, phases_s=phases
    )


def in_way(cluster: SimCluster, workload: Workload, doubt: Doubt, like: Sequence[LoadRun], way: Way) -> Seen:
    """With steps that differ among themselves, and clients that are as far away as in one of the runs like it."""
    rng, count = np.random.default_rng(way.seed), len(workload)
    run = like[int(rng.integers(len(like)))] if like else None
    noise = run.prefill_noise if run else ()
    workers = tuple(replace(w, latency=way_latency(w.latency, way, noise)) for w in cluster.workers)
    outcome = simulate(replace(cluster, workers=workers), workload)
    client_s: float | Floats = doubt.client_s
    tpot_s = outcome.tpot_s
    if run:
        gaps = np.maximum(workload.output_len - 1, 1)
        clients = rng.integers(len(run.client_s), size=count)
        client_s, rest_s = (way.client * np.array(times)[clients] for times in (run.client_s, run.client_rest_s))
        tpot_s = tpot_s * rng.choice(run.decode_noise, count) ** (1 / np.sqrt(gaps))
        tpot_s = np.where(workload.output_len > 1, np.maximum(0.0, tpot_s + rest_s / gaps), 0.0)
    ttft_s = outcome.ttft_s + client_s
    return Seen(ttft_s=ttft_s, tpot_s=tpot_s, e2e_s=ttft_s + tpot_s * np.maximum(workload.output_len - 1, 0))


def compare(prediction: Prediction, measured: Seen, slo: Slo) -> Verification:
    workload = prediction.workload
    expected, ways = prediction.expected, prediction.ways
    many = workload.output_len > 1  # a single token has no time per output token
    rows = []
    for metric in METRICS:
        kept = many if metric == "tpot" else np.ones(len(workload), dtype=bool)
        ranks = [percentiles(_values(seen, metric)[kept], PERCENTILES) for seen in (*ways, measured)]
        for i, percentile in enumerate(PERCENTILES):
            predicted = [values[i] for values in ranks[:-1]]
            rows.append(
                Row(
                    metric=metric,
                    percentile=percentile,
                    predicted=_stalled(_interval(predicted)) if percentile >= RARE else _interval(predicted),
                    measured=float(ranks[-1][i]),
                )
            )
    was, came = _with_outside(expected), _with_outside(measured)
    return Verification(
        rate=workload.rate,
        num_requests=len(workload),
        failed=measured.failed,
        slo=slo,
        rows=tuple(row for row in rows if not np.isnan(row.predicted.value)),
        attainment=_interval([attainment(seen, slo) for seen in ways]),
        measured_attainment=attainment(measured, slo),
        phases_s={name: (was.get(name, 0.0), came.get(name, 0.0)) for name in dict.fromkeys([*was, *came])},
        error=prediction.error,
    )


def _with_outside(seen: Seen) -> dict[str, float]:
    """The phases, and what is left of the mean end to end: the client, the network, the sending late."""
    if not seen.phases_s:
        return {}
    return {**seen.phases_s, "outside": float(np.nanmean(seen.e2e_s)) - sum(seen.phases_s.values())}


def attainment(seen: Seen, slo: Slo) -> float:
    """Share of all requests that met both targets; a failed one met none."""
    with np.errstate(invalid="ignore"):
        return float(((seen.ttft_s <= slo.ttft_s) & (seen.tpot_s <= slo.tpot_s)).mean())


def _values(seen: Seen, metric: str) -> Floats:
    values: Floats = {"ttft": seen.ttft_s, "tpot": seen.tpot_s, "e2e": seen.e2e_s}[metric]
    return values


def _interval(values: Sequence[float]) -> Interval:
    ordered = sorted(values)
    low, value, high = (float(at) for at in percentiles(np.array(ordered), (5, 50, 95)))
    return Interval(value, low, high)


def _stalled(interval: Interval) -> Interval:
    """Wider by STALLS."""
    if interval.low <= 0:
        return interval
    value, stalls = interval.value, NINE_IN_TEN * STALLS
    below = math.hypot(math.log(value / interval.low), stalls)
    above = math.hypot(math.log(interval.high / value), stalls)
    return Interval(value, value * math.exp(-below), value * math.exp(above))
