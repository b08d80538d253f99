"""MixedOptions are the knobs of a MixedPolicy (policy.py): those of both phases, and how a step is shared."""

from __future__ import annotations

from dataclasses import dataclass

from decode_worker.options import DecodeOptions
from engine.knobs import check, knob
from prefill_worker.options import PrefillOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedOptions(PrefillOptions, DecodeOptions):
    chunk_tokens: int = knob(
        128,
        "of prompts in a step that decodes, too; more reads prompts sooner, fewer keeps the time per output token; 0: "
        "prompts are read only while nothing decodes, and come only where no other worker reads them",
        unit="tokens",
        ge=0,
        changes="now",
    )

    def __post_init__(self) -> None:
        check(self)
