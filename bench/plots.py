"""The pictures of docs/benchmarks.md and README.md, drawn from bench/results/*.json. Nothing is measured here.

    python -m bench.plots [NAMES...]

A result's picture is one function from what is kept to a figure. Each is drawn for a light page and for a dark one, as
SVG and as PNG: docs/plots/NAME.svg, NAME-dark.svg, NAME.png, NAME-dark.png; the same bytes each time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from bench.common import KINDS_OF_CPU, REPO, RESULTS
from bench.peers.install import PEERS

Result = Mapping[str, Any]
FOLDER = REPO / "docs" / "plots"
DPI = 110  # of PNGs
WIDTH = 9.0  # inches
THEMES = {"": ("#ffffff", "#1f2328", "#d1d9e0"), "-dark": ("#0d1117", "#e6edf3", "#3d444d")}  # page, text, lines
COLORS = ("#2f81f7", "#f0883e", "#2da44e", "#a371f7", "#e5534b", "#d4a72c", "#1b9e9e", "#db61a2", "#8b949e")
GREY = COLORS[-1]
SHORT = {
    "1P1D, a core each": "1 prefill, 1 decode",
    "one mixed, whole steps of 512": "1 mixed",
    "two mixed, a core each, as predicted": "2 mixed",
    "a prefill and a mixed worker, as predicted": "1 prefill, 1 mixed",
} | {name: peer.title for name, peer in PEERS.items()}
PICK = "the planner's pick"
COLOR_OF = dict(zip([*list(SHORT)[:4], PICK, *PEERS], COLORS, strict=False))
COLOR_OF |= {"kvrelay": COLORS[0], "generate": GREY, "generate_batch": COLORS[3]}
WAYS = {
    "memcpy": ("memcpy", "o--"),
    "shared_memory/consecutive/plain": ("shared memory", "o-"),
    "shared_memory/scattered/checksums": ("scattered pages,\nchecksums", "o-"),
    "raw_gloo": ("raw gloo", "s--"),
    "process_group/consecutive/plain": ("process group", "s-"),
}
PHASES = {"ttft": 500, "tpot": 50}  # targets of bench.e2e's load, ms


def draw(name: str, result: Result) -> None:
    """The four files of a result's picture."""
    FOLDER.mkdir(exist_ok=True)
    for suffix, theme in THEMES.items():
        with mpl.rc_context(style(*theme)):
            figure = PLOTS[name](result)
            figure.savefig(FOLDER / f"{name}{suffix}.svg", metadata={"Date": None, "Creator": None})
            figure.savefig(FOLDER / f"{name}{suffix}.png", dpi=DPI, metadata={"Software": None})


def style(page: str, text: str, lines: str) -> Any:
    """matplotlib's settings, in the colours of a page."""
    inks = ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color")
    return {
        **dict.fromkeys(inks, text),
        **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), page),
        **dict.fromkeys(("axes.edgecolor", "grid.color"), lines),
        **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon", "patch.force_edgecolor"), False),
        **dict.fromkeys(("axes.grid", "axes.axisbelow", "figure.constrained_layout.use"), True),
        "axes.prop_cycle": cycler(color=COLORS),
        "axes.titlesize": 10,
        "font.size": 9,
        "legend.fontsize": 8,
        "lines.markersize": 4,
        "svg.fonttype": "none",
        "svg.hashsalt": "kvrelay",
    }


# What the pictures share


def panels(columns: int, height: float, rows: int = 1) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(WIDTH, height))
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def bars(axes: Axes, labels: Sequence[str], series: Mapping[str, Sequence[float]], form: str = "{:g}") -> None:
    """Lying bars from the top down, those of a label side by side, each with its figure."""
    height = 0.8 / len(series)
    for i, (name, values) in enumerate(series.items()):
        places = np.arange(len(labels)) + (i - (len(series) - 1) / 2) * height
        drawn = axes.barh(places, values, height * 0.9, label=SHORT.get(name, name), color=COLOR_OF.get(name))
        axes.bar_label(drawn, [form.format(value) if value == value else "" for value in values], padding=2, fontsize=7)
    downward(axes, labels)
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.14)
    if len(series) > 1:
        axes.legend()


def downward(axes: Axes, labels: Sequence[str]) -> None:
    """A label for each whole number of y, from the top."""
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()


def legend_beside(axes: Axes) -> None:
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def ticks(axes: Axes, values: Sequence[float]) -> None:
    """These and no others below, where they are far apart or doubled."""
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()


def log(axes: Axes, along: str = "x", named: Sequence[float] = (1, 2, 5)) -> None:
    """A logarithmic axis with figures at these of each ten."""
    axes.set(**{f"{along}scale": "log"})
    axis = axes.xaxis if along == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=named))
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_locator(NullLocator())


def target(axes: Axes, value: float, *, across: bool = True) -> None:
    line = axes.axhline if across else axes.axvline
    line(value, color=GREY, linewidth=1, linestyle=":")


# The pictures


def arrangements(result: Result) -> Figure:
    figure, both = panels(2, 4.0)
    for axes, (key, target_ms) in zip(both, PHASES.items(), strict=True):
        for name, rows in result["rows"].items():
            rates, p90 = [row["asked_per_s"] for row in rows], [row["latency_ms"][key]["p90"] for row in rows]
            mark = "s--" if name in PEERS else "o-"
            axes.plot(rates, p90, mark, label=SHORT.get(name, name), color=COLOR_OF.get(name))
        log(axes, "y")
        target(axes, target_ms)
        ticks(axes, rates)
        axes.set(xlabel="requests/s", title=f"{key.upper()} P90, ms (target {target_ms})")
    handles, labels = both[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return figure


def e2e(result: Result) -> Figure:
    figure, both = panels(2, 3.0)
    rates = [row["asked_per_s"] for row in result["rows"]]
    for axes, (key, target_ms) in zip(both, PHASES.items(), strict=True):
        for at in ("p50", "p90", "p99"):
            axes.plot(rates, [row["latency_ms"][key][at] for row in result["rows"]], "o-", label=at.upper())
        log(axes, "y")
        target(axes, target_ms)
        axes.set(xlabel="requests/s", title=f"{key.upper()}, ms (target {target_ms})")
    both[0].legend()
    return figure


def peers(result: Result) -> Figure:
    """Of the engine alone; what arrives by chance is in arrangements' picture."""
    rows = [row for row in result["rows"] if row["what"].startswith(("prefill", "decode"))]
    figure, [axes] = panels(1, 1.2 + 0.4 * len(rows))
    for i, name in enumerate(rows[0]["ratio_to"]):
        ratios = [row["ratio_to"][name] for row in rows]
        middle, least, most = (np.array([ratio[key] for ratio in ratios]) for key in ("median", "least", "most"))
        places = np.arange(len(rows)) + 0.2 * (i - 1)
        axes.errorbar(
            middle,
            places,
            xerr=(middle - least, most - middle),
            fmt="o",
            capsize=2,
            label=SHORT[name],
            color=COLOR_OF[name],
        )
    downward(axes, [row["what"] for row in rows])
    target(axes, 1, across=False)
    log(axes, named=(1, 1.5, 2, 3, 5, 7))
    axes.set(title="their time over ours (right of 1: ours is the shorter), median, least and most")
    legend_beside(axes)
    return figure


def engine(result: Result) -> Figure:
    figure, both = panels(2, 3.6)
    for axes, kind in zip(both, ("prefill", "decode"), strict=True):
        rows = [row for row in result["rows"] if row["what"].startswith(kind)]
        series = {name: [row["tokens_per_s"][name] for row in rows] for name in rows[0]["tokens_per_s"]}
        bars(axes, [row["what"].partition(" ")[2] for row in rows], series, "{:,.0f}")
        axes.set(
            title=f"{kind}, tokens/s",
            ylabel={"prefill": "tokens of the prompt", "decode": "requests in the batch"}[kind],
        )
    both[0].legend().remove()
    return figure


def handoff(result: Result) -> Figure:
    figure, (left, right) = panels(2, 3.2)
    rows = result["hidden"]
    labels = [f"{row['transport']}\n{row['prompt_tokens']} tokens" for row in rows]
    keys = {"with nothing to hide behind": "handoff_alone_ms", "beside its prefill": "exposed_ms"}
    bars(left, labels, {name: [row[key] for row in rows] for name, key in keys.items()}, "{:.1f}")
    left.set(title="exposed part of the handoff, ms (125m)")
    sizes = [row for row in result["bytes"] if row["model"] == "llama-8b"]
    for way, (name, mark) in WAYS.items():
        right.plot([row["mbytes"] for row in sizes], [row["gbytes_per_s"][way] for row in sizes], mark, label=name)
    right.set(xscale="log", xlabel="MB", title="GB/s (llama-8b)", ylim=(0, None))
    ticks(right, [round(row["mbytes"]) for row in sizes])
    legend_beside(right)
    return figure


def moves(result: Result) -> Figure:
    figure, [axes] = panels(1, 2.6)
    keys = {"P50 of all": "p50", "P99 of all": "p99", "P50 of the largest k": "largest_p50", "longest": "max"}
    rows = result["rows"]
    bars(
        axes, list(rows), {name: [row["gaps_ms"][key] for row in rows.values()] for name, key in keys.items()}, "{:.0f}"
    )
    log(axes)
    axes.set(title="gap between two tokens of a stream, ms")
    axes.legend(loc="upper right")
    return figure


def chaos(result: Result) -> Figure:
    """The longest of each bound's cells, as a share of the bound."""
    bounds = list(dict.fromkeys(cell["bound"] for cell in result["cells"]))
    figure, [axes] = panels(1, 5.6)
    for what, mark in {"noticed": "o", "next_token": "s", "pages": "^"}.items():
        found = [(name, _longest_share(result["cells"], name, f"{what}_s")) for name in bounds]
        shares = [(bounds.index(name), share) for name, share in found if share is not None]
        axes.plot([share for _, share in shares], [at for at, _ in shares], mark, label=what.replace("_", " "))
    downward(axes, bounds)
    target(axes, 1, across=False)
    axes.set(xlim=(0, 1.05), title="the longest of all faults, as a share of its bound")
    axes.legend()
    return figure


def _longest_share(cells: Sequence[Result], bound: str, what: str) -> float | None:
    times = [cell[what] for cell in cells if cell["bound"] == bound]
    shares = [time["max"] / time["bound"] for time in times if time["max"] is not None and time["bound"]]
    return max(shares, default=None)


def flood(result: Result) -> Figure:
    parts = {"quiet": result["quiet"], **result["parts"]}
    names = [name.replace("_", " ") for name in parts]
    figure, (left, right) = panels(2, 3.4)
    bars(left, names, {"": [part["check_ms"]["max"] for part in parts.values()]}, "{:.0f}")
    target(left, 100, across=False)
    left.set(title="slowest health check, ms (wanted: 100)")
    bars(right, names, {"": [part["most_rss_mb"] for part in parts.values()]}, "{:.0f}")
    right.set(title="most memory of the router, MB (wanted: 1,000)")
    right.set_yticklabels([])
    return figure


def protocol(result: Result) -> Figure:
    settings = {name: row for name, row in result["settings"].items() if "states" in row}
    names = list(settings)
    figure, [axes] = panels(1, 4.4)
    for kind, color in {"exhausted": COLORS[2], "bounded": COLORS[0]}.items():
        of_kind = [name for name in names if bool(settings[name]["left"]) == (kind == "bounded")]
        states = [settings[name]["states"] for name in of_kind]
        drawn = axes.barh([names.index(name) for name in of_kind], states, color=color, label=kind)
        axes.bar_label(drawn, fmt="{:,.0f}", padding=2, fontsize=7)
    downward(axes, names)
    axes.grid(visible=False, axis="y")
    axes.set(xscale="log", title="states looked at")
    axes.legend()
    return figure


def verify_live(result: Result) -> Figure:
    figure, three = panels(3, 3.0)
    rows = result["rows"]
    rates = [row["rate"] for row in rows]
    parts = {"attainment": "within both, %", "ttft_p90": "TTFT P90, ms", "tpot_p90": "TPOT P90, ms"}
    for axes, (key, title) in zip(three, parts.items(), strict=True):
        times, unit = (100, "") if key == "attainment" else (1, "_ms")
        predicted, measured = f"predicted{unit}", f"measured{unit}"
        low, value, high = ([times * row[key][predicted][at] for row in rows] for at in ("low", "value", "high"))
        axes.plot(rates, value, label="predicted")
        axes.fill_between(rates, low, high, alpha=0.25, linewidth=0)
        live = times * np.array([row[key][measured] for row in rows])
        axes.plot(rates, live, "o", color=COLORS[1], label=["measured", "_again"])
        axes.set(title=title, xlabel="requests/s")
    three[0].legend()
    return figure


def roofline(result: Result) -> Figure:
    figure, [axes] = panels(1, 4.2)
    figure.set_size_inches(6.5, 4.2)
    for source in result["sources"]:
        steps = [row for row in result["steps"] if row["source"] == source["source"]]
        pairs = [[row["published_ms"], row["with_its_engine_ms"] / row["published_ms"]] for row in steps]
        axes.plot(*np.array(pairs).T, ".", label=source["source"])
    target(axes, 1)
    log(axes)
    axes.set(xlabel="published, ms", title="a step as planned, over the published one", ylim=(0, 2))
    axes.legend()
    return figure


def static_batches(result: Result) -> Figure:
    figure, both = panels(2, 4.2)
    rows = [dict(zip(result["columns"], line.split(","), strict=True)) for line in result["batches"]]
    for axes, phase in zip(both, ("prefill", "decode"), strict=True):
        for gpu in result["figures"]:
            pairs = [
                [float(row[f"{phase} {of}"]) for of in ("measured", "predicted")]
                for row in rows
                if row["hardware"] == gpu
            ]
            measured, predicted = np.array(pairs).T
            axes.plot(measured, predicted / measured, ".", label=gpu, alpha=0.6)
        for edge in (-1, 0, 1):
            target(axes, 1 + edge * result["wanted"][phase])
        log(axes, named=(1,))
        axes.set(xlabel=f"measured {phase} step, ms", ylim=(0.5, 1.5))
    both[0].set(title="foretold without the model on the GPU, over measured")
    both[0].legend()
    return figure


def closed_loops(result: Result) -> Figure:
    titles = {"ttft_mean": "TTFT mean, s", "itl_mean": "between tokens mean, ms", "throughput": "output tokens/s"}
    figure, grid = panels(3, 5.6, rows=2)
    ways = {way: found["runs"] for way, found in result["ways"].items() if "runs" in found}
    for at, (way, lines) in enumerate(ways.items()):
        runs = [dict(zip(result["columns"], line.split(","), strict=True)) for line in lines]
        for axes, (name, title) in zip(grid[3 * at : 3 * at + 3], titles.items(), strict=True):
            _draw_loops(axes, runs, name)
            axes.set(title=f"{title}, {way}", xlabel="measured", ylabel="predicted" if axes is grid[3 * at] else "")
    grid[0].legend()
    return figure


def _draw_loops(axes: Axes, runs: Sequence[Mapping[str, str]], name: str) -> None:
    kinds = {
        "8B on H100, fitted": ("h100-sxm", "fitted"),
        "70B on H100": ("h100-sxm", ""),
        "8B on A100": ("a100-80g-sxm", ""),
    }
    for label, kind in kinds.items():
        of = [run for run in runs if (run["hardware"], run["fitted"]) == kind]
        pairs = np.array([[float(run[f"{name} {of_it}"]) for of_it in ("measured", "predicted")] for run in of])
        axes.plot(*pairs.T / (1e3 if name == "ttft_mean" else 1), ".", label=label, alpha=0.6)
    for along in ("x", "y"):
        log(axes, along, named=(1,))
    ends = axes.get_xlim()
    axes.plot(ends, ends, ":", color=GREY, linewidth=1)


def simulator(result: Result) -> Figure:
    figure, (left, right) = panels(2, 2.8)
    rows = [row for part in ("distserve", "splitwise") for row in result[part]]
    kinds = [(part, rules) for part in ("distserve", "splitwise") for rules in (part, "live policies")]
    for at, (part, rules) in enumerate(kinds):
        times = [row["times"] for row in result[part] if row["rules"] == rules]
        left.plot(times, [at] * len(times), "o", alpha=0.7)
    downward(left, [f"{part}'s case,\n{rules}" for part, rules in kinds])
    log(left)
    left.set(title=f"times as fast as their simulator ({len(rows)} runs)")
    grown = result["growth"]
    bars(right, [row["case"] for row in grown], {"": [row["requests_per_cpu_s"] for row in grown]}, "{:,.0f}")
    right.set(title="requests simulated a CPU second")
    return figure


def growth(result: Result) -> Figure:
    cases = result["cases"]
    figure, grid = panels(len(cases), 2.8)
    for axes, (name, case) in zip(grid, cases.items(), strict=True):
        for routers in dict.fromkeys(row["routers"] for row in case["rows"]):
            rows = [row for row in case["rows"] if row["routers"] == routers]
            points = [row["workers"] for row in rows], [row["ttft_p90_ms"] for row in rows]
            axes.plot(*points, "o-", label=f"{routers} router{'s' * (routers > 1)}")
        axes.axhline(1e3 * case["slo"]["ttft_s"], color=GREY, linestyle="--")
        axes.set_xscale("log")
        axes.set(ylim=(0, None), xlabel="workers", ylabel="TTFT P90 ms", title=name)
    grid[0].legend()
    return figure


def hybrids(result: Result) -> Figure:
    cases = result["cases"]
    columns = -(-len(cases) // 2)
    figure, grid = panels(columns, 0.2 + 16.8 / columns, rows=2)
    for axes in grid[len(cases) :]:
        axes.axis("off")
    for axes, (name, case) in zip(grid, cases.items(), strict=False):
        ttfts_s, tpots_s = ([*dict.fromkeys(row[key] for row in case["rows"])] for key in ("ttft_s", "tpot_s"))
        ratios = [row.get("hybrid_ratio") or np.nan for row in case["rows"]]
        axes.imshow(np.reshape(ratios, (len(ttfts_s), len(tpots_s))), cmap="RdYlGn", vmin=0.7, vmax=1.3)
        for i, row in enumerate(case["rows"]):
            y, x = divmod(i, len(tpots_s))
            axes.text(x, y, _told(row), ha="center", va="center", color="black", fontsize=8)
        axes.set_xticks(range(len(tpots_s)), [f"{1e3 * s:g}" for s in tpots_s])
        axes.set_yticks(range(len(ttfts_s)), [f"{1e3 * s:g}" for s in ttfts_s])
        axes.grid(visible=False)
        axes.set(xlabel="TPOT ms", ylabel="TTFT ms", title=name)
    return figure


def _told(row: Result) -> str:
    if not row.get("hybrid_ratio"):
        return str(row.get("chosen", "none"))
    return f"{row['hybrid_ratio']:.2f}x\n{max(best['per_s'] for best in row['best'].values()):.0f}/s"


def placements(result: Result) -> Figure:
    found = result["goodput_per_s"]
    figure, [axes] = panels(1, 2.6)
    kinds = list(next(iter(found.values())))
    bars(axes, list(found), {kind: [row[kind] for row in found.values()] for kind in kinds})
    axes.set(title="requests/s with 90% within both targets")
    legend_beside(axes)
    return figure


def replan(result: Result) -> Figure:
    figure, two = panels(1, 5.0, rows=2)
    for axes, (name, load) in zip(two, result["loads"].items(), strict=True):
        for roles, color in {"two and two": GREY, "distserve": COLORS[1], "kvrelay": COLORS[0]}.items():
            shares = load["over_time"][roles]
            axes.step(30 * np.arange(len(shares)), 100 * np.array(shares), where="post", color=color, label=roles)
        axes.set(title=f"{name}: % within both targets", ylim=(0, 104))
    two[0].legend(loc="lower right")
    two[1].set(xlabel="s")
    return figure


def shift(result: Result) -> Figure:
    begins = result["begins"]
    figure, grid = panels(1, 2.7 * len(begins), rows=len(begins))
    for axes, (begin, played) in zip(grid, begins.items(), strict=True):
        _draw_shift(axes, played)
        axes.set(title=f"begins with {begin}: % within both targets", ylim=(0, 104))
    grid[-1].set(xlabel="s")
    grid[0].legend(loc="lower left")
    return figure


def _draw_shift(axes: Axes, played: Result) -> None:
    begin_s = 0.0
    for kind, seconds in played["phases"]:
        if kind == "code":
            label = "code arrives" if begin_s == played["phases"][0][1] else None
            axes.axvspan(begin_s, begin_s + seconds, color=GREY, alpha=0.25, linewidth=0, label=label)
        begin_s += seconds
    for mode, color in {"off": COLORS[1], "act": COLORS[0]}.items():
        of_mode = [dict(run["over_time"]) for run in played["runs"] if run["mode"] == mode]
        times = sorted(set.intersection(*(set(run) for run in of_mode)))
        shares = [100 * float(np.mean([run[at_s] for run in of_mode])) for at_s in times]
        axes.step(times, shares, where="post", color=color, label=f"replan: {mode}")
    for change in (change for run in played["runs"] for change in run["changes"]):
        axes.axvline(change["at_s"], color=COLORS[0], linestyle=":")
        axes.annotate("a role changes", (change["at_s"], 3), (3, 0), textcoords="offset points", fontsize=7)
    axes.set_xlim(0, begin_s)


def startup(result: Result) -> Figure:
    names = list(result["memory_mb"])
    figure, (left, right) = panels(2, 3.0)
    bars(left, names, {"": [result["memory_mb"][name] for name in names]}, "{:.0f}")
    left.set(title="memory, MB")
    bars(right, names, {"": [result["idle_cpu_percent"][name] for name in names]}, "{:.1f}")
    right.set(title="CPU when idle, % of a core")
    right.set_yticklabels([])
    return figure


def router(result: Result) -> Figure:
    grown = result["growth"]
    figure, three = panels(3, 2.6)
    titles = {"request_cpu_us": "a request, us", "token_cpu_us": "a token, us", "idle_cores": "no request, cores"}
    for axes, (name, title) in zip(three, titles.items(), strict=True):
        axes.plot([row["workers"] for row in grown], [row[name] for row in grown], "o-")
        axes.set(xscale="log", xlabel="workers", title=title, ylim=(0, None))
        ticks(axes, [row["workers"] for row in grown])
    figure.suptitle("CPU time of one router process", fontsize=10)
    return figure


def versions_unused(result: Result) -> Figure:
    found = result["figures"]
    figure, [axes] = panels(1, 2.8)
    ratios = np.array([row["ratio"] for row in found.values()])
    low, high = np.array([row["half_within"] for row in found.values()]).T
    axes.hlines(range(len(found)), low, high, color=COLORS[0])
    axes.plot(ratios, range(len(found)), "o")
    downward(axes, list(found))
    target(axes, 1, across=False)
    axes.set(title="after over before: the middle round, and what half of the rounds lie within")
    return figure


def paper_splitwise(result: Result) -> Figure:
    figure, both = panels(2, 3.8)
    for axes, (name, rules) in zip(both, result["traces"].items(), strict=True):
        mixes = {rule: rules[rule]["its_mixes_iso_power"] for rule in ("published", "table")}
        labels = list(mixes["table"])
        series = {f"its rules, {rule}": [rows[design]["rate"] for design in labels] for rule, rows in mixes.items()}
        series["live policies, table"] = [result["live"][name][design]["rate"] for design in labels]
        bars(axes, labels, series, "{:.0f}")
        axes.set(title=f"{name}: requests/s")
    handles, labels = both[0].get_legend_handles_labels()
    for axes in both:
        axes.legend().remove()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def paper_distserve(result: Result) -> Figure:
    figure, both = panels(2, 2.6)
    for axes, row in zip(both, result["figures"], strict=True):
        names = list(row["long_run_per_gpu"])
        series = {
            "published": [row["published_per_gpu"].get(name, np.nan) for name in names],
            "its rules, a burst": [row["burst_per_gpu"].get(name, np.nan) for name in names],
            "long run": [row["long_run_per_gpu"][name][0] for name in names],
        }
        bars(axes, names, series, "{:.2f}")
        axes.set(title=f"{row['case'].replace('paper_', 'OPT-').upper()}: goodput per GPU, requests/s")
    both[1].legend().remove()
    return figure


def two_hosts(result: Result) -> Figure:
    cuts = {f"cable out for {part['cut_for_s']:g} s": part for part in (result["cut"], result["long_cut"])}
    names = {
        "a running stream failed after": "stream_failed_s",
        "a new request was refused in": "refused_s",
        "it served again, after the mend": "serving_after_mend_s",
    }
    figure, [axes] = panels(1, 2.4)
    bars(axes, list(cuts), {text: [cut[key] for cut in cuts.values()] for text, key in names.items()}, "{:.2f}")
    axes.set(title="seconds")
    legend_beside(axes)
    return figure


def kv_fp8(result: Result) -> Figure:
    names = {
        "relative_error_median": "error of logits, median",
        "kl_mean_nats": "KL divergence, nats",
        "nll_increase_nats": "loss, more by, nats",
    }
    figure, [axes] = panels(1, 2.4)
    sides = {"fp8 against bfloat16": "fp8_against_bfloat16", "bfloat16 against float32": "bfloat16_against_float32"}
    bars(axes, list(names.values()), {text: [result[key][of] for of in names] for text, key in sides.items()}, "{:.2g}")
    axes.set(title=f"{result['model']}, random weights" if result["is_rehearsal"] else result["model"])
    return figure


PLOTS_BY_CPU: Mapping[str, Callable[[Result], Figure]] = {
    "arrangements": arrangements,
    "engine": engine,
    "peers": peers,
    "verify_live": verify_live,
}
PLOTS: Mapping[str, Callable[[Result], Figure]] = {
    **{name + kind: plot for name, plot in PLOTS_BY_CPU.items() for kind in KINDS_OF_CPU.values()},
    "chaos": chaos,
    "closed_loops": closed_loops,
    "e2e": e2e,
    "flood": flood,
    "growth": growth,
    "handoff": handoff,
    "hybrids": hybrids,
    "kv_fp8": kv_fp8,
    "moves": moves,
    "paper_distserve": paper_distserve,
    "paper_splitwise": paper_splitwise,
    "placements": placements,
    "protocol": protocol,
    "replan": replan,
    "roofline": roofline,
    "router": router,
    "shift": shift,
    "simulator": simulator,
    "startup": startup,
    "static_batches": static_batches,
    "two_hosts": two_hosts,
    "versions_unused": versions_unused,
}


def redraw(names: Iterable[str]) -> None:
    """The pictures of those whose results are kept."""
    for name in names:
        path = RESULTS / f"{name}.json"
        if path.exists():
            draw(name, json.loads(path.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.plots", description="Draw the results that are kept.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PLOTS)}; all when none is given")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in PLOTS]:
        parser.error(f"there is no picture {unknown[0]!r}; give some of {', '.join(PLOTS)}")
    redraw(args.names or list(PLOTS))


if __name__ == "__main__":
    main()
