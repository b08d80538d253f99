"""PrefillOptions are the knobs of a PrefillPolicy (policy.py): how much of which prompts a step computes."""

from __future__ import annotations

from dataclasses import dataclass

from engine.knobs import check, knob


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillOptions:
    max_batch_tokens: int = knob(
        512, "computed in one step at most; long prompts are cut into chunks", unit="tokens", ge=1
    )
    max_prefill_requests: int = knob(64, "in one step at most", unit="requests", ge=1)
    pack_tokens: int | None = knob(
        128,
        "no further prompt joins a step that has so many, but the oldest one; null: all that fit",
        unit="tokens",
        ge=1,
    )
    short_prompt_tokens: int = knob(256, "a prompt with no more left may pass a long one", unit="tokens", ge=0)
    short_share: float = knob(
        0.5, "that short prompts may take while a long one stands before them", unit="share of a step", ge=0, lt=1
    )

    def __post_init__(self) -> None:
        check(self)
