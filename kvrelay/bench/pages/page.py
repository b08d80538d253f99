"""A benchmark's result as one HTML page that stands alone: no script, no request, right in light and dark.

It lays out what kvrelay.bench.series computed and figures.py draws; the template is page.html beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvrelay.bench.pages.figures import curve_of, figures, rates_of
from kvrelay.bench.series.comparing import percentile_of, uneven_cache
from kvrelay.bench.series.words import knee_words, ratio_cells, spread
from kvrelay.plan.frame import framed
from kvrelay.plan.plots.style import svg

SECTIONS = (("answer", "The answer"), ("plots", "Plots"), ("table", "Figures"), ("settings", "What and where"))
SHOWN = (("ttft", 50), ("ttft", 90), ("ttft", 99), ("tpot", 50), ("tpot", 90), ("tpot", 99), ("e2el", 90))
CAPTIONS = {
    "attainment": "Share of requests that met the targets, of all rounds together; failed ones missed them. The dashed "
    "line is the share that is wanted, a diamond the knee, the band where it lies nine times in ten for other such "
    "requests.",
    "latency": "Share of requests (upwards) that had at most so much (to the right), as the client saw it. The dashed "
    "line is the target.",
}
TOLD = ("TTFT P90 ms", "TPOT P90 ms", "output tokens/s")
Result = Mapping[str, Any]


def page(result: Result) -> str:
    names = [side["name"] for side in result["sides"]]
    wide, narrow = figures(result, "wide"), figures(result, "narrow")
    return framed("kvrelay.bench.pages", "page.html").render(
        title=" and ".join(names) if len(names) < 4 else f"{len(names)} servers",
        asked=_asked(result),
        sections=SECTIONS,
        answer=list(_answer(result)),
        warnings=list(_warnings(result)),
        figures=[
            {
                "name": name,
                "wide": svg(figure, f"{name}-wide"),
                "narrow": svg(narrow[name], f"{name}-narrow"),
                "alt": _alt(result, name),
                "caption": CAPTIONS[name],
            }
            for name, figure in wide.items()
        ],
        head=[
            "server",
            "requests/s",
            "requests",
            "failed",
            *(f"{m.upper()} P{p} ms" for m, p in SHOWN),
            "tokens/s",
            "met",
        ],
        rows=list(_rows(result)),
        first=names[0],
        second=names[-1],
        ratios=[
            (f"{float(each['rate']):g}", *ratio_cells(name, row))
            for each in result.get("compared", ())
            for name, row in each["figures"].items()
        ],
        facts=list(_facts(result)),
    )


def _asked(result: Result) -> str:
    settings, rates = result["settings"], rates_of(result)
    what = settings.get("trace") or (
        f"prompts of {settings['random_input_len']} and answers of {settings['random_output_len']} tokens"
    )
    targets = ", ".join(f"{name.upper()} {limit:g} ms" for name, limit in result["slos_ms"].items())
    played = ", ".join(f"{float(rate):g}" for rate in rates)
    return f"{what}, at {played} requests/s{f'; targets: {targets}' if targets else ''}"


def _answer(result: Result) -> Iterator[str]:
    for side, found in result.get("knees", {}).items():
        yield f"{side}: {knee_words(found, result.get('wanted_attainment', 0.9))}."
    for each in result.get("compared", ()):
        names = [side["name"] for side in result["sides"]]
        shown = [
            f"{name.removesuffix(' ms')} {spread(each['figures'][name])}" for name in TOLD if name in each["figures"]
        ]
        yield f"At {float(each['rate']):g} requests/s {names[1]} over {names[0]}: {', '.join(shown)}."
    if not result.get("knees") and not result.get("compared"):
        for row in _rows(result):
            yield f"{row[0]}: {row[2]} requests, TTFT P90 {row[5]} ms, TPOT P90 {row[8]} ms, {row[-2]} tokens/s."


def _warnings(result: Result) -> Iterator[str]:
    if why := uneven_cache(result):
        yield f"Mind the cache: {why}."
    failed = sum(turn["failed"] for turn in result["turns"])
    if failed:
        codes = sorted({code for turn in result["turns"] for code in turn["errors"]})
        yield f"{failed} requests failed ({', '.join(codes)})."


def _rows(result: Result) -> Iterator[list[str]]:
    for side in result["sides"]:
        met = dict(curve_of(result, side["name"]))
        for rate in rates_of(result):
            turns = [t for t in result["turns"] if (t["side"], t["rate"]) == (side["name"], rate)]
            if turns:
                yield [
                    side["name"],
                    f"{float(rate):g}",
                    str(sum(t["requests"] for t in turns)),
                    str(sum(t["failed"] for t in turns)),
                    *(f"{percentile_of(turns, metric, p):.1f}" for metric, p in SHOWN),
                    f"{sum(t['output_throughput'] for t in turns) / len(turns):.1f}",
                    f"{met[float(rate)]:.1%}" if float(rate) in met else "-",
                ]


def _alt(result: Result, name: str) -> str:
    if name == "attainment":
        told = [
            f"{side['name']}: " + ", ".join(f"{met:.0%} at {rate:g}" for rate, met in curve_of(result, side["name"]))
            for side in result["sides"]
        ]
        return f"Share of requests that meet the targets, against requests per second. {'; '.join(told)}."
    told = [f"{row[0]} at {row[1]}/s: TTFT {row[4]} to {row[6]}, TPOT {row[7]} to {row[9]}" for row in _rows(result)]
    return f"Distributions of TTFT and TPOT in ms, from P50 to P99. {'; '.join(told)}."


def _facts(result: Result) -> Iterator[tuple[str, str]]:
    for side in result["sides"]:
        yield side["name"], f"{side['endpoint']}, model {side['model']}"
    for key in ("date", "commit"):
        if result.get(key):
            yield key, result[key]
    for key in ("machine", "versions"):
        if result.get(key):
            yield f"{key} of the client", ", ".join(f"{name} {value}" for name, value in result[key].items())
    for key, value in result["settings"].items():
        if value is not None:
            yield key, str(value)
