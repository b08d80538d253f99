"""How wrong is a plan about a server in a closed loop: 520 runs of served Llama 3 that NVIDIA published, simulated.

    python -m bench.closed_loops [--quick]

Each run is played on the colocated simulator at the same number of clients, lengths, GPUs and precision
(bench/closed_loops/server.py), with times from the model's config and the hardware file, three times over:

    as in the file    nothing is fitted
    with a server     and what a server spends: a step, a token, a request (three figures)
    with both         and factors of what the latency model says of prompts and of reading KV (two more)

The figures are fitted to runs of the 8B model on H100 (bench/closed_loops/fitted.py), and kept for all others: other
model, other GPU. Runs whose clients memory does not hold at once are shown apart: their TTFT is a queue's, and depends
on how long they were measured, which is not published. --quick: every fourth run, and fewer steps of the fit. No time
is measured here: a result is the same on every machine. Writes bench/results/closed_loops.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from bench.closed_loops.fitted import SCALES, SERVER, fitted
from bench.closed_loops.measured import BANDS, WANTED, Case, Measured, band_of, read_measured
from bench.closed_loops.server import NONE, Overheads, holds, simulated
from bench.common import about, save
from bench.roofline import within

FITTED = ("llama-3.1-8b", "h100-sxm")
UNITS = {"ttft_mean": 1e3, "itl_mean": 1e3, "throughput": 1.0}  # of what is drawn
DOTS = ["hardware", "fitted", *(f"{name} {of}" for name in UNITS for of in ("measured", "predicted"))]
FITTED_CLIENTS = (1, 10, 50, 150)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A measured run, and what was predicted of it."""

    run: Measured
    predicted: Mapping[str, float]

    def error(self, name: str) -> float:
        return self.predicted[name] / self.run.values[name] - 1


@cache
def predicted(case: Case, overheads: Overheads) -> dict[str, float]:
    return simulated(case, overheads)


def is_fitted(case: Case) -> bool:
    return (case.model, case.hardware) == FITTED


def pairs_of(runs: Sequence[Measured], overheads: Overheads) -> list[Pair]:
    return [Pair(run=run, predicted=predicted(run.case, overheads)) for run in runs]


def summary(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Of each figure: the median error, where nine of ten lie, and the share within what is wanted."""
    found: dict[str, Any] = {"runs": len(pairs)}
    for name, limit in WANTED.items():
        errors = np.array([pair.error(name) for pair in pairs])
        found[name] = {
            "median": round(float(np.median(errors)), 3),
            "nine_of_ten": round(within(errors.tolist()), 3),
            "within": round(float((np.abs(errors) <= limit).mean()), 3),
        }
    return found


def parts(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Fitted, left out, and those whose clients memory does not hold."""
    held = [pair for pair in pairs if holds(pair.run.case)]
    return {
        "fitted": summary([pair for pair in held if is_fitted(pair.run.case)]),
        "left out": summary([pair for pair in held if not is_fitted(pair.run.case)]),
        "more clients than memory holds": summary([pair for pair in pairs if not holds(pair.run.case)]),
    }


def disagreement(pairs: Sequence[Pair]) -> dict[str, Any]:
    """By what nine of ten runs differ from what runs that are alike have in common, whatever is predicted of those:
    no better model of prompts, of TP or of a server would bring errors below it. `repeated`: the same run twice, as
    measured. Then errors of runs that differ by the length of their answers, less their mean, fitted and left out."""
    held = [pair for pair in pairs if holds(pair.run.case)]
    return {
        "repeated": _apart(_groups(held, lambda case: case), lambda pair, name: pair.run.values[name]),
        **{
            part: _apart(
                _groups([pair for pair in held if is_fitted(pair.run.case) == fits], _but_answers),
                lambda pair, name: pair.predicted[name] / pair.run.values[name],
            )
            for part, fits in (("fitted", True), ("left out", False))
        },
    }


def _but_answers(case: Case) -> Case:
    return replace(case, output_len=0)


def _groups(pairs: Sequence[Pair], alike: Callable[[Case], Case]) -> list[list[Pair]]:
    groups: dict[Case, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(alike(pair.run.case), []).append(pair)
    return [group for group in groups.values() if len(group) > 1]


def _apart(groups: Sequence[Sequence[Pair]], value: Callable[[Pair, str], float]) -> dict[str, Any]:
    """Of logarithms, as a share; a group's mean is its own, so that n runs count as n - 1."""
    found: dict[str, Any] = {"runs": sum(len(group) for group in groups)}
    for name in WANTED:
        apart: list[float] = []
        for group in groups:
            logs = np.log([value(pair, name) for pair in group])
            apart += ((logs - logs.mean()) * (len(group) / (len(group) - 1)) ** 0.5).tolist()
        found[name] = round(within(apart), 3) if apart else None
    return found


def by_setting(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """A row for each GPU, model, precision, TP and band of clients."""
    rows = []
    for setting in dict.fromkeys(pair.run.case.setting for pair in pairs):
        own = [pair for pair in pairs if pair.run.case.setting == setting]
        for band in [*(band_of(first) for first, _ in BANDS), "over"]:
            of = [pair for pair in own if (pair.run.case.band if holds(pair.run.case) else "over") == band]
            model, hardware, precision, tp = setting
            about_it = {"model": model, "hardware": hardware, "precision": precision, "tp": tp, "clients": band}
            rows += [about_it | summary(of)] if of else []
    return rows


def residuals(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """What is measured and not predicted, ms, by clients, with prompts of 200 tokens: medians over settings."""
    short = [pair for pair in pairs if pair.run.case.input_len == 200 and holds(pair.run.case)]
    rows = []
    for clients in sorted({pair.run.case.concurrency for pair in short}):
        of = [pair for pair in short if pair.run.case.concurrency == clients]
        row: dict[str, Any] = {"clients": clients, "runs": len(of)}
        for name in ("ttft_mean", "itl_mean"):
            row[f"{name}_ms"] = round(
                1e3 * float(np.median([pair.run.values[name] - pair.predicted[name] for pair in of])), 2
            )
        rows.append(row)
    return rows


def dots(pairs: Sequence[Pair]) -> list[str]:
    """A line for each run, for the picture: DOTS, times in ms."""
    lines = []
    for pair in pairs:
        case, figures = pair.run.case, []
        for name, unit in UNITS.items():
            figures += [f"{values[name] * unit:.4g}" for values in (pair.run.values, pair.predicted)]
        lines.append(",".join([case.hardware, "fitted" if is_fitted(case) else "", *figures]))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.closed_loops", description="How wrong closed loops are.")
    parser.add_argument("--quick", action="store_true", help="every fourth run, and fewer steps of the fit")
    quick = parser.parse_args().quick
    runs = read_measured()[:: 4 if quick else 1]
    sample = [run for run in runs if is_fitted(run.case) and run.case.concurrency in FITTED_CLIENTS and holds(run.case)]
    steps = 1 if quick else 3
    ways = {"as in the file": NONE}
    for name, keys in (("with a server", SERVER), ("with both", tuple(SCALES))):
        ways[name] = fitted(sample, keys, steps=steps)
        print(f"  {name}: {ways[name]}", flush=True)
    result: dict[str, Any] = about() | {"wanted": WANTED, "fitted_to": len(sample), "columns": DOTS, "ways": {}}
    for name, overheads in ways.items():
        pairs = pairs_of(runs, overheads)
        result["ways"][name] = {"overheads": asdict(overheads), "parts": parts(pairs), "residuals": residuals(pairs)}
        show(name, result["ways"][name]["parts"])
        if name != "with a server":
            result["ways"][name] |= {"by_setting": by_setting(pairs), "runs": dots(pairs)}
    result["disagreement"] = disagreement(pairs_of(runs, ways["with both"]))
    show_disagreement(result["disagreement"])
    print(f"saved to {save('closed_loops', result)}")


def show(name: str, of: Mapping[str, Any]) -> None:
    for part, found in of.items():
        figures = ", ".join(f"{key} {found[key]['median']:+.0%} ({found[key]['nine_of_ten']:.0%})" for key in WANTED)
        print(f"  {name}, {part}, {found['runs']} runs: {figures}", flush=True)


def show_disagreement(of: Mapping[str, Any]) -> None:
    for part, found in of.items():
        figures = ", ".join(f"{key} {found[key]:.1%}" for key in WANTED if found[key] is not None)
        print(f"  nine of ten runs differ from those like them, {part}, {found['runs']} runs: {figures}", flush=True)


if __name__ == "__main__":
    main()
