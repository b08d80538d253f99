"""fit_under_load says how much longer a profile's steps took while a live load was served: least squares over them.

    ServedRuns -> steps (served_steps.py) -> a factor alone and one beside the other phase, what each step takes more,
                  what differs between runs, what differs between steps

It asks nobody: kvrelay/calibrate/loading.py serves the load.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvrelay.calibrate.served_steps import Course, Tables, busy_s, decode_steps, gaps_s, idle_s, prefill_steps, span_s
from placement.latency.under_load import LoadRun, PhaseUnderLoad, UnderLoad
from placement.workload.requests import Floats

LEAST_OF_A_RUN = 5  # answers, and prefill steps
QUANTILES = 100
EVEN = (np.arange(QUANTILES) + 0.5) / QUANTILES
LEAST_FACTOR = 0.05
SLOWDOWNS = np.geomspace(1.0, 8.0, 417)  # half a hundredth from one to the next


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRun:
    """`first_token_s`: of each request, from its prompt's being computed until the client had its first token, and what
    lay between client and router before; `rest_s`: what it then waited for the others longer than the server says.
    `others`: that ran meanwhile, and count in another run."""

    at_s: float
    rate: float
    courses: Sequence[Course]
    first_token_s: Sequence[float]
    rest_s: Sequence[float]
    exposed_s: Sequence[float]
    others: Sequence[Course] = ()


def fit_under_load(runs: Sequence[ServedRun], tables: Tables) -> UnderLoad | None:
    """None where too little was served to say anything."""
    prefills = [prefill_steps(run.courses, tables, run.others) for run in runs]
    decodes = [decode_steps(run.courses, tables, run.others) for run in runs]
    used = [i for i in range(len(runs)) if min(len(prefills[i]), len(decodes[i])) >= LEAST_OF_A_RUN]
    if not used:
        return None
    runs, prefills, decodes = ([each[i] for i in used] for each in (runs, prefills, decodes))  # type: ignore[assignment]
    prefill, prefill_of = _fitted(prefills, tables.prefill_beside, 1)
    decode, decode_of = _fitted(decodes, tables.decode_beside, -1)
    gaps = [gap_s for run in runs for gap_s in gaps_s(run.courses)]
    return UnderLoad(
        prefill=prefill,
        decode=decode,
        gap_s=float(np.mean(gaps)) if len(gaps) >= LEAST_OF_A_RUN else tables.overhead_s,
        handoff_s=max(0.0, float(np.median([s for run in runs for s in run.exposed_s] or [0])) - tables.message_s),
        runs=tuple(_load_run(*each, tables) for each in zip(runs, prefill_of, decode_of, strict=True)),
    )


@dataclass(frozen=True, slots=True)
class _Factors:
    """`sign` 1: of a time for steps; -1: of steps in a time, which are the fewer the longer each takes."""

    alone: float
    more_s: float
    slowdown: float
    sign: int

    def of(self, rows: Floats) -> Floats:
        """What each row was of what is fitted: above 1 where steps took longer."""
        ratios: Floats = (rows[:, 0] / self._fitted(rows)) ** self.sign
        return ratios

    def noise(self, rows: Floats, whole: float) -> Floats:
        """Of one step: what those of a row took together differs by the root of their number less."""
        noise: Floats = (self.of(rows) / whole) ** np.sqrt(_steps(rows, self.sign))
        return noise

    def whole(self, rows: Floats) -> float:
        return float((rows[:, 0].sum() / self._fitted(rows).sum()) ** self.sign)

    def _fitted(self, rows: Floats) -> Floats:
        times = (self.alone + self.more_s / rows[:, 3]) * _slowed(rows, self.slowdown, self.sign)
        fitted: Floats = rows[:, 1] * times**self.sign
        return fitted


@dataclass(frozen=True, slots=True)
class _OfRun:
    """What a run's steps took of the fit, and how they differed among themselves."""

    factor: float
    noise: tuple[float, ...]


def _fitted(runs: Sequence[Floats], beside: float, sign: int) -> tuple[PhaseUnderLoad, list[_OfRun]]:
    """Rows of (measured, by the tables, of that beside the other phase). Runs took as long as the fit on their
    (geometric) mean. `beside`: as probes found it."""
    factors = _least_squares(np.concatenate(runs), beside, sign)
    of_runs = np.array([factors.whole(rows) for rows in runs])
    centre = float(np.exp(np.log(of_runs).mean()))
    noises = [factors.noise(rows, whole) for rows, whole in zip(runs, of_runs.tolist(), strict=True)]
    swing = float(np.std(np.log(of_runs), ddof=1)) if len(runs) > 1 else 0.0
    phase = PhaseUnderLoad(
        alone=centre * factors.alone,
        beside=centre * factors.alone * factors.slowdown,
        more_s=centre * factors.more_s,
        bias=swing / math.sqrt(len(runs)),
        swing=swing,
        noise=float(np.std(np.log(np.concatenate(noises)))),
    )
    found = zip((of_runs / centre).tolist(), noises, strict=True)
    # steps are drawn each alike; answers count by their steps, and weighed by those their mean is 1 already
    return phase, [_OfRun(whole, _quantiles(noise / noise.mean() if sign > 0 else noise)) for whole, noise in found]


def _least_squares(rows: Floats, beside: float, sign: int) -> _Factors:
    """Of what a step took of the tables: a factor and a time more, both so many times as long beside the other phase,
    which speeds nothing up. One more row says what probes found of that, for a load that never had a worker alone."""
    weights = np.sqrt(_steps(rows, sign))
    taken = weights * (rows[:, 0] / rows[:, 1]) ** sign
    found = [(_fit(rows, taken, weights, slowdown, sign), slowdown) for slowdown in SLOWDOWNS.tolist()]
    (_, alone, more_s), slowdown = min(found, key=lambda fit: fit[0][0] + (fit[1] - beside) ** 2)
    return _Factors(max(LEAST_FACTOR, alone), more_s, slowdown, sign)


def _fit(rows: Floats, taken: Floats, weights: Floats, slowdown: float, sign: int) -> tuple[float, float, float]:
    """Squares left over, the factor, and the time more, for a slowdown that is known. `taken` is weighed already."""
    slowed = _slowed(rows, slowdown, sign) * weights
    mean_s = float(rows[:, 3].mean())
    columns = np.column_stack([slowed, slowed * mean_s / rows[:, 3]])
    nothing_more = np.diag([0.0, 1.0])  # one more row, for steps that are all alike
    alone, more = np.linalg.solve(columns.T @ columns + nothing_more, columns.T @ taken)
    if more < 0:
        alone, more = slowed @ taken / (slowed @ slowed), 0.0
    left = taken - columns @ (alone, more)
    return float(left @ left), float(alone), float(more * mean_s)


def _slowed(rows: Floats, slowdown: float, sign: int) -> Floats:
    """How many times as long each row took for a part of it that was beside the other phase."""
    slowed: Floats = (1 + (slowdown**sign - 1) * rows[:, 2] / rows[:, 1]) ** sign
    return slowed


def _steps(rows: Floats, sign: int) -> Floats:
    return rows[:, 0] if sign < 0 else np.ones(len(rows))


def _quantiles(values: Floats) -> tuple[float, ...]:
    return tuple(np.quantile(values, EVEN).tolist())


def _load_run(run: ServedRun, prefill: _OfRun, decode: _OfRun, tables: Tables) -> LoadRun:
    lasted_s = span_s(run.courses)
    tokens = sum(course.output for course in run.courses)
    client_s, client_rest_s = _client_s(run, tables)
    return LoadRun(
        at_s=run.at_s,
        rate=run.rate,
        tokens_per_s=tokens / lasted_s,
        busy=busy_s(run.courses) / lasted_s / len({course.prefill_worker for course in run.courses}),
        requests=len(run.courses),
        prefill=prefill.factor,
        decode=decode.factor,
        prefill_noise=prefill.noise,
        decode_noise=decode.noise,
        client_s=client_s,
        client_rest_s=client_rest_s,
    )


def _client_s(run: ServedRun, tables: Tables) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Until the first token, beside the steps, waiting for them, and a message each way: even quantiles; and what these
    requests waited for the rest. Who has its first token late has the others the sooner after it."""
    idle = idle_s(run.courses)
    before_s = float(np.median(idle)) if idle else tables.message_s
    until_s, rest_s = np.array(run.first_token_s), np.array(run.rest_s)
    picked = np.argsort(until_s)[(EVEN * len(until_s)).astype(np.intp)]
    until_s = np.maximum(0.0, until_s[picked] + before_s - 2 * tables.message_s)
    return tuple(until_s.tolist()), tuple(rest_s[picked].tolist())
