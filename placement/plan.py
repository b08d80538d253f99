"""Plan is the planner's answer, as values: what was asked, what was tried, what was chosen, how sure it is.

Nothing here computes. Times are seconds, rates requests per second of the whole candidate unless a name says per_gpu,
shares 0 to 1. `to_json` gives plain data for --json; every figure that was estimated is an Interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal

from placement.catalogs.base import Degrees

Objective = Literal["goodput", "cost", "power"]
Pool = Literal["prefill", "decode", "link", "router", "none"]
Kind = Literal["two pools", "one pool", "hybrid"]
KINDS: tuple[Kind, ...] = ("two pools", "one pool", "hybrid")
PoolRole = Literal["prefill", "decode", "mixed", "colocated"]  # the last only of published systems


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate, and where the truth lies nine times in ten."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"

    def covering(self, *values: float) -> Interval:
        """The same estimate, where the truth may lie as far off as these, too."""
        return Interval(self.value, min(self.low, *values), max(self.high, *values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Both targets, and the share of requests that must meet both."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf
    attainment: float = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestClass:
    """Requests that have targets of their own: `share` of all."""

    name: str
    share: float
    slo: Slo


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """One pool of alike workers."""

    role: PoolRole
    degrees: Degrees
    replicas: int
    hardware: str
    num_pages: int  # of each worker
    page_size: int
    max_batch_tokens: int
    max_batch_size: int
    power_cap: float = 1.0  # of a machine's power
    pack_tokens: int | None = None  # no prompt joins a prefill step that has so many; None: max_batch_tokens
    chunk_tokens: int = 0  # mixed: of prompts in a step that decodes, too
    num_speculative_tokens: int = 0  # guessed ahead of a request in a step, at most

    @property
    def gpus(self) -> int:
        return self.degrees.gpus * self.replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to run: two pools, one whose workers do both, or a hybrid: several, of which some do both."""

    pools: tuple[PoolPlan, ...]
    design: str = ""  # of Splitwise: AA, HH, HA, HHcap, Baseline-A100, ...

    @property
    def is_colocated(self) -> bool:
        return self.kind == "one pool"

    @property
    def kind(self) -> Kind:
        if len(self.pools) == 1:
            return "one pool"
        return "hybrid" if any(pool.role == "mixed" for pool in self.pools) else "two pools"

    @property
    def num_guesses(self) -> int:
        """That its workers run ahead of a request, at most; 0: a step makes a token."""
        return max(pool.num_speculative_tokens for pool in self.pools)

    def one_of(self, copies: int) -> Candidate:
        """Of so many clusters as it is run as, which are alike."""
        pools = (replace(pool, replicas=pool.replicas // copies) for pool in self.pools)
        return replace(self, pools=tuple(pools))

    @property
    def is_served(self) -> bool:
        """`kvrelay up` can run it."""
        return all(pool.role != "colocated" for pool in self.pools)

    @property
    def gpus(self) -> int:
        return sum(pool.gpus for pool in self.pools)

    @property
    def unit(self) -> str:
        """What it takes so many of: GPUs or cores."""
        return self.pools[0].degrees.unit

    @property
    def label(self) -> str:
        """3 x prefill TP 2 + 1 x decode TP 4; 4 x mixed TP 2, chunks of 512"""
        text = " + ".join(f"{pool.replicas} x {pool.role} {pool.degrees}" for pool in self.pools)
        chunks = dict.fromkeys(f"{pool.chunk_tokens:,}" for pool in self.pools if pool.role == "mixed")
        text += f", chunks of {' and '.join(chunks)}" if chunks else ""
        text += f", {self.num_guesses} guesses ahead" if self.num_guesses else ""
        return f"{self.design}: {text}" if self.design else text


@dataclass(frozen=True, slots=True, kw_only=True)
class RatePoint:
    """What was found at one rate. `ttft_s`, `tpot_s`: by percentile ("50", "90", "99"). `phases_s`: mean seconds of a
    request in each phase of its life. `busy`: share of the time that each pool's workers computed, and that its pages
    were held, as `prefill`, `decode`, `prefill_kv`, `decode_kv`, `link` where they were counted."""

    rate: float
    attainment: Interval
    ttft_s: Mapping[str, Interval] = field(default_factory=dict)
    tpot_s: Mapping[str, Interval] = field(default_factory=dict)
    phases_s: Mapping[str, float] = field(default_factory=dict)
    busy: Mapping[str, float] = field(default_factory=dict)
    by_class: Mapping[str, float] = field(default_factory=dict)  # attainment of each request class
    num_requests: int = 0
    is_settled: bool = True  # False: a limit was hit before the interval was narrow


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """The highest rate at which a candidate keeps the SLO, and the points that the search stepped on, by rate."""

    candidate: Candidate
    goodput: Interval  # requests/s; 0 where no rate keeps it
    curve: tuple[RatePoint, ...]
    usd_per_hour: float
    watts: float
    limit: str = ""  # why it is no higher, where a reason other than queueing is known
    is_rough: bool = False  # by runs so short that a queue had no time to build: most are too high by a few per cent
    copies: int = 1  # clusters of one pair each that it is run as, each with its share of the requests

    @property
    def per_gpu(self) -> float:
        return self.goodput.value / self.candidate.gpus

    def keeps(self, rate: float | None) -> bool:
        """Whether it keeps the SLO at this rate, or at any. What was sized by a quick look is taken at its word; so is
        a mix of machines, which was bought for the rate: its goodput is a mean of several draws."""
        is_sized = self.is_rough or bool(self.candidate.design)
        return self.goodput.value > 0 and (rate is None or is_sized or self.goodput.value >= rate)

    @property
    def one_cluster(self) -> Candidate:
        """Of those that it is run as."""
        return self.candidate.one_of(self.copies)


@dataclass(frozen=True, slots=True, kw_only=True)
class Near:
    """A step that somebody measured, and what the latency model says of it. `case`: model, GPU, TP, and how many
    prompts of how many tokens, with how many of output."""

    phase: str
    case: str
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Swing:
    """One thing that a plan was told, otherwise: how in words, and the goodput of the chosen placement then."""

    what: str
    less: str
    more: str
    at_less: float  # requests/s
    at_more: float

    @property
    def span(self) -> float:
        return abs(self.at_more - self.at_less)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`asked`: the inputs as plain data, enough to run it again. `tried`: every candidate whose goodput was searched,
    the best first. `refused`: what could not be, and why. `advice`: sentences for the report, most important first."""

    asked: Mapping[str, Any]
    slo: Slo
    objective: Objective
    chosen: Goodput
    at_rate: RatePoint  # the chosen candidate at the rate that is asked for, or at its goodput
    binding: Pool
    headroom: float  # of the goodput, left at the rate asked for: 0.25 is a quarter; 0 at the knee
    tried: tuple[Goodput, ...]
    refused: Mapping[str, str]
    advice: tuple[str, ...]
    sources: Mapping[str, str]  # where the figures come from: latency, workload, hardware
    phase_goodput: Mapping[str, tuple[tuple[str, float], ...]] = field(default_factory=dict)
    """Algorithm 1's two tables: for "prefill" and "decode", the goodput per GPU of each degree."""
    nearest: tuple[Near, ...] = ()  # measured steps most like this plan's; empty: its times are no roofline's
    swings: tuple[Swing, ...] = ()  # what moves the answer, the most first; empty: not asked
    cpu_s: float = 0.0
    num_simulated: int = 0  # requests

    @property
    def is_disaggregated(self) -> bool:
        return not self.chosen.candidate.is_colocated


def to_json(value: Any) -> Any:
    """Plain data: dataclasses by their fields, infinities and nan as null."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
