"""The replanning policy: given how the cluster would fare in each arrangement of its workers, which to take, and why.

    arrangements near by --played against what came lately--> Played --decide--> Decision: moves, and a sentence

Pure: it plays nothing and changes nothing. A change has a price, for a worker that changes computes nothing meanwhile,
and one that starts serves nobody yet. What came lately is believed to go on for as long as it has gone on: the same
change is dear where little was seen, and two loads that take turns are seen together, so that they do not make roles
swing. And the gain must be more than chance: both arrangements are played against the same requests, and compared part
by part. Of arrangements in which enough requests meet their targets the one with the fewest devices is best; a worker
that nobody needs leaves when that has been so for long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from placement.replan.arrangements import Arrangement, Move, SetRole, moves, num_changes

PARTS = 20  # of what came, one after another, by which two arrangements are compared
SURE = 2.0  # standard errors
TRUSTED = 0.03  # a share that the simulation may be wrong by: what gains less is left
LONG = 10.0  # times what a worker takes to start: for how long one must not have been needed, to leave
MIN_SEEN_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Played:
    """How each request fared: whether it met its targets, in the order in which they came. `tpot_s`: of the middle
    one; `devices`: that the workers take."""

    arrangement: Arrangement
    met: npt.NDArray[np.bool_]
    tpot_s: float = 0.0
    devices: int = 0

    @property
    def attainment(self) -> float:
        return float(self.met.mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Seconds in which a worker that changes its role does nothing, and that one takes until it serves."""

    change_s: float = 5.0
    start_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """`moves`: one after another; none: all stays. `reason`: one sentence."""

    moves: tuple[Move, ...]
    reason: str
    is_spare: bool = False  # one worker less would do


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """`wanted`: the share of requests that shall meet their targets; `measured`: that met them, in `seen_s`. For
    `spare_s` each look has found that one worker less would do. `undo`: what takes back that one has left."""

    wanted: float
    measured: float
    seen_s: float
    prices: Prices = field(default_factory=Prices)
    spare_s: float = 0.0
    undo: Move | None = None

    @property
    def is_enough(self) -> bool:
        return self.measured >= self.wanted


def decide(present: Played, others: Sequence[Played], terms: Terms) -> Decision:
    """Where enough requests met their targets, `others` are of fewer workers."""
    wanted = terms.wanted
    now = f"{terms.measured:.0%} of the requests met their targets, {present.attainment:.0%} when played again"
    if terms.is_enough:
        return _with_fewer(present, others, terms, f"{now}: enough")
    if present.attainment >= wanted:
        if terms.undo is not None:
            return Decision(moves=(terms.undo,), reason=f"{now}: it was enough before a worker left")
        return Decision(moves=(), reason=f"{now}: it is not for their roles that workers missed them")
    if not others:
        return Decision(moves=(), reason=f"{now}, and there is no other arrangement near by")

    prices = {other: _price(present, other, terms) for other in others}

    def rank(other: Played) -> tuple[bool, int, float]:
        worth = other.attainment - prices[other]
        is_enough = worth >= wanted
        dearer = TRUSTED if other.devices > present.devices else 0.0
        return is_enough, -other.devices if is_enough else 0, worth - dearer

    def least(other: Played) -> float:
        """That it must gain."""
        better = other.met.astype(np.float64) - present.met
        return prices[other] + SURE * _error(better) + TRUSTED

    worth_it = [other for other in others if other.attainment - present.attainment > least(other)]
    best = max(worth_it or others, key=rank)
    words = f"{now}; with {best.arrangement} it would be {best.attainment:.0%}"
    if not worth_it:
        needed = present.attainment + least(best)
        least_share = f"must be {needed:.0%}" if needed <= 1 else f"after {terms.seen_s:.0f} s no share is enough"
        return Decision(moves=(), reason=f"{words}, and {least_share} to be worth a change")
    return Decision(moves=moves(present.arrangement.roles, best.arrangement) or (), reason=words)


def _with_fewer(present: Played, others: Sequence[Played], terms: Terms, now: str) -> Decision:
    """One of these, if it would do, too, and has for long; by a simulation that is not fairer than life."""
    enough = [other for other in others if other.attainment - SURE * _error(other.met) - TRUSTED >= terms.wanted]
    best = max(enough, key=lambda other: (-other.devices, other.attainment), default=None)
    if best is None or present.attainment - terms.measured > TRUSTED:
        return Decision(moves=(), reason=now)
    words = f"{now}, and with {best.arrangement} it would be {best.attainment:.0%}"
    words = f"{words}, for {terms.spare_s:.0f} s"
    if terms.spare_s < LONG * terms.prices.start_s:
        return Decision(moves=(), reason=f"{words} so far", is_spare=True)
    return Decision(moves=moves(present.arrangement.roles, best.arrangement) or (), reason=words)


def _price(present: Played, other: Played, terms: Terms) -> float:
    """Of the requests, those that would come while a worker does nothing, and be served by it, or by nobody else; and
    of what more workers gain, what comes before they serve."""
    before, after = present.arrangement.roles, other.arrangement.roles
    seen_s, prices = max(terms.seen_s, MIN_SEEN_S), terms.prices
    for_all = sum(isinstance(move, SetRole) and move.force for move in moves(before, other.arrangement) or ())
    alone = num_changes(before, after) - for_all
    price = (for_all + alone / max(1, len(before) - 1)) * prices.change_s / seen_s
    if len(after) > len(before):
        price += max(0.0, other.attainment - present.attainment) * min(1.0, prices.start_s / seen_s)
    return price


def _error(shares: npt.NDArray[np.float64] | npt.NDArray[np.bool_]) -> float:
    """The standard error of their mean: of parts, for requests near each other fare alike."""
    parts = np.array([part.mean() for part in np.array_split(shares, min(PARTS, len(shares)))])
    return float(parts.std(ddof=1) / math.sqrt(len(parts))) if len(parts) > 1 else math.inf
