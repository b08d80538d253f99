"""UnderLoad is what a live load showed of a profile: how much longer steps take while the whole cluster is at work, and
how sure that is. Values only.

    bias     of the factors: the standard error of what was fitted
    swing    between runs that lay minutes apart: the machine's, and of rates that the factors do not meet alike
    noise    between the steps of one run

Shares are of a time: logarithms, of which 0.1 is a tenth. kvrelay/calibrate/contention.py fits it, and a prediction is
made in each of many ways that it may be (placement/checks/ways.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

KINDS = 9  # of runs that a load has, by turns: rates and lengths
LEAST = 1e-3  # of a share or a rate, that its logarithm is taken of
NINE_IN_TEN = NormalDist().inv_cdf(0.95)  # standard deviations, either way


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseUnderLoad:
    """A step takes `alone` times what the tables say, and `more_s`, while no worker of the other phase computes beside
    it; while they do, all of that is longer as `beside` is than `alone`. `noise`: of one step, its standard
    deviation."""

    alone: float = 1.0
    beside: float = 1.0
    more_s: float = 0.0
    bias: float = 0.0
    swing: float = 0.0
    noise: float = 0.0


def wrong_by(error: float, phase: PhaseUnderLoad | None) -> float:
    """Nine times in ten, as a share: the tables, or what was fitted to a load, whose bias and swing hold what is left
    of the tables' error."""
    return math.expm1(NINE_IN_TEN * math.hypot(phase.bias, phase.swing)) if phase else error


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """How much there is to do: `busy` is the share of the time that a prefill worker computes."""

    busy: float
    tokens_per_s: float

    @property
    def logs(self) -> tuple[float, float]:
        return math.log(max(self.busy, LEAST)), math.log(max(self.tokens_per_s, LEAST))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRun:
    """One run, `at_s` after the first. `busy`: the share of the time that a prefill worker computed. `prefill`,
    `decode`: what its steps took of what was fitted to all. Even quantiles: of the noise, what one step took of that (n
    in a row: to the power of 1/sqrt(n)); of `client_s`, what lay between a client and the workers until the first
    token. `client_rest_s`: what each of these clients then waited for the others longer than the server says, which is
    below 0 where the first came late."""

    at_s: float
    rate: float
    tokens_per_s: float
    busy: float
    requests: int
    prefill: float
    decode: float
    prefill_noise: tuple[float, ...]
    decode_noise: tuple[float, ...]
    client_s: tuple[float, ...]
    client_rest_s: tuple[float, ...]

    @property
    def work(self) -> Work:
        return Work(busy=self.busy, tokens_per_s=self.tokens_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderLoad:
    """`gap_s`: between two prefill steps while prompts wait."""

    prefill: PhaseUnderLoad
    decode: PhaseUnderLoad
    gap_s: float
    handoff_s: float
    runs: tuple[LoadRun, ...]

    def runs_like(self, work: Work) -> list[LoadRun]:
        """One run of each KINDS, those that were most like that: router and clients had as much to do."""

        def distance(run: LoadRun) -> float:
            return math.dist(run.work.logs, work.logs)

        return sorted(self.runs, key=distance)[: math.ceil(len(self.runs) / KINDS)]
