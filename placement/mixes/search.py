"""Which mixes are worth trying: searches that ask whether mixes hold the SLO, and move on by the answers.

Pure: a search is a generator. It yields questions, (prompt machines, token machines, rate index), and is sent a bool
for each; its return value is what it found. So searches of several designs go on side by side, in any number of
processes, and find the same.

What they count on: more machines hold what fewer hold, and a lower rate where a higher one is held. Simulation is true
to that but for a machine more or less near the edge. A line of equal cost crosses each column (a number of token
machines) once; along the best mixes' columns, what is held rises and falls with few steps back: a search gives a side
up after PATIENCE columns that hold nothing better, but for every STRIDE-th one, where it looks again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial

Question = tuple[int, int, int]  # prompt machines, token machines, index on the grid of rates
Questions = Generator[list[Question], Sequence[bool], "Found | None"]

MAX_GROWTH = 64  # times the machines of the first guess; a design that needs more is told to be impossible
BATCH = 4  # columns asked at once; fixed, so that what is found does not depend on the processes
PATIENCE = 6
STRIDE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The mix, and the index of the highest rate on the grid that it was seen to hold."""

    num_prompt: int
    num_token: int
    rate: int


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


def cheapest(space: Space, rate: int) -> Questions:
    """The least cost that holds the rate; None where MAX_GROWTH times the guess does not."""
    begun = yield from _grow(space, rate)
    if begun is None:
        return None
    prompt, token = begun
    prompt = yield from _least(lambda n: (n, token, rate), space.floor[0], prompt)
    if not space.is_baseline:
        token = yield from _least(lambda n: (prompt, n, rate), space.floor[1], token)
        prompt, token = yield from _cheaper_columns(space, rate, prompt, token)
    return Found(num_prompt=prompt, num_token=token, rate=rate)


def _grow(space: Space, rate: int) -> Generator[list[Question], Sequence[bool], tuple[int, int] | None]:
    factor = 1.0
    while factor <= MAX_GROWTH:
        prompt = max(space.floor[0], math.ceil(space.guess[0] * factor))
        token = max(space.floor[1], math.ceil(space.guess[1] * factor))
        if (yield [(prompt, token, rate)])[0]:
            return prompt, token
        factor *= 1.25 if factor < 2 else 2.0
    return None


def _least(question: Callable[[int], Question], low: int, high: int) -> Generator[list[Question], Sequence[bool], int]:
    """The least number from `low` that holds; `high` does, and is probably near it."""
    step = 1
    while low < high:
        lower = max(low, high - step)
        if not (yield [question(lower)])[0]:
            low = lower + 1
            break
        high = lower
        step *= 2
    while low < high:
        middle = (low + high) // 2
        if (yield [question(middle)])[0]:
            high = middle
        else:
            low = middle + 1
    return high


def _cheaper_columns(
    space: Space, rate: int, prompt: int, token: int
) -> Generator[list[Question], Sequence[bool], tuple[int, int]]:
    """Other numbers of token machines, each with the most prompt machines that are still cheaper."""
    best = prompt, token
    for side in (1, -1):
        columns = _Columns(best[1], side, space.floor[1])
        while True:
            cost = space.cost(*best)
            asked = columns.take(BATCH, partial(_may_be_cheaper, space, cost))
            if not asked:
                break
            tops = [(_cheaper_than(space, cost, n), n) for n in asked]
            held = yield [(p, n, rate) for p, n in tops]
            columns.learn(held)
            for (top, n), is_held in zip(tops, held, strict=True):
                if is_held and space.cost(space.floor[0], n) < space.cost(*best):
                    least = yield from _least(lambda p, n=n: (p, n, rate), space.floor[0], top)  # type: ignore[misc]
                    best = min(best, (least, n), key=lambda mix: (space.cost(*mix), mix))
    return best


def _cheaper_than(space: Space, cost: float, num_token: int) -> int:
    """The most prompt machines beside them at less than the cost."""
    prompts = space.prompts_within(cost, num_token)
    return prompts - 1 if space.cost(prompts, num_token) >= cost - 1e-9 else prompts


def _may_be_cheaper(space: Space, cost: float, num_token: int) -> bool:
    return _cheaper_than(space, cost, num_token) >= space.floor[0]


class _Columns:
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
        return (self.at_most - self.unit_costs[1] * num_token) / self.unit_costs[0] if self.unit_costs[0] else math.inf


def prompts_beside(limits: Sequence[Limit], num_token: int) -> int:
    """The most prompt machines beside so many token machines within all limits; below 1 there is no room for any."""
    most = min(limit.prompts_beside(num_token) for limit in limits)
    return math.floor(most + 1e-9)


def fastest(space: Space, limits: Sequence[Limit], guess: int) -> Questions:
    """The highest rate on the grid that machines within the limits hold; None where they hold none. `guess`: a rate.
    The number of token machines is looked for along the line on which the limits are used up."""
    if space.is_baseline:
        prompt = prompts_beside(limits, 0)
        rate = (yield from highest_rate(prompt, 0, guess)) if prompt >= 1 else 0
        return Found(num_prompt=prompt, num_token=0, rate=rate) if rate else None
    if prompts_beside(limits, 1) < 1:
        return None
    token = max(1, round(space.guess[1] * _share(limits, space.guess)))
    while prompts_beside(limits, token) < 1:
        token -= 1
    best = (yield from highest_rate(prompts_beside(limits, token), token, guess)), token
    for side in (1, -1):
        columns = _Columns(best[1], side, 1)
        while asked := columns.take(BATCH, lambda n: prompts_beside(limits, n) >= 1):
            rate = best[0] + 1
            held = yield [(prompts_beside(limits, n), n, rate) for n in asked]
            columns.learn(held)
            for n, is_held in zip(asked, held, strict=True):
                prompt = prompts_beside(limits, n)
                if is_held and (rate > best[0] or (yield [(prompt, n, best[0] + 1)])[0]):
                    best = (yield from _higher(prompt, n, best[0] + 1)), n
    if not best[0]:
        return None
    return Found(num_prompt=prompts_beside(limits, best[1]), num_token=best[1], rate=best[0])


def _share(limits: Sequence[Limit], mix: tuple[int, int]) -> float:
    """How many times the mix fits into the limits."""
    used = [limit.unit_costs[0] * mix[0] + limit.unit_costs[1] * mix[1] for limit in limits]
    return min(limit.at_most / cost if cost else math.inf for limit, cost in zip(limits, used, strict=True))


def _higher(prompt: int, token: int, held: int) -> Generator[list[Question], Sequence[bool], int]:
    """The highest index that is held; `held` is, and is probably near it."""
    low, step = held, 1
    while (yield [(prompt, token, low + step)])[0]:
        low, step = low + step, 2 * step
    high = low + step
    while high - low > 1:
        middle = (low + high) // 2
        if (yield [(prompt, token, middle)])[0]:
            low = middle
        else:
            high = middle
    return low


def headroom(prompt: int, token: int, guess: int) -> Questions:
    """The highest rate that these machines hold."""
    rate = yield from highest_rate(prompt, token, guess)
    return Found(num_prompt=prompt, num_token=token, rate=rate)


def highest_rate(prompt: int, token: int, guess: int) -> Generator[list[Question], Sequence[bool], int]:
    """The highest index on the grid that is held, 0 where not even 1 is."""
    low, high = 0, max(1, guess)
    step = max(1, guess // 8)
    if (yield [(prompt, token, high)])[0]:
        while True:
            low, high = high, high + step
            if not (yield [(prompt, token, high)])[0]:
                break
            step *= 2
    else:
        while high > 1:
            lower = max(1, high - step)
            if (yield [(prompt, token, lower)])[0]:
                low = lower
                break
            high = lower
            step *= 2
    while high - low > 1:
        middle = (low + high) // 2
        if (yield [(prompt, token, middle)])[0]:
            low = middle
        else:
            high = middle
    return low
