"""What a search for mixes settled on, as a Plan: intervals from several draws, curves, what binds, and sources.

An interval comes from the draws (Student's t over their results), widened by the latency model's error where it states
one. Nothing is simulated here but points of curves that are still missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from placement.goodput.stationary import wilson
from placement.latency.scaled import factors_of
from placement.mixes.designs import Resource
from placement.mixes.report.advice import ByOtherRules, advice
from placement.mixes.report.rated import RatedMix, first_miss, interval, points_of
from placement.mixes.scenario import PERCENTILES, LoadPoint, PointResult, Scenario
from placement.mixes.simulations import Simulations
from placement.plan import Goodput, Interval, Plan, RatePoint
from placement.search.question import PlanQuestion

CURVE_AT = (0.5, 0.75, 0.9, 1.1)  # of the highest rate


def plan_of(
    question: PlanQuestion,
    asked: Mapping[str, Any],
    simulations: Simulations,
    rated: Sequence[RatedMix],
    *,
    resource: Resource,
    refused: Mapping[str, str],
    other: ByOtherRules | None,
) -> Plan:
    """`rated`: the best first. `cpu_s` and `num_simulated` are the simulations'."""
    best = rated[0]
    rate = question.rate or best.mean_rate
    at_rate = [LoadPoint(best.mix, rate, question.seed + i) for i in range(len(best.rates))]
    curves = [LoadPoint(mix.mix, share * mix.rate, question.seed) for mix in rated for share in CURVE_AT]
    factors = factors_of(best.error) if best.error else ()
    wrong = [LoadPoint(best.mix, rate, question.seed, factor) for factor in factors]
    simulations.simulate([*at_rate, *wrong, *curves])
    goodputs = tuple(_goodput(mix, simulations) for mix in rated)
    highest = best.highest_rate.value
    headroom = max(0.0, 1 - rate / highest) if highest else 0.0
    miss = first_miss(best, simulations)
    rules = simulations.scenario.rules
    return Plan(
        asked=asked,
        slo=question.slo,
        objective=question.objective,
        chosen=goodputs[0],
        at_rate=_widened(
            _rate_point(best, rate, [simulations.results[point] for point in at_rate]),
            [simulations.results[point] for point in wrong],
        ),
        binding=miss.binding if miss else "none",
        headroom=headroom,
        tried=goodputs,
        refused=dict(refused),
        advice=advice(
            rated, rate=question.rate, resource=resource, rules=rules, other=other, miss=miss, headroom=headroom
        ),
        sources=_sources(best, simulations.scenario),
        cpu_s=simulations.cpu_s,
        num_simulated=simulations.num_simulated,
    )


def _goodput(rated: RatedMix, simulations: Simulations) -> Goodput:
    by_rate = groupby(points_of(rated, simulations), key=lambda point: point.rate)
    curve = [_rate_point(rated, rate, [simulations.results[point] for point in points]) for rate, points in by_rate]
    miss = first_miss(rated, simulations)
    return Goodput(
        candidate=rated.mix.candidate(simulations.scenario.rules.baseline),
        goodput=rated.highest_rate,
        curve=tuple(curve),
        usd_per_hour=rated.mix.total("usd_per_hour"),
        watts=rated.mix.total("power"),
        limit=str(miss) if miss else "",
    )


def _rate_point(rated: RatedMix, rate: float, results: Sequence[PointResult]) -> RatePoint:
    count = sum(result.num_requests for result in results)
    attainment = interval([result.judgement.attainment for result in results], 0.0)
    low, high = wilson(attainment.value, count)
    return RatePoint(
        rate=rate,
        attainment=Interval(attainment.value, max(0.0, min(low, attainment.low)), min(1.0, max(high, attainment.high))),
        ttft_s={str(at): _times([r.ttft_s[str(at)] for r in results], rated.error) for at in PERCENTILES},
        tpot_s={str(at): _times([r.tpot_s[str(at)] for r in results], rated.error) for at in PERCENTILES},
        phases_s=_means([result.phases_s for result in results]),
        busy=_means([result.busy for result in results]),
        num_requests=count,
        is_settled=len(results) > 1,
    )


def _widened(point: RatePoint, wrong: Sequence[PointResult]) -> RatePoint:
    """By what comes where all times are as wrong as the latency model may be: near the knee far more than they are."""
    attained, ttft_s, tpot_s = point.attainment, dict(point.ttft_s), dict(point.tpot_s)
    for result in wrong:
        attained = attained.covering(result.judgement.attainment)
        ttft_s = {at: known.covering(result.ttft_s[at]) for at, known in ttft_s.items()}
        tpot_s = {at: known.covering(result.tpot_s[at]) for at, known in tpot_s.items()}
    return replace(point, attainment=attained, ttft_s=ttft_s, tpot_s=tpot_s)


def _times(values: Sequence[float], error: float) -> Interval:
    if max(values) == float("inf"):
        return Interval(max(values), min(values), max(values))
    drawn, (longer, shorter) = interval(values, 0.0), factors_of(error)
    return Interval(drawn.value, drawn.low * shorter, drawn.high * longer)


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: sum(row[key] for row in rows) / len(rows) for key in rows[0]}


def _sources(best: RatedMix, scenario: Scenario) -> dict[str, str]:
    machines = best.mix.design.machines
    rules, load = scenario.rules, scenario.load
    return {
        "latency": "; ".join(dict.fromkeys(machine.latency.source for machine in machines)),
        "hardware": ", ".join(dict.fromkeys(machine.name for machine in machines)),
        "workload": f"{load.source.name}: {load.how}",
        "rules": f"{rules.simulator}, with its mixed pool" if rules.is_lending else rules.simulator,
        "power": machines[0].power_unit,
    }
