"""Speculation is what a simulated worker knows of guesses ahead: how many, what they take, how often they are right.

How often is an assumption, for a simulation has no tokens: each guess is right with one chance, those before it being
right (Leviathan et al., ICML 2023, arXiv 2211.17192: of k guesses a step makes (1 - a^(k + 1)) / (1 - a) tokens).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from placement.latency.base import LatencyModel
from placement.latency.scaled import scaled_latency


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """`draft`: what a pass that guesses one token of each request takes; None: guesses are looked up, in no time.
    `reads`: the draft model reads each prompt before it guesses; heads do not."""

    num_tokens: int  # guessed for a request in a step, at most
    acceptance: float  # chance of a guess to be right where those before it are
    draft: LatencyModel | None = None
    reads: bool = True

    def scaled(self, factor: float) -> Speculation:
        return self if self.draft is None else replace(self, draft=scaled_latency(self.draft, factor))
