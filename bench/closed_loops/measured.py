"""Measured is one run of a served model that NVIDIA published: so many clients in a closed loop, and what they got.

NIM over TensorRT-LLM (2024), all requests of a run of the same lengths, prefill and decode in the same batches. A run's
times are means and P95s: of its requests' TTFT, and of all gaps between two tokens of its requests.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass

from bench.common import REPO

DATA = REPO / "tests" / "placement" / "data" / "gpu-measured" / "nim-served.csv"
WANTED = {"ttft_mean": 0.15, "itl_mean": 0.15, "throughput": 0.15, "ttft_p95": 0.25, "itl_p95": 0.25}
BANDS = ((1, 1), (2, 10), (25, 50), (100, 250))  # of clients, first and last


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What was run. Llama 3 has the shape of Llama 3.1."""

    model: str  # of configs/models
    hardware: str  # of configs/hardware
    tp: int
    precision: str  # fp16, or fp8: of the weights, the arithmetic and the KV
    concurrency: int
    input_len: int
    output_len: int

    @property
    def setting(self) -> tuple[str, str, str, int]:
        return self.model, self.hardware, self.precision, self.tp

    @property
    def kv_tokens(self) -> int:
        """That all clients' requests together end with."""
        return self.concurrency * (self.input_len + self.output_len)

    @property
    def band(self) -> str:
        return band_of(self.concurrency)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """`values` by the names in WANTED: seconds, and output tokens a second."""

    case: Case
    values: dict[str, float]


def read_measured() -> list[Measured]:
    with DATA.open(encoding="utf-8", newline="") as file:
        return [_measured(row) for row in csv.DictReader(file)]


def _measured(row: dict[str, str]) -> Measured:
    case = Case(
        model="llama-3.1-70b" if "70b" in row["model"] else "llama-3.1-8b",
        hardware="a100-80g-sxm" if row["gpu"].startswith("A100") else "h100-sxm",
        tp=int(row["gpus"]),
        precision=row["precision"],
        concurrency=int(row["concurrency"]),
        input_len=int(row["input_len"]),
        output_len=int(row["output_len"]),
    )
    times = {key: float(row[f"{key}_ms"]) / 1e3 for key in ("ttft_mean", "ttft_p95", "itl_mean", "itl_p95")}
    return Measured(case=case, values=times | {"throughput": float(row["output_tokens_per_s"])})


def band_of(clients: int) -> str:
    first, last = next(band for band in BANDS if clients <= band[1])
    return str(first) if first == last else f"{first} to {last}"
