"""Verification is a prediction and what was measured, side by side: the very same requests, simulated and served.

It compares and judges; it plays nothing. All times are the client's: what lies between client and router is added to
the simulated ones (`client_s`). Every predicted figure has the interval that the latency model's known error gives it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from placement.latency.scaled import factors_of
from placement.plan import Interval, Slo, to_json
from placement.simulator.cluster import SimCluster
from placement.simulator.outcome import percentiles
from placement.simulator.systems import LiveSystem
from placement.workload.requests import Floats, Workload

PERCENTILES = (50.0, 90.0, 99.0)
METRICS = ("ttft", "tpot", "e2e")
LEAST_ERROR = 0.02  # of a time: no measured table is better than that
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
    """`bounds`: the same requests with every time shorter and longer by the latency model's error."""

    workload: Workload
    expected: Seen
    bounds: tuple[Seen, ...]
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
    phases_s: Mapping[str, tuple[float, float]]  # predicted, measured: means
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


def predict(cluster: SimCluster, workload: Workload, *, client_s: float = 0.0, error: float = 0.0) -> Prediction:
    """Simulate the workload; and once with every time longer, once shorter by `error`."""
    error, system = max(error, LEAST_ERROR), LiveSystem(cluster)
    bounds = tuple(_simulated(system.scaled(factor), workload, client_s) for factor in factors_of(error))
    return Prediction(workload=workload, expected=_simulated(system, workload, client_s), bounds=bounds, error=error)


def _simulated(system: LiveSystem, workload: Workload, client_s: float) -> Seen:
    outcome = system.play(workload)
    served = np.isfinite(outcome.finish_s)
    phases = {name: float(spent[served].mean()) for name, spent in outcome.phases.items()} if served.any() else {}
    return Seen(
        ttft_s=outcome.ttft_s + client_s, tpot_s=outcome.tpot_s, e2e_s=outcome.e2e_s + client_s, phases_s=phases
    )


def compare(prediction: Prediction, measured: Seen, slo: Slo) -> Verification:
    workload = prediction.workload
    expected, bounds = prediction.expected, prediction.bounds
    many = workload.output_len > 1  # a single token has no time per output token
    rows = []
    for metric in METRICS:
        kept = many if metric == "tpot" else np.ones(len(workload), dtype=bool)
        ranks = [percentiles(_values(seen, metric)[kept], PERCENTILES) for seen in (expected, *bounds, measured)]
        for i, percentile in enumerate(PERCENTILES):
            predicted = [values[i] for values in ranks[:-1]]
            rows.append(
                Row(
                    metric=metric,
                    percentile=percentile,
                    predicted=_interval(predicted),
                    measured=float(ranks[-1][i]),
                )
            )
    names = list(dict.fromkeys([*expected.phases_s, *measured.phases_s]))
    return Verification(
        rate=workload.rate,
        num_requests=len(workload),
        failed=measured.failed,
        slo=slo,
        rows=tuple(row for row in rows if not np.isnan(row.predicted.value)),
        attainment=_interval([attainment(seen, slo) for seen in (expected, *bounds)]),
        measured_attainment=attainment(measured, slo),
        phases_s={n: (expected.phases_s.get(n, 0.0), measured.phases_s.get(n, 0.0)) for n in names},
        error=prediction.error,
    )


def attainment(seen: Seen, slo: Slo) -> float:
    """Share of all requests that met both targets; a failed one met none."""
    with np.errstate(invalid="ignore"):
        return float(((seen.ttft_s <= slo.ttft_s) & (seen.tpot_s <= slo.tpot_s)).mean())


def _values(seen: Seen, metric: str) -> Floats:
    values: Floats = {"ttft": seen.ttft_s, "tpot": seen.tpot_s, "e2e": seen.e2e_s}[metric]
    return values


def _interval(values: Sequence[float]) -> Interval:
    """The first is what is expected, the others how it might be instead."""
    return Interval(values[0], min(values), max(values))
