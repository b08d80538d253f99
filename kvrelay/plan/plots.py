"""Draws a plan: figures for the report, as PNG files and as SVG that follows the page's colours. It computes no figure.

A candidate is known everywhere by its rank in `Plan.tried`, from 1: a number beside a line here is the row of that
number in the report's table. Colours mean roles: prefill, decode, colocated; candidates with two pools are ink.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter

from kvrelay.plan import words
from placement.plan import Goodput, Interval, Plan, RatePoint

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
PHASES = {  # of cluster.router.timeline: colour, name
    "route": (FAINT, "router"),
    "prefill_queue": (PREFILL_WAIT, "waiting for prefill"),
    "prefill": (PREFILL, "prefill"),
    "handoff": (LINK, "handoff of KV"),
    "decode_queue": (DECODE_WAIT, "waiting for decode"),
    "decode": (DECODE, "decode"),
}
BEFORE_FIRST_TOKEN = ("route", "prefill_queue", "prefill")
MAX_ROWS = 24
NOISE = 0.02  # of attainment, between one rate and the next
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


def figures(plan: Plan, width: Width = "wide") -> dict[str, Figure]:
    """Every figure that the plan has points for, by name."""
    drawn: dict[str, Callable[[Plan, Width], Figure | None]] = {
        "attainment": attainment_by_rate,
        "goodput": goodput_per_gpu,
        "phases": phase_goodput,
        "cost": cost_by_throughput,
        "time": time_by_rate,
    }
    with mpl.rc_context(STYLE):  # type: ignore[arg-type]
        made = {name: draw(plan, width) for name, draw in drawn.items()}
        for figure in made.values():
            if figure is not None:
                FigureCanvasAgg(figure)
                figure.draw_without_rendering()  # lays it out while the style holds
    return {name: figure for name, figure in made.items() if figure is not None}


def png(figure: Figure, dpi: int = 150) -> bytes:
    buffer = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
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


# The figures


def attainment_by_rate(plan: Plan, width: Width) -> Figure | None:
    """Share of requests that meet both targets against the rate; the SLO line, and the rate that was chosen."""
    lines = [(rank, found) for rank, found in ranked(plan) if len(found.curve) > 1]
    if not lines:
        return None
    figure, axes = _figure(width, 0.46 if width == "wide" else 0.98)
    floor = max(0.0, plan.slo.attainment - 0.4)
    rate = plan.at_rate.rate
    right = max([rate, *(found.goodput.value for _, found in lines)]) * 1.3
    marked = _marked(plan, [rank for rank, _ in lines])
    for rank, found in reversed(lines):
        _attainment_line(axes, rank, found, is_chosen=_is_chosen(found, plan), is_marked=rank in marked)
    axes.axhline(plan.slo.attainment, color=MUTED, linewidth=1, linestyle=(0, (5, 3)))
    axes.axvline(rate, color=INK, linewidth=1, linestyle=(0, (1, 2)))
    axes.set_xlim(0, right)
    axes.set_ylim(floor, 1.015)
    axes.text(right * 0.006, plan.slo.attainment - 0.006, f"target {plan.slo.attainment:.0%}", va="top", color=MUTED)
    _above(axes, rate, right, f"{rate:.3g} requests/s")
    levels = [plan.slo.attainment - 0.07 - 0.05 * (i % 5) for i in range(len(marked))]
    for rank, level in zip(marked, levels, strict=True):
        _number_on_curve(axes, rank, plan.tried[rank - 1], level, right)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_xlabel("requests/s")
    axes.set_title("Requests that meet both targets", pad=20)
    return figure


def _attainment_line(axes: Axes, rank: int, found: Goodput, *, is_chosen: bool, is_marked: bool) -> None:
    colour = COLOCATED if found.candidate.is_colocated else INK
    points = falling(found.curve)
    rates, shares = [rate for rate, _ in points], [found.value for _, found in points]
    if not is_marked:
        pale = COLOCATED if found.candidate.is_colocated else FAINT
        axes.plot(rates, shares, color=pale, linewidth=0.9, alpha=0.55)
        return
    low, high = ([getattr(found, end) for _, found in points] for end in ("low", "high"))
    axes.fill_between(rates, low, high, color=colour, alpha=0.14, linewidth=0)
    axes.plot(rates, shares, color=colour, linewidth=2.4 if is_chosen else 1.3, marker="o", markersize=3)


def _number_on_curve(axes: Axes, rank: int, found: Goodput, level: float, right: float) -> None:
    """The rank, where the curve passes `level`; nothing where it does not."""
    rate = crossing(falling(found.curve), level)
    if rate is None or rate > right:
        return
    colour = COLOCATED if found.candidate.is_colocated else INK
    _circled(axes, rank, (rate, level), colour)


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


def goodput_per_gpu(plan: Plan, width: Width) -> Figure | None:
    """Each candidate's goodput per GPU with its interval, the best at the top."""
    rows = sorted(ranked(plan), key=lambda row: -row[1].per_gpu)[:MAX_ROWS]
    if not rows:
        return None
    per_row = 0.3 if width == "wide" else 0.5
    figure, axes = _figure(width, (0.9 + per_row * len(rows)) / INCHES[width])
    for y, (rank, found) in enumerate(rows):
        _goodput_row(axes, y, rank, found, is_chosen=_is_chosen(found, plan), width=width)
    axes.set_ylim(len(rows) - 0.4, -0.7 if width == "wide" else -0.95)
    axes.set_xlim(0, max(found.goodput.high / found.candidate.gpus for _, found in rows) * 1.12 or 1)
    axes.set_yticks([])
    if width == "wide":
        axes.set_yticks(range(len(rows)), [words.label(found.candidate) for _, found in rows])
        axes.tick_params(axis="y", pad=30)
        for tick, (_, found) in zip(axes.get_yticklabels(), rows, strict=True):
            tick.set_color(_colour(found))
            tick.set_fontweight("bold" if _is_chosen(found, plan) else "normal")
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("requests/s per GPU")
    axes.set_title("Goodput per GPU")
    return figure


def _goodput_row(axes: Axes, y: int, rank: int, found: Goodput, *, is_chosen: bool, width: Width) -> None:
    colour, gpus = _colour(found), found.candidate.gpus
    low, high = found.goodput.low / gpus, found.goodput.high / gpus
    axes.plot([0, found.per_gpu], [y, y], color=colour, alpha=0.25, linewidth=5 if is_chosen else 3)
    axes.plot([low, high], [y, y], color=colour, linewidth=1.4)
    axes.plot([found.per_gpu], [y], marker="o", color=colour, markersize=7 if is_chosen else 5)
    weight = "bold" if is_chosen else "normal"
    at, from_left = ((0, y), -16) if width == "wide" else ((0, y - 0.42), 9)
    _circled(axes, rank, at, colour, offset=from_left)
    if width == "narrow":
        style: Any = {
            "color": colour,
            "fontsize": 9.5,
            "va": "center_baseline",
            "fontweight": weight,
            "in_layout": False,
        }
        axes.annotate(words.label(found.candidate), at, (22, 0), textcoords="offset points", **style)
    if not found.goodput.value:
        _after(axes, (0, y), "no rate meets the targets", MUTED, gap=9)


def phase_goodput(plan: Plan, width: Width) -> Figure | None:
    """Each phase alone: its goodput per GPU at every degree, which is what two pools can do that one cannot."""
    roles = [role for role in ("prefill", "decode") if plan.phase_goodput.get(role)]
    tables = [(role, sorted(plan.phase_goodput[role], key=_degree_order)) for role in roles]
    if not tables:
        return None
    count = max(len(table) for _, table in tables)
    figure = _blank(width, (1.0 + 0.32 * count) / INCHES[width] * (1 if width == "wide" else len(tables) * 0.92))
    shape = (1, len(tables)) if width == "wide" else (len(tables), 1)
    for i, (role, table) in enumerate(tables):
        axes = figure.add_subplot(*shape, i + 1)
        colour = PREFILL if role == "prefill" else DECODE
        values = [value for _, value in table]
        best = values.index(max(values))
        for y, value in enumerate(values):
            axes.barh(y, value, height=0.55, color=colour, alpha=1.0 if y == best else 0.45, linewidth=0)
            _after(axes, (value, y), f"{value:.3g}", INK)
        axes.set_yticks(range(len(table)), [label for label, _ in table])
        axes.set_ylim(len(table) - 0.4, -0.6)
        axes.set_xlim(0, max(values) * 1.15 or 1)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("requests/s per GPU")
        axes.set_title(f"A {role} worker alone", color=colour)
    return figure


def cost_by_throughput(plan: Plan, width: Width) -> Figure | None:
    """What each candidate costs against what it serves, and the frontier: nothing serves as much for less."""
    shown = [(rank, found) for rank, found in ranked(plan) if found.goodput.value > 0 and found.usd_per_hour > 0]
    if not shown:
        return None
    figure, axes = _figure(width, 0.44 if width == "wide" else 0.9)
    frontier = cheapest([found for _, found in shown])
    right = max([plan.chosen.goodput.high, *(found.goodput.value for _, found in shown)]) * 1.08
    top = max(found.usd_per_hour for _, found in shown) * 1.4
    rates = [0.0, *(found.goodput.value for found in frontier)]
    axes.step(rates, [frontier[0].usd_per_hour, *(f.usd_per_hour for f in frontier)], where="pre", color=FAINT)
    labels: list[tuple[float, float]] = []
    for rank, found in shown:
        _cost_dot(axes, rank, found, plan, labels, (right, top), width)
    axes.set_xlim(0, right)
    axes.set_ylim(0, top)
    axes.set_xlabel("goodput, requests/s")
    axes.set_title("Cost, USD an hour")
    return figure


def _cost_dot(
    axes: Axes, rank: int, found: Goodput, plan: Plan, taken: list[tuple[float, float]], size: tuple[float, float],
    width: Width,
) -> None:  # fmt: skip
    """A dot with its interval, and its rank above where no other's stands."""
    is_chosen, colour = _is_chosen(found, plan), _colour(found)
    x, y = found.goodput.value, found.usd_per_hour
    if is_chosen:  # of all they would hide each other where costs are the same
        axes.plot([found.goodput.low, found.goodput.high], [y, y], color=colour, linewidth=1, alpha=0.6)
    axes.plot([x], [y], marker="o", color=colour, markersize=9 if is_chosen else 5)
    near_x, near_y = size[0] * (0.025 if width == "wide" else 0.055), size[1] * 0.06
    for step in range(1, 6):
        at = (x, y + step * size[1] * (0.055 if width == "wide" else 0.05))
        if all(abs(at[0] - a) > near_x or abs(at[1] - b) > near_y * 0.8 for a, b in taken):
            taken.append(at)
            weight = "bold" if is_chosen else "normal"
            axes.text(*at, str(rank), ha="center", va="center", fontsize=10, color=colour, fontweight=weight)
            return


def cheapest(found: Sequence[Goodput]) -> list[Goodput]:
    """Those for which no other serves at least as much for less, by goodput."""
    kept: list[Goodput] = []
    for candidate in sorted(found, key=lambda f: (-f.goodput.value, f.usd_per_hour)):
        if not kept or candidate.usd_per_hour < kept[-1].usd_per_hour:
            kept.append(candidate)
    return kept[::-1]


def time_by_rate(plan: Plan, width: Width) -> Figure | None:
    """Mean seconds of a request in each phase, by rate: until the first token, and after it."""
    curve = [point for point in plan.chosen.curve if point.phases_s]
    if len(curve) < 2:
        return None
    figure = _blank(width, 0.42 if width == "wide" else 1.7)
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


# What they share


def ranked(plan: Plan) -> Iterator[tuple[int, Goodput]]:
    return iter(enumerate(plan.tried, start=1))


def _marked(plan: Plan, ranks: Sequence[int]) -> list[int]:
    """Those that carry a number: the best few, the chosen one, and the best of either kind."""
    marked = set(ranks[:4])
    for is_colocated in (True, False):
        marked.update([r for r in ranks if plan.tried[r - 1].candidate.is_colocated is is_colocated][:1])
    marked.update(r for r in ranks if _is_chosen(plan.tried[r - 1], plan))
    return sorted(marked)


def _is_chosen(found: Goodput, plan: Plan) -> bool:
    return found.candidate == plan.chosen.candidate


def _after(axes: Axes, at: tuple[float, float], text: str, colour: str, *, gap: float = 4) -> None:
    style: Any = {"va": "center", "fontsize": 9.5, "color": colour, "in_layout": False}
    axes.annotate(text, at, (gap, 0), textcoords="offset points", **style)


def _circled(axes: Axes, rank: int, at: tuple[float, float], colour: str, *, offset: float = 0) -> None:
    """The rank in a circle, `offset` points to the right of a place."""
    box = {"boxstyle": "circle,pad=0.22", "facecolor": PAGE, "edgecolor": colour, "linewidth": 0.8}
    style: Any = {"ha": "center", "va": "center", "fontsize": 9 if rank < 10 else 8, "color": colour, "bbox": box}
    axes.annotate(
        str(rank), at, (offset, 0), textcoords="offset points", annotation_clip=False, in_layout=False, **style
    )


def _colour(found: Goodput) -> str:
    return COLOCATED if found.candidate.is_colocated else INK


def _degree_order(row: tuple[str, float]) -> list[int]:
    """TP 2 before TP 10."""
    return [int(number) for number in re.findall(r"\d+", row[0])]


def _above(axes: Axes, x: float, right: float, text: str) -> None:
    """What a vertical line stands for, on top of it, within the axes' width."""
    share = x / right
    side = "left" if share < 0.3 else "right" if share > 0.8 else "center"
    axes.text(x, 1.01, text, ha=side, va="bottom", fontsize=10, transform=axes.get_xaxis_transform())


def _blank(width: Width, ratio: float) -> Figure:
    layout = ConstrainedLayoutEngine(h_pad=0.06, w_pad=0.04, hspace=0.06, wspace=0.03)
    return Figure(figsize=(INCHES[width], INCHES[width] * ratio), dpi=72, layout=layout)


def _figure(width: Width, ratio: float) -> tuple[Figure, Axes]:
    figure = _blank(width, ratio)
    axes = figure.add_subplot()
    axes.xaxis.set_major_locator(MaxNLocator(8 if width == "wide" else 5))
    return figure, axes
