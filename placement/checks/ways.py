"""A Way is one way that a latency model's times may be in truth: so much longer or shorter for a whole run, as its
tables may be wrong and the machine swings, and different from step to step.

ways_of draws them, each as likely as the others; whoever predicts simulates in all of them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from placement.goodput.stationary import t_90
from placement.latency.base import DecodeLine, LatencyModel
from placement.latency.scaled import ScaledLatency
from placement.latency.under_load import NINE_IN_TEN, UnderLoad, Work
from placement.workload.requests import Floats, Ints

RUNS_FOR_LINES = 12  # four for each figure of one in two directions
# Of a phase's time, a standard deviation, from one quarter of an hour to the next, and how much of it both phases have
# in common: what the same loads of bench.coverage were off by beyond what a run's steps explain. A machine that swings
# much between runs of some minutes drifts more in an hour.
DRIFT, TOGETHER = 0.1, 0.7
OF_SWING = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Factors of all times of a phase in one run, and of what lies between a client and the workers, which the same
    cores compute; `seed` draws the noise."""

    prefill: float
    decode: float
    seed: int
    client: float = 1.0


def ways_of(
    load: UnderLoad | None, work: Work, prefill_error: float, decode_error: float, count: int, seed: int
) -> list[Way]:
    """So many, each as likely as the others, of a run with so much to do. The errors are of the tables, nine times in
    ten, as shares. Both are drawn evenly over their quantiles (Latin hypercube), so that few say much."""
    rng = np.random.default_rng(seed)
    even = np.array([NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)])
    logs, client = np.zeros((count, 2)), np.zeros(count)
    for column, error in enumerate((prefill_error, decode_error)):
        logs[:, column] = math.log1p(error) / NINE_IN_TEN * rng.permutation(even)
    if load is not None:
        centre, spread = _of_another_run(load, work)
        off = np.stack([rng.permutation(even), rng.permutation(even)], axis=1) @ spread.T
        logs += centre + off
        client = off.mean(axis=1)
    seeds = rng.integers(2**31, size=count)
    drawn = zip(np.exp(logs).tolist(), np.exp(client).tolist(), seeds.tolist(), strict=True)
    return [Way(prefill=p, decode=d, client=c, seed=s) for (p, d), c, s in drawn]


def _of_another_run(load: UnderLoad, work: Work) -> tuple[Floats, Floats]:
    """Where the logarithms of its factors lie, and by which matrix to multiply two normal deviates for what they differ
    by: what both phases have in common stays.

    A line through all runs in how much there was to do, which the fit of all does not meet alike. What another run is
    off by is what each run was off a line through those that were not like it, since what is asked need not be like any
    of them; and machines drift. Of few runs the spread itself is not known well: the normal's quantile becomes
    Student's."""
    logs = np.log([(run.prefill, run.decode) for run in load.runs])
    done = np.array([run.work.logs for run in load.runs])
    columns = 2 if len(logs) >= RUNS_FOR_LINES else 0
    centre, free = _on_a_line(done, logs, np.array(work.logs), columns), len(logs) - 1 - columns
    drift = np.maximum(DRIFT, OF_SWING * np.array([load.prefill.swing, load.decode.swing]))
    covariance = np.outer(drift, drift) * np.array([[1.0, TOGETHER], [TOGETHER, 1.0]])
    if free:
        left = np.array([logs[i] - _on_a_line(done[far], logs[far], done[i], columns) for i, far in _unlike(done)])
        student = t_90(free) / NINE_IN_TEN
        covariance += left.T @ left / len(left) * student * student
    spread: Floats = np.asarray(np.linalg.cholesky(covariance), dtype=np.float64)
    return centre, spread


def _on_a_line(done: Floats, logs: Floats, asked: Floats, columns: int) -> Floats:
    """Least squares in so many columns of what there was to do; no further than the runs went."""
    centre = done.mean(axis=0)
    rows = np.column_stack([np.ones(len(done)), (done - centre)[:, :columns]])
    asked = np.clip(asked, done.min(axis=0), done.max(axis=0)) - centre
    there: Floats = np.array([1.0, *asked[:columns]]) @ np.linalg.pinv(rows) @ logs
    return there


def _unlike(done: Floats) -> Iterator[tuple[int, Ints]]:
    """Each run, and those but the third that were most like it, itself among them."""
    for i in range(len(done)):
        yield i, np.argsort(np.linalg.norm(done - done[i], axis=1))[max(1, len(done) // 3) :]


@dataclass(frozen=True, slots=True, kw_only=True)
class WayLatency:
    """A LatencyModel as it is in one Way. Steps that read prompts differ among themselves, one after another by its
    seed: make another for each simulation. (It has what it could inherit: no class of Python's is made of a compiled
    one's frozen dataclass.)"""

    scaled: ScaledLatency
    noise: Sequence[float]
    rng: random.Random

    @property
    def source(self) -> str:
        return self.scaled.source

    @property
    def stages(self) -> int:
        return self.scaled.stages

    def prefill_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        return self.scaled.prefill_s(chunks) * self.rng.choice(self.noise)

    def decode_line(self, batch_size: int, context_tokens: int) -> DecodeLine:
        return self.scaled.decode_line(batch_size, context_tokens)

    def mixed_s(self, chunks: Sequence[tuple[int, int]], batch_size: int, context_tokens: int) -> float:
        return self.scaled.mixed_s(chunks, batch_size, context_tokens)

    def transfer_s(self, num_tokens: int) -> float:
        return self.scaled.transfer_s(num_tokens)


def way_latency(model: LatencyModel, way: Way, noise: Sequence[float]) -> WayLatency:
    how = "in one way that it may be"
    scaled = ScaledLatency(model=model, prefill=way.prefill, decode=way.decode, transfer=way.decode, how=how)
    return WayLatency(scaled=scaled, noise=noise or (1.0,), rng=random.Random(way.seed))
