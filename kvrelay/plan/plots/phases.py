"""Draws where a request's time goes, phase by phase, against the rate."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvrelay.plan.plots.style import (
    DECODE,
    DECODE_WAIT,
    FAINT,
    INK,
    LINK,
    PAGE,
    PREFILL,
    PREFILL_WAIT,
    Width,
    blank_figure,
)
from placement.plan import Plan, RatePoint

PHASES = {  # of cluster.router.live.timeline: colour, name
    "route": (FAINT, "router"),
    "prefill_queue": (PREFILL_WAIT, "waiting for prefill"),
    "prefill": (PREFILL, "prefill"),
    "handoff": (LINK, "handoff of KV"),
    "decode_queue": (DECODE_WAIT, "waiting for decode"),
    "decode": (DECODE, "decode"),
}
BEFORE_FIRST_TOKEN = ("route", "prefill_queue", "prefill")


def time_by_rate(plan: Plan, width: Width) -> Figure | None:
    """Mean seconds of a request in each phase, by rate: until the first token, and after it."""
    curve = [point for point in plan.chosen.curve if point.phases_s]
    if len(curve) < 2:
        return None
    figure = blank_figure(width, 0.42 if width == "wide" else 1.7)
    halves = (
        ("Until the first token, ms", [name for name in PHASES if name in BEFORE_FIRST_TOKEN]),
        ("After it, ms", [name for name in PHASES if name not in BEFORE_FIRST_TOKEN]),
    )
    for i, (title, names) in enumerate(halves):
        axes = figure.add_subplot(*((1, 2) if width == "wide" else (2, 1)), i + 1)
        _stack(axes, curve, [name for name in names if any(point.phases_s.get(name) for point in curve)], plan)
        axes.set_title(title)
        axes.set_xlabel("requests/s")
    return figure


def _stack(axes: Axes, curve: Sequence[RatePoint], names: Sequence[str], plan: Plan) -> None:
    """Areas, each named in the legend from top to bottom as they lie."""
    shown = [p for p in curve if p.rate <= max(plan.at_rate.rate, plan.chosen.goodput.value) * 1.02] or list(curve)
    rates = [point.rate for point in shown]
    below = [0.0] * len(shown)
    for name in names:
        colour, label = PHASES[name]
        above = [b + 1e3 * point.phases_s.get(name, 0.0) for b, point in zip(below, shown, strict=True)]
        axes.fill_between(rates, below, above, color=colour, linewidth=0.4, edgecolor=PAGE, label=label)
        below = above
    axes.set_xlim(rates[0], rates[-1])
    axes.set_ylim(0, max(below) * 1.32 or 1)
    axes.axvline(plan.at_rate.rate, color=INK, linewidth=1, linestyle=(0, (1, 2)))
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper left", frameon=False, fontsize=10, handlelength=1, ncols=1)
