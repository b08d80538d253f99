"""Assumed is what a plan went by when it chose a pool: what one worker's steps and links take.

Nothing that serves reads it; `kvrelay doctor` holds the workers that run against it.
"""

from __future__ import annotations

from cluster.spec.knobs import Spec, setting


class Assumed(Spec):
    prompt_tokens: int = setting(..., "of the prompt that it is said of", unit="tokens", ge=1)
    prefill_s: float | None = setting(None, "to read it, alone and in one step", unit="s", gt=0)
    decode_s: float | None = setting(None, "a step that decodes behind it alone", unit="s", gt=0)
    transfer_s: float | None = setting(None, "in which its KV moves to another worker", unit="s", ge=0)
    error: float = setting(0.0, "by which these times may be wrong", unit="share", ge=0)
