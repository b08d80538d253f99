"""Batch is one static batch that NVIDIA measured: its prompts read at once, then decode steps for all of them.

TensorRT-LLM 0.9 (2024) on A100, H100, H200 and L40S: one latency to the first token of all prompts, and the mean of the
decode steps over the whole output.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from placement.catalogs.base import Degrees
from placement.latency.base import LatencyModel, decode_s
from placement.latency.hardware import Hardware
from placement.latency.model_files import load_shape
from placement.latency.model_shape import ModelShape
from placement.latency.roofline import roofline_latency
from placement.named_files import CONFIGS

DATA = CONFIGS / "measured" / "trtllm-static.csv"
MODELS = {"LLaMA v2 7B": "llama-2-7b", "LLaMA v2 70B": "llama-2-70b", "Falcon 180B": "falcon-180b"}
HARDWARE = {"A100": "a100-80g-sxm", "H100": "h100-sxm", "H200": "h200-sxm", "L40S": "l40s"}  # by the first word
UNSHARED = "falcon-180b"  # 29 query heads of 64 a KV head: each reads its KV, by what its decode steps take
Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, Phase] = ("prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a worker's latency model is made of."""

    model: str  # of configs/models
    hardware: str  # of configs/hardware
    precision: str  # fp16, or fp8: of the weights, the arithmetic and the KV
    tp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    setting: Setting
    size: int
    input_len: int
    output_len: int
    measured_s: Mapping[Phase, float]

    @property
    def context_tokens(self) -> int:
        """That a decode step attends to, on average."""
        return round(self.size * (self.input_len + self.output_len / 2))


def read_batches() -> list[Batch]:
    with DATA.open(encoding="utf-8", newline="") as file:
        return [_batch(row) for row in csv.DictReader(file)]


def _batch(row: dict[str, str]) -> Batch:
    setting = Setting(
        model=MODELS[row["model"]],
        hardware=HARDWARE[row["gpu"][:4]],
        precision=row["precision"],
        tp=int(row["tensor_parallel"]),
    )
    return Batch(
        setting=setting,
        size=int(row["batch"]),
        input_len=int(row["input_len"]),
        output_len=int(row["output_len"]),
        measured_s={"prefill": float(row["prefill_ms"]) / 1e3, "decode": float(row["decode_step_ms"]) / 1e3},
    )


@cache
def shape_of(model: str, precision: str, phase: Phase) -> ModelShape:
    shape = load_shape(model).with_dtype("float16")
    if precision == "fp8":
        shape = replace(shape, weight_bits=8.0, quantisation="fp8", compute_dtype="float8", kv_dtype="float8")
    if model == UNSHARED and phase == "decode":
        shape = replace(shape, kv_heads=shape.heads)
    return shape


def predicted_s(batches: Sequence[Batch], hardware: Mapping[str, Hardware], phase: Phase) -> list[float]:
    """Of each batch, with these hardware files by name."""
    models: dict[Setting, LatencyModel] = {}
    for batch in batches:
        at = batch.setting
        if at not in models:
            shape = shape_of(at.model, at.precision, phase)
            models[at] = roofline_latency(shape, hardware[at.hardware], Degrees(at.tp))
    return [_step_s(models[batch.setting], batch, phase) for batch in batches]


def _step_s(latency: LatencyModel, batch: Batch, phase: Phase) -> float:
    if phase == "prefill":
        return latency.prefill_s([(batch.input_len, 0)] * batch.size)
    return decode_s(latency, batch.size, batch.context_tokens)
