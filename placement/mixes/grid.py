"""The grid on which mixes are searched: numbers of machines and steps of the rate, what they cost, and where to look.

    token machines ->   each column has as many prompt machines as the cost or the limits leave room for
    rate                an index, 1 and up; what a step is in requests/s is not known here

Pure values. A search yields GridPoints, is sent a bool for each (is it held?), and returns the best GridPoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

Answer = TypeVar("Answer")
PATIENCE = 6  # columns in a row that hold nothing better, before a side is given up
STRIDE = 8  # but for every so many-th column, where it is looked at again


class GridPoint(NamedTuple):
    """A mix, and the index of a rate: one that is asked about, or the highest that it was seen to hold."""

    num_prompt: int
    num_token: int
    rate: int


Steps = Generator[list[GridPoint], Sequence[bool], Answer]
Asking = Steps[GridPoint | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """`guess`: machines to begin with. `floor`: fewer cannot be enough. `unit_costs`: of a prompt and a token machine.
    A baseline has no token machines: floor and guess 0 there."""

    guess: tuple[int, int]
    floor: tuple[int, int]
    unit_costs: tuple[float, float]
    is_baseline: bool

    def cost(self, num_prompt: int, num_token: int) -> float:
        return self.unit_costs[0] * num_prompt + self.unit_costs[1] * num_token

    def prompts_within(self, cost: float, num_token: int) -> int:
        """The most prompt machines beside so many token machines that cost at most `cost`."""
        left = cost - self.unit_costs[1] * num_token
        return math.floor(left / self.unit_costs[0] + 1e-9)


class Columns:
    """Numbers of token machines, outwards from where the search stands."""

    def __init__(self, begin: int, side: int, floor: int) -> None:
        self._next = begin + side
        self._begin = begin
        self._side = side
        self._floor = floor
        self._failed = 0

    def take(self, count: int, is_worth: Callable[[int], bool]) -> list[int]:
        taken: list[int] = []
        while len(taken) < count and self._next >= self._floor and is_worth(self._next):
            if self._failed + len(taken) < PATIENCE or (self._next - self._begin) % STRIDE == 0:
                taken.append(self._next)
            self._next += self._side
        return taken

    def learn(self, held: Sequence[bool]) -> None:
        for is_held in held:
            self._failed = 0 if is_held else self._failed + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What machines may take of one resource in all."""

    unit_costs: tuple[float, float]
    at_most: float

    def prompts_beside(self, num_token: int) -> float:
        left = self.at_most - self.unit_costs[1] * num_token
        if not self.unit_costs[0]:
            return math.inf if left >= 0 else 0.0
        return left / self.unit_costs[0]


def prompts_beside(limits: Sequence[Limit], num_token: int) -> int:
    """The most prompt machines beside so many token machines within all limits; below 1 there is no room for any."""
    most = min(limit.prompts_beside(num_token) for limit in limits)
    return math.floor(most + 1e-9)
