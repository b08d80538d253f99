"""Draws goodput per GPU: of each placement, and of each phase alone."""

from __future__ import annotations

import re
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvrelay.plan.plots.style import (
    DECODE,
    INCHES,
    INK,
    MUTED,
    PREFILL,
    Width,
    blank_figure,
    circled_rank,
    colour_of,
    is_the_chosen,
    label_after,
    one_axes,
    ranked,
)
from placement.plan import Goodput, Plan

MAX_ROWS = 24


def goodput_per_gpu(plan: Plan, width: Width) -> Figure | None:
    """Each candidate's goodput per GPU with its interval, the best at the top."""
    rows = sorted(ranked(plan), key=lambda row: -row[1].per_gpu)[:MAX_ROWS]
    if not rows:
        return None
    per_row = 0.3 if width == "wide" else 0.5
    figure, axes = one_axes(width, (0.9 + per_row * len(rows)) / INCHES[width])
    for y, (rank, placement) in enumerate(rows):
        _goodput_row(axes, y, rank, placement, is_chosen=is_the_chosen(placement, plan), width=width)
    axes.set_ylim(len(rows) - 0.4, -0.7 if width == "wide" else -0.95)
    axes.set_xlim(0, max(placement.goodput.high / placement.candidate.gpus for _, placement in rows) * 1.12 or 1)
    axes.set_yticks([])
    if width == "wide":
        axes.set_yticks(range(len(rows)), [placement.candidate.label for _, placement in rows])
        axes.tick_params(axis="y", pad=30)
        for tick, (_, placement) in zip(axes.get_yticklabels(), rows, strict=True):
            tick.set_color(colour_of(placement))
            tick.set_fontweight("bold" if is_the_chosen(placement, plan) else "normal")
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    unit = plan.chosen.candidate.unit
    axes.set_xlabel(f"requests/s per {unit}")
    axes.set_title(f"Goodput per {unit}")
    return figure


def _goodput_row(axes: Axes, y: int, rank: int, placement: Goodput, *, is_chosen: bool, width: Width) -> None:
    colour, gpus = colour_of(placement), placement.candidate.gpus
    low, high = placement.goodput.low / gpus, placement.goodput.high / gpus
    axes.plot([0, placement.per_gpu], [y, y], color=colour, alpha=0.25, linewidth=5 if is_chosen else 3)
    axes.plot([low, high], [y, y], color=colour, linewidth=1.4)
    axes.plot([placement.per_gpu], [y], marker="o", color=colour, markersize=7 if is_chosen else 5)
    weight = "bold" if is_chosen else "normal"
    at, from_left = ((0, y), -16) if width == "wide" else ((0, y - 0.42), 9)
    circled_rank(axes, rank, at, colour, offset=from_left)
    if width == "narrow":
        style: Any = {
            "color": colour,
            "fontsize": 9.5,
            "va": "center_baseline",
            "fontweight": weight,
            "in_layout": False,
        }
        axes.annotate(placement.candidate.label, at, (22, 0), textcoords="offset points", **style)
    if not placement.goodput.value:
        label_after(axes, (0, y), "no rate meets the targets", MUTED, gap=9)


def phase_goodput(plan: Plan, width: Width) -> Figure | None:
    """Each phase alone: its goodput per GPU at every degree, which is what two pools can do that one cannot."""
    roles = [role for role in ("prefill", "decode") if plan.phase_goodput.get(role)]
    tables = [(role, sorted(plan.phase_goodput[role], key=_degree_order)) for role in roles]
    if not tables:
        return None
    count = max(len(table) for _, table in tables)
    figure = blank_figure(width, (1.0 + 0.32 * count) / INCHES[width] * (1 if width == "wide" else len(tables) * 0.92))
    shape = (1, len(tables)) if width == "wide" else (len(tables), 1)
    for i, (role, table) in enumerate(tables):
        axes = figure.add_subplot(*shape, i + 1)
        colour = PREFILL if role == "prefill" else DECODE
        values = [value for _, value in table]
        best = values.index(max(values))
        for y, value in enumerate(values):
            axes.barh(y, value, height=0.55, color=colour, alpha=1.0 if y == best else 0.45, linewidth=0)
            label_after(axes, (value, y), f"{value:.3g}", INK)
        axes.set_yticks(range(len(table)), [label for label, _ in table])
        axes.set_ylim(len(table) - 0.4, -0.6)
        axes.set_xlim(0, max(values) * 1.15 or 1)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel(f"requests/s per {plan.chosen.candidate.unit}")
        axes.set_title(f"A {role} worker alone", color=colour)
    return figure


def _degree_order(row: tuple[str, float]) -> list[int]:
    """TP 2 before TP 10."""
    return [int(number) for number in re.findall(r"\d+", row[0])]
