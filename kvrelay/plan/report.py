"""Writes a plan as one HTML page that stands alone: no script, no request, right in light and dark, on desk and phone.

It lays out what kvrelay.plan.words says and kvrelay.plan.plots draws; the template is report.html beside it. It
computes no figure of its own but sums and quotients of the plan's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvrelay.plan import amounts, words
from kvrelay.plan.captions import Drawn, captioned_figures
from kvrelay.plan.frame import framed
from kvrelay.plan.plots.style import ranked
from placement.plan import Goodput, Interval, Plan, RatePoint

MAX_DRAWN_WORKERS, MAX_DRAWN_GPUS = 24, 16
SECTIONS = (
    ("answer", "The answer"),
    ("binds", "What binds"),
    ("latency", "What a request sees"),
    ("plots", "Plots"),
    ("table", "Every placement"),
    ("sure", "How sure this is"),
    ("again", "Run it, check it"),
    ("spec", "The cluster's spec"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What the page says that is not in the plan. `commands`: (sentence, what to type). `spec`: the cluster's spec as
    text, or "" and then `no_spec` says why there is none. `classes`: rows of (name, share, TTFT, TPOT)."""

    title: str
    asked: str
    commands: Sequence[tuple[str, str]]
    spec: str
    no_spec: str = ""


def report(plan: Plan, context: Context, wide: Drawn, narrow: Drawn) -> str:
    """The page. `wide`, `narrow`: the same figures for a desk and for a phone, by name."""
    rate = amounts.num(plan.at_rate.rate)
    return framed("kvrelay.plan", "report.html").render(
        title=context.title,
        asked=context.asked,
        sections=SECTIONS,
        answer=" ".join(words.answer(plan)),
        pools=[_pool(pool) for pool in plan.chosen.candidate.pools],
        facts=list(_facts(plan)),
        warnings=list(words.warnings(plan)),
        binding=words.binding(plan),
        busy=[
            (key, text, round(100 * min(1.0, share), 1), amounts.percent(share))
            for key, text, share in words.busy_rows(plan.at_rate.busy)
        ],
        advice=plan.advice,
        at_rate=rate,
        percentiles=words.percentile_rows(plan),
        attained=f"Requests that meet their targets at this rate: {words.attained(plan)}.",
        classes=list(_classes(plan)),
        figures=list(captioned_figures(plan, wide, narrow)),
        tried=[_tried_row(rank, placement, plan) for rank, placement in ranked(plan)],
        unit=plan.chosen.candidate.unit,
        has_limits=any(placement.limit for placement in plan.tried),
        curve=[_curve_row(point) for point in plan.chosen.curve],
        honesty=list(_honesty(plan)),
        sources=[(key.replace("_", " "), text) for key, text in plan.sources.items()],
        nearest=[
            (near.phase, near.case, amounts.seconds(near.measured_s), f"{near.error:+.0%}") for near in plan.nearest
        ],
        refused=list(plan.refused.items()),
        commands=context.commands,
        spec=context.spec,
        no_spec=context.no_spec,
    )


def _pool(pool: Any) -> dict[str, Any]:
    """One square for each GPU or core, one frame for each worker."""
    drawn = min(pool.replicas, MAX_DRAWN_WORKERS)
    return {
        "role": pool.role,
        "words": words.pool_words(pool),
        "drawn": drawn,
        "gpus_each": min(pool.degrees.gpus, MAX_DRAWN_GPUS),
        "more": pool.replicas - drawn,
    }


def _facts(plan: Plan) -> Iterator[tuple[str, str, str, str]]:
    """(name, value, unit, what it is of)."""
    chosen, rate = plan.chosen, plan.at_rate.rate
    goodput = chosen.goodput
    yield (
        "Goodput",
        amounts.num(goodput.value),
        "requests/s",
        f"between {amounts.num(goodput.low)} and {amounts.num(goodput.high)}",
    )
    unit = chosen.candidate.unit
    yield f"Per {unit}", amounts.num(chosen.per_gpu), "requests/s", f"on {amounts.count(chosen.candidate.gpus, unit)}"
    if chosen.usd_per_hour:
        each = f"{amounts.usd_per_million(chosen.usd_per_hour, rate)} for a million requests" if rate else ""
        yield "Cost", amounts.usd(chosen.usd_per_hour), "an hour", each
    if chosen.watts:
        each = f"{amounts.num(chosen.watts / rate)} joules a request" if rate else ""
        yield "Power", amounts.num(chosen.watts / 1e3), "kW", each
    yield "Planned rate", amounts.num(rate), "requests/s", f"{amounts.percent(plan.headroom)} of the goodput left"
    met = plan.at_rate.attainment
    ends = f"between {amounts.percent(met.low)} and {amounts.percent(met.high)}"
    ends = ends if amounts.is_known(met) else "interval not known"
    yield "Meet both targets", amounts.percent(met.value), "", f"{ends}, {amounts.percent(plan.slo.attainment)} asked"


def _classes(plan: Plan) -> Iterator[tuple[str, str, str, str, str]]:
    """What the plan asked of each class, and what it found."""
    asked = {str(c["name"]): c for c in plan.asked.get("classes") or () if isinstance(c, Mapping)}
    for name, met in plan.at_rate.by_class.items():
        keys = asked.get(name, {})
        slo = keys.get("slo", keys)
        ttft_s, tpot_s = (slo.get(key) or math.inf for key in ("ttft_s", "tpot_s"))
        share = amounts.percent(float(keys["share"])) if "share" in keys else "-"
        yield name, share, amounts.seconds(ttft_s), amounts.seconds(tpot_s), amounts.percent(met)


def _tried_row(rank: int, placement: Goodput, plan: Plan) -> dict[str, Any]:
    rate, cost = placement.goodput.value, placement.usd_per_hour
    return {
        "rank": rank,
        "label": placement.candidate.label,
        "is_chosen": placement.candidate == plan.chosen.candidate,
        "is_colocated": placement.candidate.is_colocated,
        "gpus": placement.candidate.gpus,
        "goodput": words.goodput_of(placement) if rate else "0",
        "per_gpu": amounts.num(placement.per_gpu),
        "usd": amounts.if_known(cost, f"{cost:,.2f}"),
        "usd_each": amounts.if_known(cost, amounts.usd_per_million(cost, rate).lstrip("$")),
        "kw": amounts.if_known(placement.watts, amounts.num(placement.watts / 1e3)),
        "limit": placement.limit,
    }


def _curve_row(point: RatePoint) -> tuple[str, ...]:
    def p90(by_percentile: Mapping[str, Interval]) -> str:
        return amounts.seconds(by_percentile["90"].value) if "90" in by_percentile else "-"

    return (
        amounts.num(point.rate),
        amounts.percent_between(point.attainment),
        p90(point.ttft_s),
        p90(point.tpot_s),
        f"{point.num_requests:,}",
        "" if point.is_settled else "stopped at the limit",
    )


def _honesty(plan: Plan) -> Iterator[str]:
    goodput = plan.chosen.goodput
    yield (
        f"{words.tries(plan)}. The goodput of the chosen placement lies between {amounts.num(goodput.low)} and "
        f"{amounts.num(goodput.high)} requests/s, nine times in ten: this joins what differs from one set of requests "
        "to another with what the latency model was wrong by where it was checked."
    )
    closest = [
        placement.candidate.label
        for placement in plan.tried
        if placement.candidate != plan.chosen.candidate
        and placement.goodput.value
        and words.is_close(placement.per_gpu, plan.chosen.per_gpu)
    ]
    if closest:
        yield (
            f"The search does not tell the chosen placement from {amounts.count(len(closest), 'other')}: "
            f"{'; '.join(closest[:4])}{' and more' if len(closest) > 4 else ''}. "
            "Choose among them by what else matters."
        )
    yield (
        "All placements are compared on the same requests and latency model, so their order is surer than their "
        "figures: an error of the model moves all of them alike."
    )
    yield (
        "The simulator runs the policies of the live router and workers. It leaves out clients that hang, the time "
        "of tokenising, network trouble and other work on the same machines. After the cluster runs, kvrelay verify "
        "compares this plan with it and keeps the difference as the margin of the next plan."
    )
