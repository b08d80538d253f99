"""Draws what moves the goodput: a bar for each thing that the plan was told, from one side otherwise to the other."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvrelay.plan.plots.style import DECODE, DECODE_WAIT, INCHES, INK, MUTED, Width, one_axes
from placement.plan import Plan, Swing

LESS, MORE = DECODE_WAIT, DECODE
ROOM = 0.22  # of the span, at each side, for the words


def what_moves_it(plan: Plan, width: Width) -> Figure | None:
    """The largest swing at the top; the line is the plan's goodput."""
    if not plan.swings:
        return None
    per_row = 0.42 if width == "wide" else 0.62
    figure, axes = one_axes(width, (1.0 + per_row * len(plan.swings)) / INCHES[width])
    middle = plan.chosen.goodput.value
    ends = [middle, *(at for swing in plan.swings for at in (swing.at_less, swing.at_more))]
    span = max(ends) - min(ends) or middle or 1.0
    axes.set_xlim(min(ends) - ROOM * span, max(ends) + ROOM * span)
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= axes.get_xlim()[1]])
    for y, swing in enumerate(plan.swings):
        _bar(axes, y, swing, middle, width)
    axes.axvline(middle, color=INK, linewidth=1.2)
    axes.set_yticks(range(len(plan.swings)), [swing.what for swing in plan.swings])
    axes.set_ylim(len(plan.swings) - 0.4, -0.8)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("goodput of the chosen placement, requests/s")
    axes.set_title("What moves the answer")
    return figure


def _bar(axes: Axes, y: int, swing: Swing, middle: float, width: Width) -> None:
    """Its words stand outside of both its parts, on either side of the line."""
    parts = sorted(((swing.at_less, LESS), (swing.at_more, MORE)), key=lambda part: -abs(part[0] - middle))
    for at, colour in parts:  # the longer one first, as both may be on one side
        axes.barh(y, at - middle, left=middle, height=0.45, color=colour, linewidth=0)
    low, high = sorted(((swing.at_less, swing.less), (swing.at_more, swing.more)))
    if width == "narrow":
        axes.text(middle, y - 0.36, f"{low[1]} | {high[1]}", ha="center", fontsize=8.5, color=MUTED)
        return
    ends = ((min(low[0], middle), low[1], "right", -5), (max(high[0], middle), high[1], "left", 5))
    for at, text, side, gap in ends:
        axes.annotate(
            text, (at, y), (gap, 0), textcoords="offset points", ha=side, va="center", fontsize=9, color=MUTED
        )
