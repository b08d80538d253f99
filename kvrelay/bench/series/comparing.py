"""What a series of turns says, as one JSON-able object: figures of each turn, ratios of two servers, knees.

    {"schema": "kvrelay-series/1", ...about, "settings", "slos_ms", "wanted_attainment",
     "sides": [{name, endpoint, model}],
     "turns": [{side, rate, round, ...summarise(), "samples": {"ttft_ms", "tpot_ms", "e2el_ms"}}],
     "compared": [{rate, "figures": {name: {a, b, ratio, least, most, better}}}],
     "knees": {side: {rate, low, high, where}}}

Ratios are the second server's figure over the first's in the same round: the median, and the least and most of all
rounds. It computes and shows nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from kvrelay.bench.metrics import Outcome, percentile, summarise, values_s
from kvrelay.bench.openai import OpenAITarget
from kvrelay.bench.series.knee import knee
from kvrelay.bench.series.turns import Played, Series

SCHEMA = "kvrelay-series/1"
METRICS = ("ttft", "tpot", "e2el")
PERCENTILES = (50.0, 90.0)
Row = Mapping[str, Any]


def series_object(
    series: Series, played: Played, settings: Mapping[str, Any], about: Mapping[str, Any]
) -> dict[str, Any]:
    turns = list(_turns(series, played))
    rates = sorted({turn["rate"] for turn in turns})
    result: dict[str, Any] = {
        "schema": SCHEMA,
        **about,
        "settings": dict(settings),
        "slos_ms": {name: 1e3 * limit_s for name, limit_s in series.slos_s.items()},
        "wanted_attainment": series.wanted,
        "sides": [_side(name, target, played) for name, target in series.targets.items()],
        "turns": turns,
    }
    if len(series.targets) == 2:
        result["compared"] = [{"rate": rate, "figures": _compared(turns, rate, list(series.targets))} for rate in rates]
    if len(rates) > 1:
        rng = np.random.default_rng(0)
        curves = {name: played.curve(name, series.slos_s) for name in series.targets}
        result["knees"] = {name: asdict(knee(curve, series.wanted, rng)) for name, curve in curves.items()}
    return result


def _side(name: str, target: str | OpenAITarget, played: Played) -> dict[str, str]:
    endpoint = target if isinstance(target, str) else target.base_url
    return {"name": name, "endpoint": endpoint, "model": played.models[name].name}


def _turns(series: Series, played: Played) -> Iterator[dict[str, Any]]:
    for turn in played.turns:
        summary = summarise(turn.outcomes, turn.duration_s, series.slos_s, METRICS, PERCENTILES)
        yield {
            "side": turn.side,
            "rate": turn.rate,
            "round": turn.round,
            **summary,
            "samples": samples([outcome for outcome in turn.outcomes if outcome.succeeded]),
        }


def samples(good: Sequence[Outcome]) -> dict[str, list[float]]:
    """Of each request that succeeded, in ms, sorted: what a distribution is drawn from."""
    return {f"{name}_ms": sorted(round(1e3 * value, 3) for value in values_s(name, good)) for name in METRICS}


def _compared(turns: Sequence[Row], rate: float, names: Sequence[str]) -> dict[str, Any]:
    by_side = [{t["round"]: figures(t) for t in turns if (t["side"], t["rate"]) == (name, rate)} for name in names]
    rounds = sorted(set(by_side[0]) & set(by_side[1]))
    found: dict[str, Any] = {}
    for name in by_side[0][rounds[0]] if rounds else ():
        pairs = [(by_side[0][each].get(name), by_side[1][each].get(name)) for each in rounds]
        whole = [(a, b) for a, b in pairs if a and b is not None]
        if whole:
            found[name] = _ratio(whole, higher_is_better="latency" not in name and not name.endswith("ms"))
    return found


def _ratio(pairs: Sequence[tuple[float, float]], *, higher_is_better: bool) -> dict[str, Any]:
    ratios = [b / a for a, b in pairs]
    return {
        "a": statistics.median(a for a, _ in pairs),
        "b": statistics.median(b for _, b in pairs),
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "better": "higher" if higher_is_better else "lower",
    }


def figures(turn: Row) -> dict[str, float | None]:
    """What is compared of a turn."""
    told = {
        f"{metric.upper()} P{p:g} ms": turn["latency_ms"].get(metric, {}).get(f"p{p:g}")
        for metric in METRICS
        for p in PERCENTILES
    }
    rates = {"requests/s": turn["request_throughput"], "output tokens/s": turn["output_throughput"]}
    return told | rates | ({"attainment": turn["attainment"]} if "attainment" in turn else {})


def pooled(turns: Sequence[Row], metric: str) -> list[float]:
    """Of several turns, sorted."""
    return sorted(value for turn in turns for value in turn["samples"].get(f"{metric}_ms", ()))


def percentile_of(turns: Sequence[Row], metric: str, p: float) -> float:
    """Not a number where none succeeded."""
    return percentile(pooled(turns, metric), p)


def uneven_cache(result: Row) -> str:
    """Why a comparison may be of a cache: one server knew prompts that the other had to read."""
    shares = {
        side["name"]: sum(t["cached_input_tokens"] for t in result["turns"] if t["side"] == side["name"])
        / max(1, sum(t["total_input_tokens"] for t in result["turns"] if t["side"] == side["name"]))
        for side in result["sides"]
    }
    if len(shares) < 2 or max(shares.values()) - min(shares.values()) < 0.01:
        return ""
    told = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    return (
        f"of the prompts' tokens these were cached: {told}; if both are doors of one cluster, give --distinct-prompts"
    )
