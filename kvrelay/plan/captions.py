"""The report's figures, with what they say for those who do not see them and what stands below them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from matplotlib.figure import Figure

from kvrelay.plan import amounts
from kvrelay.plan.plots import goodput, phases
from kvrelay.plan.plots.cost import cheapest
from kvrelay.plan.plots.style import ranked, svg
from placement.plan import Plan

Drawn = Mapping[str, Figure]


def captioned_figures(plan: Plan, wide: Drawn, narrow: Drawn) -> Iterator[dict[str, Any]]:
    for name, figure in wide.items():
        yield {
            "name": name,
            "wide": svg(figure, f"{name}-wide"),
            "narrow": svg(narrow[name], f"{name}-narrow"),
            "alt": ALTS[name](plan),
            "caption": CAPTIONS[name](plan),
        }


def _best_lines(plan: Plan) -> str:
    parts = [
        f"number {rank}, {placement.candidate.label}, up to {amounts.num(placement.goodput.value)}"
        for rank, placement in ranked(plan)
    ]
    return "; ".join(parts[:5])


def _attainment_alt(plan: Plan) -> str:
    target = amounts.percent(plan.slo.attainment)
    of = "Share of requests that meet both targets, against requests per second"
    return f"{of}. {target} is kept by {_best_lines(plan)}."


def _attainment_caption(plan: Plan) -> str:
    return (
        f"Each line is a placement; where it crosses {amounts.percent(plan.slo.attainment)} is its goodput. The dotted "
        "line is the rate that this plan is for. The band is the interval."
    )


def _goodput_alt(plan: Plan) -> str:
    rows = sorted(ranked(plan), key=lambda row: -row[1].per_gpu)[:5]
    shown = "; ".join(
        f"number {rank}, {placement.candidate.label}: {amounts.num(placement.per_gpu)}" for rank, placement in rows
    )
    return f"Goodput per {plan.chosen.candidate.unit} of every placement, requests per second, best first: {shown}."


def _goodput_caption(plan: Plan) -> str:
    more = len(plan.tried) - goodput.MAX_ROWS
    rest = f" {more} more are in the table." if more > 0 else ""
    return f"What each {plan.chosen.candidate.unit} serves within the targets. Whiskers are intervals.{rest}"


def _phases_alt(plan: Plan) -> str:
    parts = [
        f"{role}: " + ", ".join(f"{label} {amounts.num(value)}" for label, value in table)
        for role, table in plan.phase_goodput.items()
    ]
    unit = plan.chosen.candidate.unit
    return f"Goodput per {unit} of each phase alone, requests per second. " + "; ".join(parts) + "."


def _phases_caption(plan: Plan) -> str:
    return (
        "Each phase alone against its own target, as DistServe's first algorithm weighs them. Where the best degrees "
        "differ, two pools can each have their own."
    )


def _cost_alt(plan: Plan) -> str:
    kept = cheapest([placement for placement in plan.tried if placement.goodput.value])
    parts = [
        f"{amounts.usd(f.usd_per_hour)} an hour for {amounts.num(f.goodput.value)} requests per second" for f in kept
    ]
    return f"Cost against goodput. Nothing serves as much for less than: {'; '.join(parts[:6])}."


def _cost_caption(plan: Plan) -> str:
    return "Below and to the right is better. The grey line joins the placements that none beats in both."


def _time_alt(plan: Plan) -> str:
    parts = [
        f"{phases.PHASES[name][1]} {amounts.seconds(value)}"
        for name, value in plan.at_rate.phases_s.items()
        if name in phases.PHASES
    ]
    rate = amounts.num(plan.at_rate.rate)
    return f"Mean time of a request in each phase, by rate. At {rate} requests per second: {', '.join(parts)}."


def _time_caption(plan: Plan) -> str:
    return (
        "Mean time of a request in each phase of the chosen placement. What grows towards the dotted line is where "
        "requests queue. The handoff counts only what prefill does not hide."
    )


def _tornado_alt(plan: Plan) -> str:
    parts = [
        f"{swing.what}, {swing.less} {amounts.num(swing.at_less)}, {swing.more} {amounts.num(swing.at_more)}"
        for swing in plan.swings
    ]
    return f"Goodput of the chosen placement, requests per second, with one thing otherwise: {'; '.join(parts)}."


def _tornado_caption(plan: Plan) -> str:
    return (
        "One thing otherwise at a time, the same requests: light is less of it, dark is more. The line is the plan's "
        "goodput. Times differ by as much as the latency model may be wrong."
    )


ALTS = {
    "attainment": _attainment_alt,
    "goodput": _goodput_alt,
    "phases": _phases_alt,
    "cost": _cost_alt,
    "time": _time_alt,
    "tornado": _tornado_alt,
}
CAPTIONS = {
    "attainment": _attainment_caption,
    "goodput": _goodput_caption,
    "phases": _phases_caption,
    "cost": _cost_caption,
    "time": _time_caption,
    "tornado": _tornado_caption,
}
