"""How wrong the roofline is: against every latency of a GPU that somebody published and this project holds.

    python -m bench.roofline [--quick]

    H200    Llama-3.1-8B, sums over NVIDIA's published op tables; no launches, gaps or sampling in them
    A100    DistServe's coefficients of OPT-13B and OPT-66B (its own engine)
    A100    Splitwise's table of Llama2-70B and BLOOM-176B (vLLM of 2023)
    H100    the same

Each row is one step: predicted / published - 1. Twice: with the hardware file as it stands, which was fitted to another
engine (bench/static_batches), and with what this one spends on launching kernels (`layer_s`, `hop_s`: two figures for
each table) in place of the file's. The second says how good the formulas are, the first what a plan for an engine that
nobody measured is worth. No time is measured here: a result is the same on every machine.
Writes bench/results/roofline.json.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any, Literal

import numpy as np

from bench.common import about, save
from bench.static_batches.fitting import with_figures
from placement.catalogs.base import Degrees
from placement.latency.base import decode_s
from placement.latency.hardware import Hardware, load_hardware
from placement.latency.model_files import load_shape
from placement.latency.model_shape import ModelShape
from placement.latency.roofline import roofline_latency
from placement.papers.distserve.coefficients import distserve_degrees, distserve_latency
from placement.papers.splitwise.table import TABLE

QUANTILE = 0.9
LONGEST_PROMPT = 8192
TABLE_TOKENS = 128  # generated in the rows of Splitwise's table that are looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One step: of a prompt of `tokens` for each of `batch`, or of a decode batch that attends to `tokens` in all."""

    model: str
    tp: int
    kind: Literal["prefill", "decode"]
    batch: int
    tokens: int
    published_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """`layer_s`, `hop_s`: what the engine that was measured spends on launches; None: as the hardware file.
    `is_kernels`: sums over kernels, with nothing around them."""

    name: str
    hardware: str
    layer_s: float | None = None
    hop_s: float | None = None
    is_kernels: bool = False

    def rows(self) -> list[Row]:
        readers = {"H200": op_tables, "DistServe": distserve}
        read = next((reader for name, reader in readers.items() if name in self.name), None)
        return list(read() if read else splitwise(f"{self.hardware[:4]}-80gb"))


SOURCES = (
    Source(name="NVIDIA's op tables on H200", hardware="h200-sxm", layer_s=0.0, is_kernels=True),
    Source(name="DistServe on A100", hardware="a100-80g-sxm", layer_s=0.0001, hop_s=2e-6),
    Source(name="Splitwise on A100", hardware="a100-80g-sxm", layer_s=0.00014, hop_s=8e-6),
    Source(name="Splitwise on H100", hardware="h100-sxm", layer_s=0.00012, hop_s=6e-6),
)


def op_tables() -> Iterator[Row]:
    for batch, context, ms in ((1, 1024, 4.5), (32, 1024, 6.0), (128, 1024, 9.4), (32, 4096, 8.8), (128, 4096, 20.4)):
        yield _row("llama-3.1-8b", 1, "decode", batch, batch * context, ms / 1e3)
    for prompt, per_s in ((2048, 49_000), (8192, 43_600)):
        yield _row("llama-3.1-8b", 1, "prefill", 1, prompt, prompt / per_s)


def distserve() -> Iterator[Row]:
    for model in ("opt-13b", "opt-66b"):
        for tp in sorted({tp for tp, _ in distserve_degrees(model)}):
            fitted = distserve_latency(model, tp)
            for prompt in (128, 512, 1024, 2048):
                yield _row(model, tp, "prefill", 1, prompt, fitted.prefill_s([(prompt, 0)]))
            for batch in (1, 8, 32, 64, 128):
                for context in (256, 1024):
                    tokens = batch * context
                    yield _row(model, tp, "decode", batch, tokens, decode_s(fitted, batch, tokens))


def splitwise(hardware: str) -> Iterator[Row]:
    """Medians of the rows with 128 tokens of output, whose decode attends to 64 of them on average."""
    for (name, tp, prompt, batch), times in _table(hardware).items():
        model = name.replace("llama2", "llama-2")
        prompt_s, token_s = (median(values) for values in zip(*times, strict=True))
        if name == "llama2-70b" and tp == 2 and batch == 64:
            continue  # it ran out of memory: its prompt takes a sixth of that of batch 32
        if batch * prompt <= LONGEST_PROMPT:
            yield _row(model, tp, "prefill", batch, prompt, prompt_s)
        yield _row(model, tp, "decode", batch, batch * (prompt + TABLE_TOKENS // 2), token_s)


def _table(hardware: str) -> dict[tuple[str, int, int, int], list[tuple[float, float]]]:
    """(prompt s, token s) by model, degree, prompt and batch."""
    rows: dict[tuple[str, int, int, int], list[tuple[float, float]]] = {}
    with open(str(TABLE), encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["hardware"] == hardware and int(row["token_size"]) == TABLE_TOKENS:
                key = (row["model"], int(row["tensor_parallel"]), int(row["prompt_size"]), int(row["batch_size"]))
                rows.setdefault(key, []).append((float(row["prompt_time"]) / 1e3, float(row["token_time"]) / 1e3))
    return rows


def _row(model: str, tp: int, kind: Literal["prefill", "decode"], batch: int, tokens: int, seconds: float) -> Row:
    return Row(model=model, tp=tp, kind=kind, batch=batch, tokens=tokens, published_s=seconds)


@cache
def shape(model: str) -> ModelShape:
    return load_shape(model)


def predicted_s(row: Row, hardware: Hardware) -> float:
    latency = roofline_latency(shape(row.model), hardware, Degrees(row.tp))
    if row.kind == "prefill":
        return latency.prefill_s([(row.tokens, 0)] * row.batch)
    return decode_s(latency, row.batch, row.tokens)


def errors(source: Source, *, with_engine: bool) -> list[tuple[Row, float]]:
    """predicted / published - 1 of each row."""
    hardware = load_hardware(source.hardware)
    if with_engine:
        hardware = engine_of(source, hardware)
    return [(row, predicted_s(row, hardware) / row.published_s - 1) for row in source.rows()]


def engine_of(source: Source, hardware: Hardware) -> Hardware:
    """The hardware with the launches of the engine that was measured."""
    given = {"overhead.layer_s": source.layer_s, "overhead.hop_s": source.hop_s}
    if source.is_kernels:
        given |= dict.fromkeys(("overhead.step_s", "overhead.prefill_step_s", "overhead.request_s"), 0.0)
    return with_figures(hardware, {path: value for path, value in given.items() if value is not None})


def within(values: list[float]) -> float:
    """The share of a time within which nine of ten lie."""
    return float(np.quantile(np.abs(values), QUANTILE))


def summary(source: Source) -> dict[str, Any]:
    found: dict[str, Any] = {"source": source.name, "hardware": source.hardware, "rows": len(source.rows())}
    for key, with_engine in (("as_in_file", False), ("with_its_engine", True)):
        pairs = errors(source, with_engine=with_engine)
        found[key] = {"mean": round(float(np.mean([error for _, error in pairs])), 3)}
        for kind in ("prefill", "decode"):
            found[key][kind] = round(within([error for row, error in pairs if row.kind == kind]), 3)
        found[key]["all"] = round(within([error for _, error in pairs]), 3)
    found["engine_ms_a_layer"] = None if source.layer_s is None else source.layer_s * 1e3
    found["engine_us_a_hop"] = None if source.hop_s is None else source.hop_s * 1e6
    return found


def figures(source: Source) -> list[dict[str, Any]]:
    """Some rows, to look at: batch 1 and the largest batch of each model and degree."""
    pairs = zip(errors(source, with_engine=False), errors(source, with_engine=True), strict=True)
    return [
        {
            "source": source.name,
            "model": row.model,
            "tp": row.tp,
            "kind": row.kind,
            "batch": row.batch,
            "tokens": row.tokens,
            "published_ms": round(row.published_s * 1e3, 2),
            "as_in_file_ms": round(row.published_s * (1 + plain) * 1e3, 2),
            "with_its_engine_ms": round(row.published_s * (1 + engine) * 1e3, 2),
        }
        for (row, plain), (_, engine) in pairs
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.roofline", description="How wrong the roofline is.")
    parser.add_argument("--quick", action="store_true", help="the same: it takes a second")
    parser.parse_args()
    result = about()
    result["sources"] = [summary(source) for source in SOURCES]
    result["steps"] = [figure for source in SOURCES for figure in figures(source)]
    for row in result["sources"]:
        plain, engine = row["as_in_file"], row["with_its_engine"]
        print(
            f"  {row['source']:28} {row['rows']:3} steps: {plain['mean']:+.0%}, 9 of 10 within {plain['all']:.0%}; "
            f"with its engine's launches {engine['mean']:+.0%}, {engine['all']:.0%}"
        )
    print(f"saved to {save('roofline', result)}")


if __name__ == "__main__":
    main()
