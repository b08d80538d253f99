"""Setting says what is explored: which workers and requests there are, and which faults may happen how often in one
history. The requests have prompts of one token again and again, so that one is the beginning of the other; what a model
would answer is a function of all tokens before, so that no token can stand for another.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

PAGE_SIZE = 4
VOCAB_SIZE = 1000
DEADLINE_S = 10_000.0  # beyond all that is waited for: only the fault brings it


def stamp(tokens: Sequence[int]) -> int:
    """Of the KV of the last of these: small enough to be exact in float32."""
    return zlib.crc32(array("I", tokens).tobytes()) & 0xFFFFFF


def next_token(tokens: Sequence[int]) -> int:
    return 100 + stamp(tokens) % (VOCAB_SIZE - 100)


@dataclass(frozen=True, kw_only=True)
class Setting:
    prefill: int = 1
    decode: int = 1
    mixed: int = 0
    prompts: tuple[int, ...] = (5,)  # tokens of each request
    max_tokens: int = 3
    prefill_pages: int = 8
    decode_pages: int = 8
    mixed_pages: int = 8
    prefix_cache: bool = False
    arrivals: bool = False  # requests after the first come at any time, not at once
    reports: bool = False  # workers tell what they hold, at any time after it has changed
    sends_again: bool = True  # a client whose router has died
    poison: tuple[int, str] | None = None  # a request, and the phase in which it ends each process that computes it
    faults: tuple[str, ...] = ()
    num_faults: int = 1
    max_ticks: int = 3  # that are explored from; what time brings later comes in one order
    options: dict[str, Any] = field(default_factory=dict)  # of the router

    def prompt(self, request: int) -> list[int]:
        return [7] * self.prompts[request]

    def answer(self, request: int) -> list[int]:
        tokens = self.prompt(request)
        for _ in range(self.max_tokens):
            tokens.append(next_token(tokens))
        return tokens[self.prompts[request] :]
