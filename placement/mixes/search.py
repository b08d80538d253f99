"""Which mixes are worth trying: searches that ask whether mixes hold the SLO, and move on by the answers.

Pure: a search is a generator. It yields points of the grid, and is sent a bool for each; its return value is the point
that it settles on. So searches of several designs go on side by side, in any number of processes, and find the same.

What they count on: more machines hold what fewer hold, and a lower rate where a higher one is held. Simulation is true
to that but for a machine more or less near the edge. A line of equal cost crosses each column (a number of token
machines) once; along the best mixes' columns, what is held rises and falls with few steps back: a search gives a side
up after PATIENCE columns that hold nothing better, but for every STRIDE-th one, where it looks again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from placement.mixes.grid import Asking, Columns, GridPoint, Limit, Space, Steps, prompts_beside

MAX_GROWTH = 64  # times the machines of the first guess; a design that needs more is told to be impossible
BATCH = 4  # columns asked at once; fixed, so that what is found does not depend on the processes


def cheapest(space: Space, rate: int) -> Asking:
    """The least cost that holds the rate; None where MAX_GROWTH times the guess does not."""
    begun = yield from _grow(space, rate)
    if begun is None:
        return None
    prompt, token = begun
    prompt = yield from _least(lambda n: GridPoint(n, token, rate), space.floor[0], prompt)
    if not space.is_baseline:
        token = yield from _least(lambda n: GridPoint(prompt, n, rate), space.floor[1], token)
        prompt, token = yield from _cheaper_columns(space, rate, prompt, token)
    return GridPoint(num_prompt=prompt, num_token=token, rate=rate)


def _grow(space: Space, rate: int) -> Steps[tuple[int, int] | None]:
    factor = 1.0
    while factor <= MAX_GROWTH:
        prompt = max(space.floor[0], math.ceil(space.guess[0] * factor))
        token = max(space.floor[1], math.ceil(space.guess[1] * factor))
        if (yield [GridPoint(prompt, token, rate)])[0]:
            return prompt, token
        factor *= 1.25 if factor < 2 else 2.0
    return None


def _least(question: Callable[[int], GridPoint], low: int, high: int) -> Steps[int]:
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


def _cheaper_columns(space: Space, rate: int, prompt: int, token: int) -> Steps[tuple[int, int]]:
    """Other numbers of token machines, each with the most prompt machines that are still cheaper."""
    best = prompt, token
    for side in (1, -1):
        columns = Columns(best[1], side, space.floor[1])
        while True:
            cost = space.cost(*best)
            asked = columns.take(BATCH, partial(_may_be_cheaper, space, cost))
            if not asked:
                break
            tops = [(_cheaper_than(space, cost, n), n) for n in asked]
            held = yield [GridPoint(p, n, rate) for p, n in tops]
            columns.learn(held)
            for (top, n), is_held in zip(tops, held, strict=True):
                if is_held and space.cost(space.floor[0], n) < space.cost(*best):
                    least = yield from _least(lambda p, n=n: GridPoint(p, n, rate), space.floor[0], top)  # type: ignore[misc]
                    best = min(best, (least, n), key=lambda mix: (space.cost(*mix), mix))
    return best


def _cheaper_than(space: Space, cost: float, num_token: int) -> int:
    """The most prompt machines beside them at less than the cost."""
    prompts = space.prompts_within(cost, num_token)
    return prompts - 1 if space.cost(prompts, num_token) >= cost - 1e-9 else prompts


def _may_be_cheaper(space: Space, cost: float, num_token: int) -> bool:
    return _cheaper_than(space, cost, num_token) >= space.floor[0]


def fastest(space: Space, limits: Sequence[Limit], guess: int) -> Asking:
    """The highest rate on the grid that machines within the limits hold; None where they hold none. `guess`: a rate.
    The number of token machines is looked for along the line on which the limits are used up."""
    if space.is_baseline:
        prompt = prompts_beside(limits, 0)
        rate = (yield from highest_rate(prompt, 0, guess)) if prompt >= 1 else 0
        return GridPoint(num_prompt=prompt, num_token=0, rate=rate) if rate else None
    if prompts_beside(limits, 1) < 1:
        return None
    token = max(1, round(space.guess[1] * _share(limits, space.guess)))
    while prompts_beside(limits, token) < 1:
        token -= 1
    best = (yield from highest_rate(prompts_beside(limits, token), token, guess)), token
    for side in (1, -1):
        columns = Columns(best[1], side, 1)
        while asked := columns.take(BATCH, lambda n: prompts_beside(limits, n) >= 1):
            rate = best[0] + 1
            held = yield [GridPoint(prompts_beside(limits, n), n, rate) for n in asked]
            columns.learn(held)
            for n, is_held in zip(asked, held, strict=True):
                prompt = prompts_beside(limits, n)
                if is_held and (rate > best[0] or (yield [GridPoint(prompt, n, best[0] + 1)])[0]):
                    best = (yield from _higher(prompt, n, best[0] + 1)), n
    if not best[0]:
        return None
    return GridPoint(num_prompt=prompts_beside(limits, best[1]), num_token=best[1], rate=best[0])


def _share(limits: Sequence[Limit], mix: tuple[int, int]) -> float:
    """How many times the mix fits into the limits."""
    used = [limit.unit_costs[0] * mix[0] + limit.unit_costs[1] * mix[1] for limit in limits]
    return min(limit.at_most / cost if cost else math.inf for limit, cost in zip(limits, used, strict=True))


def _higher(prompt: int, token: int, held: int) -> Steps[int]:
    """The highest index that is held; `held` is, and is probably near it."""
    low, step = held, 1
    while (yield [GridPoint(prompt, token, low + step)])[0]:
        low, step = low + step, 2 * step
    return (yield from _bisected(prompt, token, low, low + step))


def headroom(prompt: int, token: int, guess: int) -> Asking:
    """The highest rate that these machines hold."""
    rate = yield from highest_rate(prompt, token, guess)
    return GridPoint(num_prompt=prompt, num_token=token, rate=rate)


def highest_rate(prompt: int, token: int, guess: int) -> Steps[int]:
    """The highest index on the grid that is held, 0 where not even 1 is."""
    low, high = 0, max(1, guess)
    step = max(1, guess // 8)
    if (yield [GridPoint(prompt, token, high)])[0]:
        while True:
            low, high = high, high + step
            if not (yield [GridPoint(prompt, token, high)])[0]:
                break
            step *= 2
    else:
        while high > 1:
            lower = max(1, high - step)
            if (yield [GridPoint(prompt, token, lower)])[0]:
                low = lower
                break
            high = lower
            step *= 2
    return (yield from _bisected(prompt, token, low, high))


def _bisected(prompt: int, token: int, low: int, high: int) -> Steps[int]:
    """The highest index that is held; `low` is, or is 0, and `high` is not."""
    while high - low > 1:
        middle = (low + high) // 2
        if (yield [GridPoint(prompt, token, middle)])[0]:
            low = middle
        else:
            high = middle
    return low
