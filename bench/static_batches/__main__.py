"""How wrong the roofline is about static batches: 900 that NVIDIA measured, fitted, and foretold without being fitted.

    python -m bench.static_batches [--quick]

The figures of the hardware files (what share of a GPU's ceilings an engine gets, what a step, a layer, an all-reduce, a
request cost besides: bench/static_batches/fitting.py) are fitted to all batches of Llama 2 7B and 70B, prefill and
decode together. Then again, each time without some, which are foretold:

    a model on a GPU    one of both models on one of four GPUs
    a model             on all GPUs
    a TP degree, a GPU  on the same terms
    another design      Falcon 180B, which is in no fit

Where the files have an older value than the fit of all finds, it says so: what it prints is what belongs there.
--quick: every sixth batch. No time is measured here: a result is the same on every machine.
Writes bench/results/static_batches.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from bench.common import about, save
from bench.roofline import within
from bench.static_batches.fitting import ENGINE, GPU, figure_at, fitted
from placement.latency.hardware import Hardware, load_hardware
from placement.latency.measured import HARDWARE, PHASES, UNSHARED, Batch, predicted_s, read_batches

WANTED = {"decode": 0.12, "prefill": 0.15}
LEFT_OUT: dict[str, Callable[[Batch], tuple[Any, ...]]] = {
    "a model on a GPU": lambda batch: (batch.setting.model, batch.setting.hardware),
    "a model": lambda batch: (batch.setting.model,),
    "a TP degree": lambda batch: (batch.setting.tp,),
    "a GPU": lambda batch: (batch.setting.hardware,),
}
DOTS = ["hardware", "precision", *(f"{phase} {of}" for phase in PHASES for of in ("measured", "predicted"))]


def errors_of(batches: Sequence[Batch], files: Mapping[str, Hardware]) -> list[dict[str, float]]:
    found: list[dict[str, float]] = [{} for _ in batches]
    for phase in PHASES:
        for error, batch, time_s in zip(found, batches, predicted_s(batches, files, phase), strict=True):
            error[phase] = time_s / batch.measured_s[phase] - 1
    return found


def foretold(
    batches: Sequence[Batch], files: Mapping[str, Hardware], part_of: Callable[[Batch], tuple[Any, ...]]
) -> list[dict[str, float]]:
    """Each batch's errors by a fit to those of other parts."""
    parts = [part_of(batch) for batch in batches]
    errors: list[dict[str, float]] = [{} for _ in batches]
    for left_out in dict.fromkeys(parts):
        fit = fitted([batch for batch, part in zip(batches, parts, strict=True) if part != left_out], files)
        inside = [index for index, part in enumerate(parts) if part == left_out]
        for index, error in zip(inside, errors_of([batches[index] for index in inside], fit), strict=True):
            errors[index] = error
        print(f"  without {' '.join(map(str, left_out))}: {_words(_summary([errors[index] for index in inside]))}")
    return errors


def _summary(errors: Iterable[Mapping[str, float]]) -> dict[str, Any]:
    """Of each phase the median error, and where nine of ten lie."""
    rows = list(errors)
    found: dict[str, Any] = {"batches": len(rows)}
    for phase in PHASES:
        values = [row[phase] for row in rows]
        found[phase] = {"median": round(float(np.median(values)), 3), "nine_of_ten": round(within(values), 3)}
    return found


def _words(summary: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{p} {summary[p]['median']:+.0%} (9 of 10 within {summary[p]['nine_of_ten']:.0%})" for p in PHASES
    )


def rows_of(batches: Sequence[Batch], ways: Mapping[str, Sequence[Mapping[str, float]]]) -> list[dict[str, Any]]:
    """A row for each GPU, model, precision and TP."""
    rows = []
    for setting in sorted(
        {batch.setting for batch in batches}, key=lambda at: (at.hardware, at.model, at.precision, at.tp)
    ):
        inside = [index for index, batch in enumerate(batches) if batch.setting == setting]
        found = {way: _summary([errors[index] for index in inside]) for way, errors in ways.items()}
        rows.append(asdict(setting) | {"batches": len(inside)} | found)
    return rows


def by_gpu(batches: Sequence[Batch], errors: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    names = dict.fromkeys(batch.setting.hardware for batch in batches)
    return {
        name: _summary([error for error, batch in zip(errors, batches, strict=True) if batch.setting.hardware == name])
        for name in names
    }


def errors_for_files(batches: Sequence[Batch], ways: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """What each hardware file says of its error: both phases' together, by ways as named there."""
    kinds = {"fitted": ("fitted", (1, 2, 4, 8)), "one_gpu": ("a model", (1,)), "value": ("a model", (2, 4, 8))}
    found: dict[str, Any] = {}
    for name in dict.fromkeys(batch.setting.hardware for batch in batches):
        own = [(index, batch.setting.tp) for index, batch in enumerate(batches) if batch.setting.hardware == name]
        found[name] = {}
        for key, (way, degrees) in kinds.items():
            values = [ways[way][index][phase] for index, tp in own if tp in degrees for phase in PHASES]
            found[name][key] = round(within(values), 2)
    return found


def dots(batches: Sequence[Batch], errors: Sequence[Mapping[str, float]]) -> list[str]:
    """A line for each batch, for the picture: DOTS, times in ms."""
    lines = []
    for batch, error in zip(batches, errors, strict=True):
        times = []
        for phase in PHASES:
            measured_ms = batch.measured_s[phase] * 1e3
            times += [f"{measured_ms:.4g}", f"{measured_ms * (1 + error[phase]):.4g}"]
        lines.append(",".join([batch.setting.hardware, batch.setting.precision, *times]))
    return lines


def figures_of(files: Mapping[str, Hardware]) -> dict[str, dict[str, float]]:
    """Of each file what was fitted; of float8 where the hardware has it."""
    return {
        name: {
            path: figure_of(file, path)
            for path in (*ENGINE, *GPU)
            if "float8" in file.flops or not path.endswith("float8")
        }
        for name, file in files.items()
    }


def figure_of(hardware: Hardware, path: str) -> float:
    return float(f"{figure_at(hardware, path).value:.3g}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.static_batches", description="How wrong the roofline is.")
    parser.add_argument("--quick", action="store_true", help="every sixth batch")
    every = read_batches()[:: 6 if parser.parse_args().quick else 1]
    batches = [batch for batch in every if batch.setting.model != UNSHARED]
    others = [batch for batch in every if batch.setting.model == UNSHARED]
    files = {name: load_hardware(name) for name in HARDWARE.values()}
    found = fitted(batches, files)
    figures = figures_of(found)
    for name, at in figures.items():
        stale = {path: value for path, value in at.items() if value != figure_of(files[name], path)}
        print(f"  {name}: " + (f"its file differs from {stale}" if stale else "as in its file"))
    ways = {"fitted": errors_of(batches, found)}
    ways |= {name: foretold(batches, files, part_of) for name, part_of in LEFT_OUT.items()}
    result: dict[str, Any] = about() | {"wanted": WANTED, "figures": figures, "columns": DOTS}
    result["ways"] = {name: _summary(errors) | {"by_gpu": by_gpu(batches, errors)} for name, errors in ways.items()}
    falcon = errors_of(others, found)
    result["ways"]["another design"] = _summary(falcon) | {"by_gpu": by_gpu(others, falcon)}
    for name, row in result["ways"].items():
        print(f"  {name}: {row['batches']} batches, {_words(row)}")
    result["errors"] = errors_for_files(batches, ways)
    shown = {name: ways[name] for name in ("fitted", "a model on a GPU", "a model")}
    result["rows"] = rows_of(batches, shown) + rows_of(others, {"another design": falcon})
    result["batches"] = dots(batches, ways["a model on a GPU"])
    print(f"saved to {save('static_batches', result)}")


if __name__ == "__main__":
    main()
