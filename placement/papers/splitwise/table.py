"""Splitwise's measured table (Llama2-70B, BLOOM-176B on A100 and H100 machines), as SplitwiseLatency: its medians stand
over x = prompt size * batch. TP 8 unless said otherwise.
"""

from __future__ import annotations

import csv
import io
from functools import cache
from pathlib import Path
from statistics import median

from placement.latency.base import LatencyError
from placement.papers.splitwise.latency import Curve, DecodeRule, SplitwiseLatency

TABLE = Path(__file__).parent / "data" / "splitwise-perf-model.csv"  # beside the sources, also in compiled processes


Point = tuple[int, float, float]  # tokens, prompt s, token s


@cache
def _table() -> dict[tuple[str, str, int], list[Point]]:
    """Medians over prompt size * batch for each (model, hardware, tp)."""
    text = TABLE.read_text(encoding="utf-8")
    rows: dict[tuple[str, str, int], dict[int, list[tuple[float, float]]]] = {}
    for row in csv.DictReader(io.StringIO(text)):
        key = (row["model"], row["hardware"], int(row["tensor_parallel"]))
        tokens = int(row["prompt_size"]) * int(row["batch_size"])
        times = (float(row["prompt_time"]) / 1e3, float(row["token_time"]) / 1e3)
        rows.setdefault(key, {}).setdefault(tokens, []).append(times)
    return {
        key: [(x, median(p for p, _ in times), median(t for _, t in times)) for x, times in sorted(by_tokens.items())]
        for key, by_tokens in rows.items()
    }


def splitwise_latency(model: str, hardware: str, tp: int = 8, *, rule: DecodeRule = "table") -> SplitwiseLatency:
    """`hardware`: a100-80gb, h100-80gb or h100-80gb-pcap. Raises LatencyError where the table has no rows."""
    table = _table()
    points = table.get((model, hardware, tp))
    if points is None:
        known = ", ".join(f"{m} on {h} at TP {t}" for m, h, t in sorted(table))
        raise LatencyError(f"Splitwise's table has no rows of {model} on {hardware} at TP {tp}; it has {known}")
    return SplitwiseLatency(
        model=model,
        hardware=hardware,
        tp=tp,
        rule=rule,
        prompt_s=Curve([(x, prompt) for x, prompt, _ in points]),
        token_s=Curve([(x, token) for x, _, token in points]),
    )
