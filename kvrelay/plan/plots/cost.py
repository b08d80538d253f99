"""Draws what each placement costs against what it serves."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvrelay.plan.plots.style import FAINT, Width, colour_of, is_the_chosen, one_axes, ranked
from placement.plan import Goodput, Plan


def cost_by_throughput(plan: Plan, width: Width) -> Figure | None:
    """What each candidate costs against what it serves, and the frontier: nothing serves as much for less."""
    shown = [
        (rank, placement)
        for rank, placement in ranked(plan)
        if placement.goodput.value > 0 and placement.usd_per_hour > 0
    ]
    if not shown:
        return None
    figure, axes = one_axes(width, 0.44 if width == "wide" else 0.9)
    frontier = cheapest([placement for _, placement in shown])
    right = max([plan.chosen.goodput.high, *(placement.goodput.value for _, placement in shown)]) * 1.08
    top = max(placement.usd_per_hour for _, placement in shown) * 1.4
    rates = [0.0, *(placement.goodput.value for placement in frontier)]
    axes.step(rates, [frontier[0].usd_per_hour, *(f.usd_per_hour for f in frontier)], where="pre", color=FAINT)
    labels: list[tuple[float, float]] = []
    for rank, placement in shown:
        _cost_dot(axes, rank, placement, plan, labels, (right, top), width)
    axes.set_xlim(0, right)
    axes.set_ylim(0, top)
    axes.set_xlabel("goodput, requests/s")
    axes.set_title("Cost, USD an hour")
    return figure


def _cost_dot(
    axes: Axes, rank: int, placement: Goodput, plan: Plan, taken: list[tuple[float, float]], size: tuple[float, float],
    width: Width,
) -> None:  # fmt: skip
    """A dot with its interval, and its rank above where no other's stands."""
    is_chosen, colour = is_the_chosen(placement, plan), colour_of(placement)
    x, y = placement.goodput.value, placement.usd_per_hour
    if is_chosen:  # of all they would hide each other where costs are the same
        axes.plot([placement.goodput.low, placement.goodput.high], [y, y], color=colour, linewidth=1, alpha=0.6)
    axes.plot([x], [y], marker="o", color=colour, markersize=9 if is_chosen else 5)
    near_x, near_y = size[0] * (0.025 if width == "wide" else 0.055), size[1] * 0.06
    for step in range(1, 6):
        at = (x, y + step * size[1] * (0.055 if width == "wide" else 0.05))
        if all(abs(at[0] - a) > near_x or abs(at[1] - b) > near_y * 0.8 for a, b in taken):
            taken.append(at)
            weight = "bold" if is_chosen else "normal"
            axes.text(*at, str(rank), ha="center", va="center", fontsize=10, color=colour, fontweight=weight)
            return


def cheapest(placements: Sequence[Goodput]) -> list[Goodput]:
    """Those for which no other serves at least as much for less, by goodput."""
    kept: list[Goodput] = []
    for candidate in sorted(placements, key=lambda f: (-f.goodput.value, f.usd_per_hour)):
        if not kept or candidate.usd_per_hour < kept[-1].usd_per_hour:
            kept.append(candidate)
    return kept[::-1]
