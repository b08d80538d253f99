"""PlacementProblem is what all simulations of one plan have in common, PlanSearch the plan under way, SearchLog what it
has cost, WorkerGoodput what one worker is worth. Nothing is simulated here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

from placement.build.from_offers import OfferOf
from placement.catalogs.base import Catalog, Offer
from placement.goodput.runner import Job, Runner
from placement.goodput.targets import Targets
from placement.plan import Candidate, Goodput, Interval, Kind
from placement.search.question import PlanQuestion
from placement.workload.traffic import Traffic

ROUGHLY = 0.95  # times a rough figure is what it is taken for
ALIKE = 0.01  # of a goodput: so little more pays for nothing
CELL = 16  # workers: so many stand for a larger cluster
SIMPLEST: Sequence[Kind] = ("one pool", "two pools", "hybrid")  # the first
PhaseRole = Literal["prefill", "decode"]
OnFirst = Callable[[Goodput], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementProblem:
    """What is planned for, and what there is to buy."""

    catalog: Catalog
    offer_of: OfferOf
    traffic: Traffic
    targets: Targets
    seed: int = 0
    max_pp: int = 1
    thoroughness: float = 1.0  # so many times the requests of a run

    @property
    def hardware(self) -> str:
        return self.catalog.hardware

    @property
    def cell(self) -> int:
        """So many workers may stand for twice as many or more: the more, the burstier their requests. Bursts of a
        trace's own are not divided."""
        if self.traffic.is_replay:
            return 1 << 30
        return math.ceil(CELL * max(1.0, self.thoroughness) / min(1.0, self.traffic.burstiness))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGoodput:
    """One worker, simulated alone: a phase of Algorithm 1, or a colocated one. `unit`: the candidate of one worker."""

    offer: Offer
    goodput: Interval  # requests/s of the worker
    unit: Candidate | None = None  # colocated

    @property
    def gpus(self) -> int:
        return self.offer.degrees.gpus

    @property
    def per_gpu(self) -> float:
        return self.goodput.value / self.gpus


class Simulated(Protocol):
    @property
    def num_simulated(self) -> int: ...

    @property
    def cpu_s(self) -> float: ...


Counted = TypeVar("Counted", bound=Simulated)


@dataclass(slots=True, kw_only=True)
class SearchLog:
    """What a search cost, and what was refused on its way."""

    num_simulated: int = 0
    cpu_s: float = 0.0
    refused: dict[str, str] = field(default_factory=dict)

    def count(self, simulated: Simulated) -> None:
        self.num_simulated += simulated.num_simulated
        self.cpu_s += simulated.cpu_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSearch:
    """`num_gpus`: at most; for a rate, what a single worker may take. `on_first`: told a coarse answer."""

    question: PlanQuestion
    problem: PlacementProblem
    runner: Runner
    log: SearchLog
    num_gpus: int
    on_first: OnFirst | None = None

    def done(self, work: Callable[[Job], Counted], jobs: Sequence[Job], what: str) -> list[Counted]:
        """work(job) of each, and counted."""
        results = self.runner.map(work, jobs, what)
        for result in results:
            self.log.count(result)
        return results

    def tell_first(self, goodputs: Sequence[Goodput]) -> None:
        """The best of what a quick look has seen, if anything."""
        best = max((each for each in goodputs if each.goodput.value), key=self.score, default=None)
        if best is not None and self.on_first is not None:
            self.on_first(best)

    def error_of(self, candidate: Candidate) -> float:
        """How wrong the latency model may be, as a share of every time."""
        return max(self.problem.offer_of(pool.degrees, True).error for pool in candidate.pools)

    def score(self, goodput: Goodput) -> tuple[float, float]:
        """By the objective: more is better, and a rough figure less than it says. For a rate what has been found not to
        keep it is behind all others."""
        gpus, value = goodput.candidate.gpus, goodput.goodput.value * (ROUGHLY if goodput.is_rough else 1.0)
        if rate := self.question.rate:
            return (-gpus if goodput.keeps(rate) else -math.inf, value)
        if self.question.objective == "goodput":
            return (value, -gpus)
        return (value / gpus, value)

    def in_order(self, tried: Sequence[Goodput]) -> list[Goodput]:
        """The best first, of those that were simulated longer."""
        tried = simplest_first(sorted(tried, key=self.score, reverse=True), self.question.rate or 0.0)
        best = next((each for each in tried if not each.is_rough), tried[0])
        return [best, *(each for each in tried if each is not best)]


def simplest_first(tried: Sequence[Goodput], rate: float) -> list[Goodput]:
    """The same, the best first, but that of those as good as that the simplest kind is before it, and of one kind that
    which guesses no tokens ahead."""
    if not tried:
        return []
    best, least = tried[0], max(rate, (1 - ALIKE) * tried[0].goodput.value)
    sure = [each for each in tried[1:] if not each.is_rough and each.candidate.gpus <= best.candidate.gpus]
    alike = [best, *(each for each in sure if each.goodput.value >= least)]
    chosen = min(alike, key=lambda each: (SIMPLEST.index(each.candidate.kind), each.candidate.num_guesses > 0))
    return [chosen, *(each for each in tried if each is not chosen)]
