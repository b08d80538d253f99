"""StepTimes fits StepCosts to the steps that a worker has run, and forgets the oldest bit by bit.

A least-squares fit of relative errors, so that one step that the machine held up says little, with costs of 0 or more.
Steps with prompts and steps without are forgotten apart: a worker that has only decoded for a while still knows what
prompts take.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from worker.steps.costs import StepCosts, share_after

KEPT = 0.998  # of what is known, by each step of the same kind
ENOUGH = 6.0  # steps, before anything is told
COSTS = tuple(field.name for field in fields(StepCosts) if field.name.endswith("_s"))
NUM_COSTS = len(COSTS)
COLUMNS = {"prefill": COSTS.index("prompt_token_s"), "decode": COSTS.index("request_s")}  # of what each phase has


class StepTimes:
    """One thread notes steps, and another may ask meanwhile: what it reads is replaced whole."""

    def __init__(self) -> None:
        self.prompt_share = 0.0  # see share_after
        nothing = np.zeros((NUM_COSTS + 1, NUM_COSTS + 1))
        self._sums = nothing, nothing  # of steps with prompts, and without
        self._fitted: tuple[Any, Any, StepCosts | None] = (None, None, None)  # of which sums, for what, and the costs

    def note(self, prompt_tokens: int, requests: int, context_tokens: int, taken_s: float, guesses: int = 0) -> None:
        """A step with so many tokens of prompts, one token each of `requests`, and their context with those. `guesses`
        behind those tokens cost what a prompt's tokens do, and hold up nobody: they are run where they pay."""
        if not taken_s > 0:
            return
        read = prompt_tokens + guesses
        row = np.array((1.0, read, requests, context_tokens, bool(read and requests), taken_s)) / taken_s
        with_prompts, without = self._sums
        if read:
            self._sums = KEPT * with_prompts + np.outer(row, row), without
        else:
            self._sums = with_prompts, KEPT * without + np.outer(row, row)
        if requests:
            self.prompt_share = share_after(self.prompt_share, prompt_tokens)

    def costs(self, phases: Collection[str] = (), enough: float = ENOUGH) -> StepCosts | None:
        """None while fewer steps have been seen, or none of one of these phases: its costs would be taken for 0."""
        sums, asked = self._sums, (tuple(phases), enough)
        of_sums, of_asked, costs = self._fitted
        if of_sums is not sums or of_asked != asked:  # an idle worker is asked five times a second
            costs = _fit(sums[0] + sums[1], *asked)
            self._fitted = sums, asked, costs
        return costs


def _fit(sums: np.ndarray[Any, np.dtype[np.float64]], phases: Collection[str], enough: float) -> StepCosts | None:
    if sums[-1, -1] < enough:  # taken_s / taken_s for each
        return None
    if any(not sums[COLUMNS[phase], COLUMNS[phase]] for phase in phases):
        return None
    costs = _least_squares(sums)
    return StepCosts(**dict(zip(COSTS, costs, strict=True)), spread=_spread(sums, costs))


def _spread(sums: np.ndarray[Any, np.dtype[np.float64]], costs: Sequence[float]) -> float:
    """What the fit leaves of each step, as a share of its time: of the same sums, so that no step need be kept."""
    left = np.array((*costs, -1.0))
    return math.sqrt(max(0.0, float(left @ sums @ left)) / float(sums[-1, -1]))


def _least_squares(sums: np.ndarray[Any, np.dtype[np.float64]]) -> Sequence[float]:
    """Costs of 0 or more: whichever would be the furthest below is left out, and the others are fitted again."""
    scale = np.sqrt(np.maximum(np.diag(sums)[:NUM_COSTS], 1e-300))
    known = [i for i in range(NUM_COSTS) if sums[i, i] > 0]
    while True:
        costs = np.zeros(NUM_COSTS)
        matrix = sums[np.ix_(known, known)] / np.outer(scale[known], scale[known])
        costs[known] = np.linalg.lstsq(matrix, sums[known, -1] / scale[known], rcond=1e-9)[0]
        lowest = int(np.argmin(costs))
        if costs[lowest] >= 0:
            return [float(cost) for cost in costs / scale]
        known.remove(lowest)
