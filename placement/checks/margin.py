"""Margin is how wrong predictions were where they were checked against a live cluster; the next plan goes by it.

`kvrelay verify` adds a run to its file each time; `kvrelay plan --margin FILE` takes `error` as the error of every
predicted time, where the latency model's own is smaller. Runs past the knee are kept, but do not count: there a small
error of the rate is a large one of every time, and no plan is made there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from placement.catalogs.base import PlanError
from placement.whole_file import write_whole

FORMAT = "kvrelay-margin"
VERSION = 1
KEPT_RUNS = 32
NINE_IN_TEN = 0.9
MEND = "make one with kvrelay verify"


@dataclass(frozen=True, slots=True, kw_only=True)
class MarginRun:
    """One verification. `ttft`, `tpot`: the measured P90 against the predicted, as a share (0.1: a tenth longer);
    `attainment`: measured less predicted. `counts`: it was not past the knee."""

    date: str
    source: str  # what predicted: a plan's or a profile's name
    rate: float
    num_requests: int
    ttft: float
    tpot: float
    attainment: float
    counts: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    runs: tuple[MarginRun, ...] = ()

    @property
    def ttft(self) -> float:
        """Nine runs in ten were wrong by no more, either way."""
        return _nine_in_ten([abs(run.ttft) for run in self._counted])

    @property
    def tpot(self) -> float:
        return _nine_in_ten([abs(run.tpot) for run in self._counted])

    @property
    def attainment(self) -> float:
        return _nine_in_ten([abs(run.attainment) for run in self._counted])

    @property
    def error(self) -> float:
        """Of a time, either one's: what widens the next plan's intervals."""
        return max(self.ttft, self.tpot)

    @property
    def _counted(self) -> list[MarginRun]:
        return [run for run in self.runs if run.counts]

    def with_run(self, run: MarginRun) -> Margin:
        return Margin(runs=(*self.runs, run)[-KEPT_RUNS:])


def _nine_in_ten(values: list[float]) -> float:
    return sorted(values)[math.ceil(NINE_IN_TEN * len(values)) - 1] if values else 0.0


def load_margin(path: Path) -> Margin:
    """Raises PlanError naming the file, the key and the mend."""
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"margin {path} cannot be read: {error.strerror}; {MEND}") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise PlanError(f"margin {path} is not JSON; {MEND}") from None
    if not isinstance(data, Mapping) or data.get("format") != FORMAT or data.get("version") != VERSION:
        raise PlanError(f"margin {path} is no {FORMAT} of version {VERSION}; {MEND}")
    runs = data.get("runs")
    if not isinstance(runs, list):
        raise PlanError(f"margin {path}: runs is {runs!r}; give a list, or {MEND}")
    return Margin(runs=tuple(_run(row, f"margin {path}: runs[{i}]") for i, row in enumerate(runs)))


def save_margin(margin: Margin, path: Path) -> None:
    """With the sums that a person wants to see; they are computed again when it is read. Raises OSError, and leaves the
    file as it was."""
    values = {"error": margin.error, "ttft": margin.ttft, "tpot": margin.tpot, "attainment": margin.attainment}
    data = {"format": FORMAT, "version": VERSION, **values, "runs": [asdict(run) for run in margin.runs]}
    write_whole(path, json.dumps(data, indent=1) + "\n")


def _run(row: Any, where: str) -> MarginRun:
    if not isinstance(row, Mapping):
        raise PlanError(f"{where} is {row!r}; give an object, or {MEND}")
    values: dict[str, Any] = {}
    for key, kind in (("rate", float), ("num_requests", int), ("ttft", float), ("tpot", float), ("attainment", float)):
        value = row.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise PlanError(f"{where}.{key} is {value!r}; give a number, or {MEND}")
        values[key] = kind(value)
    return MarginRun(
        date=str(row.get("date", "")), source=str(row.get("source", "")), counts=bool(row.get("counts", True)), **values
    )
