"""DecodeOptions are the knobs of a DecodePolicy (policy.py): how many decode at once, and who gets pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.knobs import check, knob


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    max_batch_size: int = knob(64, "that decode at once; more wait, with their KV, in pages", unit="requests", ge=1)
    admission: Literal["watermark", "worst_case"] = knob("watermark", "who gets pages: see *Choosing values*")
    watermark: float = knob(
        0.02, "that admission leaves free for running requests to grow into", unit="share of pages", ge=0, lt=1
    )

    num_speculative_tokens: int = knob(
        0,
        "guessed ahead for a request in a step at most: see *Speculative decoding*; 0: none",
        unit="tokens",
        ge=0,
        le=16,
    )
    speculative_model: str = knob(
        "",
        "a smaller model with the same tokens that guesses, a Hugging Face directory or hub name; its pages take their "
        "share of kv_memory; or a directory of Medusa heads; empty: prompt lookup",
    )
    prompt_lookup_min: int = knob(
        2, "last ones that must have been there before, for a guess", unit="tokens", ge=1, le=16
    )
    prompt_lookup_max: int = knob(4, "in common that make one place better than another", unit="tokens", ge=1, le=64)

    def __post_init__(self) -> None:
        check(self)
