"""Draws a result: how TTFT and TPOT are distributed, and attainment against the rate with the knee. It computes none of
them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from kvrelay.bench.metrics import METRICS
from kvrelay.bench.series.comparing import pooled
from kvrelay.plan.plots.style import COLOCATED, DECODE, INK, LINK, MUTED, PREFILL, STYLE, Width, blank_figure, one_axes

COLOURS = (DECODE, PREFILL, COLOCATED, LINK, INK, MUTED)
DASHES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1, 1, 1)))
SHOWN = ("ttft", "tpot")
Result = Mapping[str, Any]


def figures(result: Result, width: Width) -> dict[str, Figure]:
    """By name, those that there are points for."""
    drawn: dict[str, Figure] = {}
    with mpl.rc_context(STYLE):  # type: ignore[arg-type]
        if len(rates_of(result)) > 1 and result["slos_ms"]:
            drawn["attainment"] = _attainment(result, width)
        if any(turn["completed"] for turn in result["turns"]):
            drawn["latency"] = _distributions(result, width)
        for figure in drawn.values():
            FigureCanvasAgg(figure)
            figure.draw_without_rendering()
    return drawn


def rates_of(result: Result) -> list[Any]:
    """In order; inf, where all were sent at once, last."""
    return sorted({turn["rate"] for turn in result["turns"]}, key=float)


def curve_of(result: Result, side: str) -> list[tuple[float, float]]:
    """(rate, attainment of all rounds)."""
    points = []
    for rate in rates_of(result):
        turns = [t for t in result["turns"] if (t["side"], t["rate"]) == (side, rate) and "attainment" in t]
        if turns:
            within = sum(t["attainment"] * t["requests"] for t in turns)
            points.append((float(rate), within / sum(t["requests"] for t in turns)))
    return points


def _attainment(result: Result, width: Width) -> Figure:
    figure, axes = one_axes(width, 0.46 if width == "wide" else 0.98)
    wanted = result.get("wanted_attainment", 0.9)
    for index, side in enumerate(result["sides"]):
        points = curve_of(result, side["name"])
        axes.plot(
            *zip(*points, strict=True),
            color=COLOURS[index % len(COLOURS)],
            marker="o",
            markersize=4,
            label=side["name"],
        )
        found = result.get("knees", {}).get(side["name"])
        if found and found["where"] == "within":
            axes.axvspan(found["low"], found["high"], color=COLOURS[index % len(COLOURS)], alpha=0.14, linewidth=0)
            axes.plot([found["rate"]], [wanted], color=COLOURS[index % len(COLOURS)], marker="D", markersize=7)
    axes.axhline(wanted, color=MUTED, linewidth=1, linestyle=(0, (5, 3)))
    axes.set_ylim(0, 1.03)
    axes.set_xlim(left=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_xlabel("requests/s")
    axes.set_title("Requests that meet the targets")
    axes.legend(frameon=False, loc="lower left")
    return figure


def _distributions(result: Result, width: Width) -> Figure:
    """A line for each side and rate: which share of requests had at most so much."""
    figure = blank_figure(width, 0.44 if width == "wide" else 1.8)
    for place, metric in enumerate(SHOWN):
        axes = figure.add_subplot(*((1, 2) if width == "wide" else (2, 1)), place + 1)
        for label, values, colour, dashes in _lines(result, metric):
            shares = [(rank + 1) / len(values) for rank in range(len(values))]
            axes.step([values[0], *values], [0.0, *shares], where="post", color=colour, linestyle=dashes, label=label)
        _target(axes, result["slos_ms"].get(metric))
        axes.set_ylim(0, 1.01)
        axes.set_xlim(left=0)
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.set_xlabel("ms")
        axes.set_title(METRICS[metric])
        if place == 0:
            axes.legend(frameon=False, fontsize=9, loc="lower right")
    return figure


def _target(axes: Axes, limit_ms: float | None) -> None:
    if limit_ms is not None:
        axes.axvline(limit_ms, color=MUTED, linewidth=1, linestyle=(0, (5, 3)))


def _lines(result: Result, metric: str) -> Iterator[tuple[str, Sequence[float], str, Any]]:
    """At most four rates: the lowest, the highest, and what lies between them evenly."""
    rates = rates_of(result)
    shown = [rates[round(i * (len(rates) - 1) / 3)] for i in range(4)] if len(rates) > 4 else rates
    for index, side in enumerate(result["sides"]):
        for nth, rate in enumerate(shown):
            turns = [t for t in result["turns"] if (t["side"], t["rate"]) == (side["name"], rate)]
            if values := pooled(turns, metric):
                label = side["name"] if len(rates) == 1 else f"{side['name']}, {float(rate):g}/s"
                yield label, values, COLOURS[index % len(COLOURS)], DASHES[nth]
