"""Draws attainment against the rate, a line for each placement."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from kvrelay.plan.plots.style import (
    COLOCATED,
    FAINT,
    INK,
    MUTED,
    Width,
    circled_rank,
    is_the_chosen,
    label_above,
    one_axes,
    ranked,
)
from placement.plan import Goodput, Interval, Plan, RatePoint

NOISE = 0.02  # of attainment, between one rate and the next


def attainment_by_rate(plan: Plan, width: Width) -> Figure | None:
    """Share of requests that meet both targets against the rate; the SLO line, and the rate that was chosen."""
    lines = [(rank, placement) for rank, placement in ranked(plan) if len(placement.curve) > 1]
    if not lines:
        return None
    figure, axes = one_axes(width, 0.46 if width == "wide" else 0.98)
    floor = max(0.0, plan.slo.attainment - 0.4)
    rate = plan.at_rate.rate
    right = max([rate, *(placement.goodput.value for _, placement in lines)]) * 1.3
    marked = _marked(plan, [rank for rank, _ in lines])
    for rank, placement in reversed(lines):
        _attainment_line(axes, rank, placement, is_chosen=is_the_chosen(placement, plan), is_marked=rank in marked)
    axes.axhline(plan.slo.attainment, color=MUTED, linewidth=1, linestyle=(0, (5, 3)))
    axes.axvline(rate, color=INK, linewidth=1, linestyle=(0, (1, 2)))
    axes.set_xlim(0, right)
    axes.set_ylim(floor, 1.015)
    target = f"target {100 * plan.slo.attainment:.4g}%"
    axes.text(right * 0.006, plan.slo.attainment - 0.006, target, va="top", color=MUTED)
    label_above(axes, rate, right, f"{rate:.3g} requests/s")
    levels = [plan.slo.attainment - 0.07 - 0.05 * (i % 5) for i in range(len(marked))]
    for rank, level in zip(marked, levels, strict=True):
        _number_on_curve(axes, rank, plan.tried[rank - 1], level, right)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_xlabel("requests/s")
    axes.set_title("Requests that meet both targets", pad=20)
    return figure


def _attainment_line(axes: Axes, rank: int, placement: Goodput, *, is_chosen: bool, is_marked: bool) -> None:
    colour = COLOCATED if placement.candidate.is_colocated else INK
    points = falling(placement.curve)
    rates, shares = [rate for rate, _ in points], [share.value for _, share in points]
    if not is_marked:
        pale = COLOCATED if placement.candidate.is_colocated else FAINT
        axes.plot(rates, shares, color=pale, linewidth=0.9, alpha=0.55)
        return
    low, high = ([getattr(share, end) for _, share in points] for end in ("low", "high"))
    axes.fill_between(rates, low, high, color=colour, alpha=0.14, linewidth=0)
    axes.plot(rates, shares, color=colour, linewidth=2.4 if is_chosen else 1.3, marker="o", markersize=3)


def _number_on_curve(axes: Axes, rank: int, placement: Goodput, level: float, right: float) -> None:
    """The rank, where the curve passes `level`; nothing where it does not."""
    rate = crossing(falling(placement.curve), level)
    if rate is None or rate > right:
        return
    colour = COLOCATED if placement.candidate.is_colocated else INK
    circled_rank(axes, rank, (rate, level), colour)


def falling(curve: Sequence[RatePoint]) -> list[tuple[float, Interval]]:
    """(rate, attainment) without what rises again: past the knee a run of limited length flatters, since its queue had
    no time to grow, and what a rate misses a higher one misses too."""
    points: list[tuple[float, Interval]] = []
    least = Interval(1.0, 1.0, 1.0)
    for point in sorted(curve, key=lambda point: point.rate):
        seen = point.attainment
        if seen.value <= least.value + NOISE:
            least = Interval(*(min(getattr(least, end), getattr(seen, end)) for end in ("value", "low", "high")))
            points.append((point.rate, least))
    return points


def crossing(points: Sequence[tuple[float, Interval]], level: float) -> float | None:
    """The rate at which attainment first falls to `level`, between the points around it."""
    for (before, high), (after, low) in itertools.pairwise(points):
        if high.value >= level > low.value:
            return before + (after - before) * (high.value - level) / (high.value - low.value)
    return None


def _marked(plan: Plan, ranks: Sequence[int]) -> list[int]:
    """Those that carry a number: the best few, the chosen one, and the best of either kind."""
    marked = set(ranks[:4])
    for is_colocated in (True, False):
        marked.update([r for r in ranks if plan.tried[r - 1].candidate.is_colocated is is_colocated][:1])
    marked.update(r for r in ranks if is_the_chosen(plan.tried[r - 1], plan))
    return sorted(marked)
