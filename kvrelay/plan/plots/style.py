"""What the figures share: colours, sizes, marks, and how a figure becomes a PNG, or an SVG in the page's colours.

A placement is known everywhere by its rank in `Plan.tried`, from 1: a number beside a line is the row of that number in
the report's table. Colours mean roles: prefill, decode, colocated; placements with two pools are ink.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from placement.plan import Goodput, Plan

Width = Literal["wide", "narrow"]
INCHES: Mapping[Width, float] = {"wide": 11.2, "narrow": 4.9}  # 72 units each: shown at about that many pixels
INK, MUTED, FAINT, GRID, PAGE = "#1b1f24", "#626b75", "#b4bac2", "#e4e7ea", "#fefefe"
PREFILL, PREFILL_WAIT, DECODE, DECODE_WAIT = "#c2541a", "#e9a57c", "#1f6fb3", "#93c0e6"
COLOCATED, LINK = "#2f8458", "#7a5aa6"
VARIABLES = {  # in SVG every colour is the page's variable, so that it is right in the dark too
    INK: "ink",
    MUTED: "muted",
    FAINT: "faint",
    GRID: "grid",
    PAGE: "page",
    PREFILL: "prefill",
    PREFILL_WAIT: "prefill-wait",
    DECODE: "decode",
    DECODE_WAIT: "decode-wait",
    COLOCATED: "colocated",
    LINK: "link",
}
STYLE: dict[str, Any] = {
    "font.size": 11,
    "font.family": "DejaVu Sans",
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": MUTED,
    "axes.facecolor": PAGE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "grid.color": GRID,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "figure.facecolor": PAGE,
    "savefig.facecolor": PAGE,
    "svg.fonttype": "none",
}


def png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(buffer, format="png", dpi=150, metadata={"Software": None})
    return buffer.getvalue()


def svg(figure: Figure, prefix: str) -> str:
    """For a page: colours are its variables, ids begin with `prefix`, text stays text in the page's own type."""
    buffer = io.BytesIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix}):
        FigureCanvasSVG(figure)
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue().decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    for size in ("width", "height"):
        text = re.sub(rf'(<svg[^>]*?) {size}="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{prefix}-", text)
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", text)
    for colour, name in VARIABLES.items():
        text = text.replace(colour, f"var(--{name})")
    return text


def ranked(plan: Plan) -> Iterator[tuple[int, Goodput]]:
    return iter(enumerate(plan.tried, start=1))


def is_the_chosen(placement: Goodput, plan: Plan) -> bool:
    return placement.candidate == plan.chosen.candidate


def label_after(axes: Axes, at: tuple[float, float], text: str, colour: str, *, gap: float = 4) -> None:
    style: Any = {"va": "center", "fontsize": 9.5, "color": colour, "in_layout": False}
    axes.annotate(text, at, (gap, 0), textcoords="offset points", **style)


def circled_rank(axes: Axes, rank: int, at: tuple[float, float], colour: str, *, offset: float = 0) -> None:
    """The rank in a circle, `offset` points to the right of a place."""
    box = {"boxstyle": "circle,pad=0.22", "facecolor": PAGE, "edgecolor": colour, "linewidth": 0.8}
    style: Any = {"ha": "center", "va": "center", "fontsize": 9 if rank < 10 else 8, "color": colour, "bbox": box}
    axes.annotate(
        str(rank), at, (offset, 0), textcoords="offset points", annotation_clip=False, in_layout=False, **style
    )


def colour_of(placement: Goodput) -> str:
    return COLOCATED if placement.candidate.is_colocated else INK


def label_above(axes: Axes, x: float, right: float, text: str) -> None:
    """What a vertical line stands for, on top of it, within the axes' width."""
    share = x / right
    side = "left" if share < 0.3 else "right" if share > 0.8 else "center"
    axes.text(x, 1.01, text, ha=side, va="bottom", fontsize=10, transform=axes.get_xaxis_transform())


def blank_figure(width: Width, ratio: float) -> Figure:
    layout = ConstrainedLayoutEngine(h_pad=0.06, w_pad=0.04, hspace=0.06, wspace=0.03)
    return Figure(figsize=(INCHES[width], INCHES[width] * ratio), dpi=72, layout=layout)


def one_axes(width: Width, ratio: float) -> tuple[Figure, Axes]:
    figure = blank_figure(width, ratio)
    axes = figure.add_subplot()
    axes.xaxis.set_major_locator(MaxNLocator(8 if width == "wide" else 5))
    return figure, axes
