"""MixedPolicy shares a worker's steps and pages between prompts and answers: a PrefillPolicy and a DecodePolicy.

Steps. Every running request has its token in every step, or in one of as many as there are pipeline stages; chunks of
prompts fill what that leaves, at most `chunk_tokens` of them. So each decode step takes longer by one chunk at most,
while prompts are read at the rate of a chunk a step (Sarathi-Serve, Agrawal et al., OSDI 2024); chunk_tokens is the
slider between the two phases.

Pages. A prompt begins when the decode policy lets it: it counts there as a request that was admitted, and reservations
of other workers do not pass it, nor it them. One that is decoded here keeps its pages (`DecodePolicy.adopt`).
"""

from __future__ import annotations

from dataclasses import replace

from decode_worker.policy import DecodePolicy
from engine.pages.pool import PagePool
from mixed_worker.options import MixedOptions
from prefill_worker.policy import PrefillPolicy


class MixedPolicy:
    parts = ("prefill", "decode")

    def __init__(self, pool: PagePool, options: MixedOptions, *, name: str = "mixed", num_stages: int = 1) -> None:
        self.pool = pool
        self.options = options
        self.decode = DecodePolicy(pool, options, name=name, num_stages=num_stages)
        self.prefill = PrefillPolicy(pool, options, beside=self.decode)

    def prompt_tokens(self, num_decoding: int) -> int:
        """How many tokens of prompts may be in a step in which so many of answers are, guesses counted."""
        if not num_decoding:
            return self.options.max_batch_tokens
        left = max(1, self.options.max_batch_tokens - num_decoding)  # or prompts wait for the last answer of many
        return min(self.options.chunk_tokens, left)

    def set_chunk_tokens(self, tokens: int) -> None:
        self.options = replace(self.options, chunk_tokens=tokens)

    def check_invariants(self) -> None:
        self.prefill.check_invariants()
        self.decode.check_invariants()
