"""PlanAnswer makes a Plan of what was tried: the best one's interval with the latency model's error, curves to draw,
the rate asked for, which pool binds, and the sentences about it. What is best is decided before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from placement.catalogs.base import PlanError
from placement.goodput.estimate import Effort, Estimate
from placement.goodput.search import GoodputProblem, Knee, find_goodput
from placement.latency.scaled import factors_of
from placement.plan import Candidate, Goodput, Interval, Plan, Pool, RatePoint, Swing
from placement.search.advice import Findings, advise
from placement.search.clusters import JOINT, LONG
from placement.search.infeasible import no_room
from placement.search.placements import Placement, goodput_problem, system_of, with_candidate
from placement.search.problem import PhaseRole, PlanSearch, WorkerGoodput
from placement.search.sizing import EstimateJob, binding_pool, estimate_job, few_more, with_more
from placement.search.what_if import scale_of, swings_of, what_if
from placement.workload.arrivals import gaps_of

FINAL = Effort(first_requests=LONG.first_requests, max_requests=18_000, half_width=0.01, covers=0.999)
WHOLE = 8  # times as many workers as elsewhere stand for more at the rate asked for
BINDS = Effort(first_requests=1500, max_requests=4000, half_width=0.02, decides=True)
CURVE = Effort(first_requests=1000, max_requests=2000, half_width=0.03, decides=True)
CURVE_AT = (0.25, 0.5, 0.8, 1.2)  # of the goodput: points of each candidate's curve besides the search's
CURVES = 4  # candidates that get them
BEYOND = (1.1, 1.3, 1.6)  # of the goodput: where it is seen which pool binds, the first that misses the SLO
STEP_DOWN = 0.985  # of a goodput that a longer run does not keep
MOST_STEPS_DOWN = 5
MISSED = 0.02  # of the requests: more than chance
MANY = 100  # requests, whose arrivals say something
QUESTION_KEYS = (
    "num_gpus",
    "rate",
    "budget_usd_per_hour",
    "max_pp",
    "colocated",
    "algorithm",
    "burstiness",
    "thoroughness",
    "is_replay",
    "seed",
    "objective",
)


class PlanAnswer:
    def __init__(self, search: PlanSearch, placements: Sequence[Placement]) -> None:
        """`placements`: of all that was tried."""
        self.search = search
        self.question = search.question
        self.problem = search.problem
        self.placements = {placement.candidate: placement for placement in placements}

    def plan(self, tried: Sequence[Goodput], phases: Mapping[str, Sequence[WorkerGoodput]]) -> Plan:
        """`tried`: what has a goodput."""
        tried, at_rate, knee = self._surely_best(tried)
        self._raise_if_missed(tried[0].candidate, at_rate)
        rate = self.question.rate or at_rate.point.rate
        chosen = tried[0]
        binding, relief = self._relieved(chosen, knee)
        headroom = max(0.0, 1 - rate / chosen.goodput.value)
        placement = self.placements[chosen.candidate]
        advice = advise(self._findings(tried, binding, relief, knee.point.rate, headroom))
        swings: tuple[Swing, ...] = ()
        if self.question.what_if:
            scale = scale_of(self.search, placement, chosen)
            swings = swings_of(self.search, placement, chosen, scale)
            advice += what_if(self.search, [self.placements[each.candidate] for each in tried], chosen, swings, scale)
        return Plan(
            asked=self._asked(),
            slo=self.question.slo,
            objective=self.question.objective,
            chosen=chosen,
            at_rate=at_rate.point,
            binding=binding,
            headroom=headroom,
            tried=tuple(tried),
            refused=dict(sorted(self.search.log.refused.items())),
            advice=tuple(advice),
            swings=swings,
            sources=self._sources(chosen),
            phase_goodput={
                role: tuple((str(worker.offer.degrees), worker.per_gpu) for worker in workers)
                for role, workers in phases.items()
            },
            num_simulated=self.search.log.num_simulated,
        )

    def _findings(
        self, tried: Sequence[Goodput], binding: Pool, relief: Mapping[str, float], over: float, headroom: float
    ) -> Findings:
        chosen = tried[0]
        return Findings(
            chosen=chosen,
            tried=tried,
            binding=binding,
            relief=relief,
            over=over,
            headroom=headroom,
            rate=self.question.rate,
            error=self.search.error_of(chosen.candidate),
            asked_colocated=self.question.colocated,
            arrivals=self._arrivals(),
            acceptance=self._acceptance(),
            has_decode=self.problem.traffic.source.has_decode,
            no_room=no_room(self.problem.traffic.source, chosen.candidate, self._max_len(chosen.candidate)),
        )

    # what else is simulated

    def _surely_best(self, tried: Sequence[Goodput]) -> tuple[list[Goodput], Estimate, Estimate]:
        """The best first, and of that what it does at the rate and where it misses the SLO: also by the longest of all
        runs, in which it may do less than was found, and another one more."""
        looked_at: dict[Candidate, tuple[Estimate, Estimate]] = {}
        tried = self.search.in_order(tried)
        while (candidate := tried[0].candidate) not in looked_at:
            tried, at_rate, knee = self._looked_at(tried, self.question.rate or tried[0].goodput.value)
            if not self.question.rate:
                tried, at_rate = self._kept(tried, at_rate)
            elif not at_rate.keeps_slo:
                tried = [_below(tried[0], self.question.rate), *tried[1:]]
            looked_at[candidate] = at_rate, knee
            tried = self.search.in_order(tried)
        return tried, *looked_at[tried[0].candidate]

    def _raise_if_missed(self, nearest: Candidate, at_rate: Estimate) -> None:
        """Raises PlanError where the rate that is asked for is missed by more than chance, by all that was tried."""
        if self.question.rate is None or at_rate.slack.value > -MISSED:
            return
        share = f"{at_rate.point.attainment.value:.1%}"
        raise PlanError(
            f"rate is {self.question.rate:g} requests/s, and no placement that was tried keeps the targets there in "
            f"the longest run: {share} of requests meet them on {nearest.label}; ask for longer targets, or leave out "
            "the longest requests (--max-input-len cuts those of a trace)"
        )

    def _looked_at(self, tried: Sequence[Goodput], rate: float) -> tuple[list[Goodput], Estimate, Estimate]:
        """With the interval of the chosen one, and a few more points for the best, so that their curves can be drawn
        from an idle cluster to an overloaded one; then the chosen one at the rate, and where it misses the SLO. None of
        these jobs waits for another; the longest come first."""
        placement, error = self.placements[tried[0].candidate], self.search.error_of(tried[0].candidate)
        shown = tried[:CURVES]
        jobs: list[EstimateJob | GoodputProblem] = [
            self._final(placement, rate),
            *self._error_searches(tried[0], error),
            self._job(placement, BEYOND[0] * tried[0].goodput.value, BINDS),
        ]
        for goodput in shown:
            points = [share * goodput.goodput.value for share in CURVE_AT]
            jobs += [self._job(self.placements[goodput.candidate], point, CURVE) for point in points]
        done = self._done(jobs)
        at_rate, knee, *points_of_curves = [result for result in done if isinstance(result, Estimate)]
        tried = [_with_error(tried[0], [result for result in done if isinstance(result, Knee)]), *tried[1:]]
        more = iter(points_of_curves)
        curves = [[*goodput.curve, *(next(more).point for _ in CURVE_AT)] for goodput in shown]
        curves += [list(goodput.curve) for goodput in tried[CURVES:]]
        drawn = [replace(goodput, curve=_falling(curve)) for goodput, curve in zip(tried, curves, strict=True)]
        return drawn, at_rate, self._missing(placement, tried[0].goodput.value, knee)

    def _kept(self, tried: Sequence[Goodput], at_rate: Estimate) -> tuple[list[Goodput], Estimate]:
        """No rate is asked for: the goodput is one that the longest of all runs keeps, too."""
        best, *others = tried
        placement = self.placements[best.candidate]
        for _ in range(MOST_STEPS_DOWN):
            if at_rate.keeps_slo:
                break
            (at_rate,) = self._estimates([self._final(placement, STEP_DOWN * at_rate.point.rate)])
        value = min(at_rate.point.rate, best.goodput.value)
        goodput = replace(best.goodput, value=value, low=min(best.goodput.low, value))
        return [replace(best, goodput=goodput), *others], at_rate

    def _error_searches(self, chosen: Goodput, error: float) -> list[GoodputProblem]:
        """At times so much longer and shorter as the latency model may be wrong."""
        placement, top = self.placements[chosen.candidate], 1.05 * chosen.goodput.value
        return [
            replace(
                goodput_problem(self.problem, placement, effort=JOINT, precision=0.03, factor=factor),
                bottom=0.9 * top / factor,
                top=top / factor,
            )
            for factor in (factors_of(error) if error else ())
        ]

    def _missing(self, placement: Placement, goodput: float, knee: Estimate) -> Estimate:
        """What binds shows only where something is late."""
        for factor in BEYOND[1:]:
            if knee.keeps_slo:
                (knee,) = self._estimates([self._job(placement, factor * goodput, BINDS)])
        return knee

    def _relieved(self, chosen: Goodput, knee: Estimate) -> tuple[Pool, Mapping[str, float]]:
        """Which pool binds: where few workers more help most just above the goodput. Attainment by what was added."""
        candidate, as_it_is = chosen.candidate, {"": knee.point.attainment.value}
        if candidate.kind != "two pools":
            return "none", as_it_is
        binding: Pool = binding_pool(knee.point, knee.missed_ttft, knee.missed_tpot)
        placement = self.placements[candidate]
        if placement.copies > 1:
            return binding, as_it_is
        roles: tuple[PhaseRole, ...] = ("prefill", "decode")
        more = [with_more(placement, candidate, index, few_more(candidate, index)) for index in (0, 1)]
        variants = [with_candidate(placement, each) for each in more]
        estimates = self._estimates([self._job(variant, knee.point.rate, BINDS) for variant in variants])
        relief = {role: at.point.attainment.value for role, at in zip(roles, estimates, strict=True)}
        if abs(relief["prefill"] - relief["decode"]) > 0.02 and binding != "link":
            binding = "prefill" if relief["prefill"] > relief["decode"] else "decode"
        return binding, as_it_is | relief

    def _estimates(self, jobs: Sequence[EstimateJob]) -> list[Estimate]:
        return [result for result in self._done(jobs) if isinstance(result, Estimate)]

    def _final(self, placement: Placement, rate: float) -> EstimateJob:
        """The longest run, with the latency model wrong by as much as it may be; of far larger cells, or the whole."""
        error = self.search.error_of(placement.candidate)
        return replace(self._job(placement, rate, FINAL, WHOLE * self.problem.cell), error=error)

    def _job(self, placement: Placement, rate: float, effort: Effort, cell: int = 0) -> EstimateJob:
        """`cell`: of how many workers, if not of as many as elsewhere."""
        problem = self.problem
        system, copies = system_of(placement, problem.offer_of, problem.targets.loosest, cell or problem.cell)
        return EstimateJob(
            system=system,
            copies=copies,
            traffic=problem.traffic,
            rate=rate,
            targets=problem.targets,
            effort=effort.times(self.question.thoroughness),
            seed=problem.seed,
        )

    def _done(self, jobs: Sequence[EstimateJob | GoodputProblem]) -> list[Estimate | Knee]:
        return self.search.done(estimate_or_search, jobs, "intervals and curves")

    # in words

    def _max_len(self, candidate: Candidate) -> int:
        return self.problem.offer_of(candidate.pools[0].degrees, True).max_len

    def _acceptance(self) -> float | None:
        """Of guesses ahead; None: nobody asked for any."""
        offers = (self.problem.offer_of(pool.degrees, True) for each in self.placements for pool in each.pools)
        return next((offer.speculation.acceptance for offer in offers if offer.speculation is not None), None)

    def _arrivals(self) -> str:
        """What drawn arrivals leave out of the trace's own."""
        source = self.problem.traffic.source
        if self.question.is_replay or len(source) < MANY or not source.duration_s:
            return ""
        return gaps_of(source).warning

    def _asked(self) -> dict[str, Any]:
        catalog, source = self.problem.catalog, self.problem.traffic.source
        return {
            "model": catalog.model,
            "hardware": catalog.hardware,
            "workload": source.name,
            "requests": len(source),
            "slo": self.question.slo,
            "classes": self.question.classes,
            **{key: getattr(self.question, key) for key in QUESTION_KEYS},
        }

    def _sources(self, chosen: Goodput) -> dict[str, str]:
        offer = self.problem.offer_of(chosen.candidate.pools[0].degrees, True)
        drawn = f"gamma arrivals of burstiness {self.question.burstiness:g}"
        arrivals = "its own arrivals" if self.question.is_replay else drawn
        return {
            "latency": offer.latency.source,
            "hardware": self.problem.hardware,
            "workload": f"{self.problem.traffic.source.name}: lengths drawn from it, {arrivals}",
        }


def estimate_or_search(job: EstimateJob | GoodputProblem) -> Estimate | Knee:
    return estimate_job(job) if isinstance(job, EstimateJob) else find_goodput(job)


def _below(chosen: Goodput, rate: float) -> Goodput:
    """It does not keep the rate in the longest run: its goodput is less, however fast it looked in shorter ones."""
    value = min(chosen.goodput.value, STEP_DOWN * rate)
    return replace(chosen, goodput=Interval(value, min(chosen.goodput.low, value), min(chosen.goodput.high, rate)))


def _with_error(chosen: Goodput, knees: Sequence[Knee]) -> Goodput:
    """Its interval covers what was found at longer and at shorter times."""
    if not knees:
        return chosen
    (slow, fast), own = knees, chosen.goodput
    low, high = min(own.low, slow.goodput.low), max(own.high, fast.goodput.high)
    return replace(chosen, goodput=Interval(own.value, low, high))


def _falling(curve: Sequence[RatePoint]) -> tuple[RatePoint, ...]:
    """By rate, without the points that a run too short to settle has flattered: more of them cannot be in time than at
    a lower rate."""
    kept: list[RatePoint] = []
    for point in sorted(curve, key=lambda point: point.rate):
        least = min((before.attainment.value for before in kept), default=1.0)
        if point.is_settled or point.attainment.value <= least + 0.02:
            kept.append(point)
    return tuple(kept)
