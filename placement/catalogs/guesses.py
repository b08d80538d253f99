"""Guesses says who guesses tokens ahead for a worker, and what that takes of its memory and time.

A draft model is loaded beside the other, whole and on one GPU of the worker, with as many pages; Medusa's heads take
memory and no page; prompt lookup takes neither (engine/loading/load.py, engine/heads.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from placement.catalogs.base import PlanError
from placement.latency.base import LatencyModel
from placement.latency.hardware import Hardware
from placement.latency.model_files import load_shape
from placement.latency.model_shape import ModelShape
from placement.latency.roofline import roofline_latency
from placement.latency.scaled import scaled_latency
from placement.latency.speculation import Speculation


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """`params`: of each."""

    num: int
    params: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Guesses:
    """So many ahead, each right with the chance `acceptance` where those before it are. `draft`: who makes them; None:
    they are looked up. Raises PlanError."""

    num_tokens: int
    acceptance: float
    draft: ModelShape | Heads | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.acceptance <= 1:
            raise PlanError(
                f"acceptance_rate is {self.acceptance:g}; give the chance of a guess to be right, from 0 to 1"
            )

    @property
    def kv_bytes_per_token(self) -> float:
        """Beside the model's own."""
        return self.draft.kv_bytes_per_token if isinstance(self.draft, ModelShape) else 0.0

    def page_share(self, model: ModelShape | None, tp: int = 1) -> float:
        """Of the pages that a worker has in so many bytes of KV without them."""
        own = model.worker_kv_bytes_per_token(tp) if model is not None else 1
        return own / (own + self.kv_bytes_per_token)

    def weight_bytes(self, model: ModelShape) -> float:
        """Beside the model's own, on one GPU."""
        if isinstance(self.draft, Heads):
            return self.draft.num * self.draft.params * model.dtype_bytes
        return self.draft.weight_bytes if self.draft is not None else 0.0

    def on(self, hardware: Hardware, latency: LatencyModel, model: ModelShape, power_cap: float = 1.0) -> Speculation:
        """Of a worker whose steps take `latency`."""
        if isinstance(self.draft, Heads) and hardware.unit == "GPU":
            raise PlanError(f"speculative_model has heads, which run on CPUs only, and not on {hardware.name}")
        if isinstance(self.draft, ModelShape):
            return self._by(roofline_latency(self.draft, hardware, power_cap=power_cap))
        return self.beside(latency, model)

    def beside(self, latency: LatencyModel, model: ModelShape | None) -> Speculation:
        """Of a worker that was measured: a pass is taken to be as much shorter than a step as the draft is smaller."""
        if self.draft is None or model is None:
            return self._by(None)
        params = self.draft.params if isinstance(self.draft, Heads) else _multiplied(self.draft)
        return self._by(scaled_latency(latency, params / _multiplied(model)))

    def _by(self, draft: LatencyModel | None) -> Speculation:
        heads = self.draft if isinstance(self.draft, Heads) else None
        num_tokens = min(self.num_tokens, heads.num) if heads else self.num_tokens
        return Speculation(num_tokens=num_tokens, acceptance=self.acceptance, draft=draft, reads=heads is None)


def _multiplied(shape: ModelShape) -> int:
    """Parameters that a token that is drawn is multiplied with."""
    return shape.active_params + shape.head_params


def guesses_by(model: str, num_tokens: int, acceptance: float, target: ModelShape | None) -> Guesses:
    """`model` empty: prompt lookup; else a draft model for `target`, as it is served, or a directory of heads. Raises
    PlanError."""
    if model and target is None:
        raise PlanError(f"speculative_model is {model!r}, and the model beside it is not known; give --model")
    draft = None
    if model and target is not None:
        draft = _heads(Path(model).expanduser(), target) or _draft(model, target)
    return Guesses(num_tokens=num_tokens, acceptance=acceptance, draft=draft)


def _draft(model: str, target: ModelShape) -> ModelShape:
    try:
        shape = load_shape(model).with_dtype(target.dtype)
    except PlanError as error:
        raise PlanError(f"speculative_{error}" if str(error).startswith("model ") else str(error)) from None
    if shape.vocab != target.vocab:
        raise PlanError(
            f"speculative_model is {model!r}, which has {shape.vocab} tokens; {target.name} has {target.vocab}: "
            "give one with the same"
        )
    return shape.in_few_bits(quantization=target.quantisation)


def _heads(folder: Path, target: ModelShape) -> Heads | None:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        num, layers = int(config["medusa_num_heads"]), int(config.get("medusa_num_layers", 1))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Heads(num=num, params=target.hidden * (target.vocab + layers * target.hidden))
