"""Every figure that a plan has points for, drawn once for each width. It computes no figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from kvrelay.plan.plots.attainment import attainment_by_rate
from kvrelay.plan.plots.cost import cost_by_throughput
from kvrelay.plan.plots.goodput import goodput_per_gpu, phase_goodput
from kvrelay.plan.plots.phases import time_by_rate
from kvrelay.plan.plots.style import STYLE, Width
from kvrelay.plan.plots.tornado import what_moves_it
from placement.plan import Plan

DRAWN: Mapping[str, Callable[[Plan, Width], Figure | None]] = {
    "attainment": attainment_by_rate,
    "goodput": goodput_per_gpu,
    "phases": phase_goodput,
    "cost": cost_by_throughput,
    "time": time_by_rate,
    "tornado": what_moves_it,
}


def figures(plan: Plan, width: Width = "wide") -> dict[str, Figure]:
    """Every figure that the plan has points for, by name."""
    with mpl.rc_context(STYLE):  # type: ignore[arg-type]
        made = {name: draw(plan, width) for name, draw in DRAWN.items()}
        for figure in made.values():
            if figure is not None:
                FigureCanvasAgg(figure)
                figure.draw_without_rendering()  # lays it out while the style holds
    return {name: figure for name, figure in made.items() if figure is not None}
