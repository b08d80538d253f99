"""next_step says what brings the workers of a cluster to what its spec wants, one step at a time, with nothing lost:

    who is missing is started -> whoever came is ready, and every router uses it -> who is too many is drained and ended
    -> of those that run as an older spec had it, one pool and one worker after another:
           a stand-in is started -> the old one is drained and ended -> another of its name is started in its place
    -> the stand-in is drained and ended

The stand-in of a pool is made as the new ones will be: if it does not become ready nothing old is touched. Without one
(`max_surge` 0) the old one goes first, unless it is the only one for a phase of requests.

It looks at how all stand now and remembers nothing, so that a controller that was restarted goes on where the last one
was. It starts and ends nobody (cluster/deploy/controller.py does), and knows no Ray and no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from worker.roles import kind_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How a worker stands."""

    name: str
    pool: str
    role: str  # that it has now
    is_current: bool  # it was started as the spec has it now
    is_used: bool = False  # ready, and every router sends it requests, or would
    is_stand_in: bool = False
    is_leaving: bool = False
    model: str = ""  # of the spec's `served`
    is_unserved: bool = False  # its model is to be served no more
    trouble: str = ""  # why it is not used
    failure: str = ""  # why it will not become ready; empty: it may


@dataclass(frozen=True, slots=True)
class Start:
    """One more worker in a pool."""

    pool: str
    is_stand_in: bool = False


@dataclass(frozen=True, slots=True)
class Drain:
    """A worker leaves, and is ended then."""

    name: str


@dataclass(frozen=True, slots=True)
class Wait:
    reason: str


@dataclass(frozen=True, slots=True)
class Stop:
    """It goes no further by itself. `stand_ins`: who is of no use then."""

    reason: str
    stand_ins: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Done:
    pass


Step = Start | Drain | Wait | Stop | Done


def next_step(
    sizes: Mapping[str, int], workers: Sequence[Standing], surges: Mapping[str, bool | None], alone: Mapping[str, str]
) -> Step:
    """`sizes`: how many each pool shall have. `surges`: which may have one more; None: not known yet. `alone`: by
    worker, why it may not leave now, as routers say."""
    failed = [each for each in workers if each.failure and not (each.is_leaving or each.is_unserved)]
    if hopeless := next((each for each in failed if each.is_current), None):
        return _stop(hopeless, workers)
    if failed:
        return Drain(failed[0].name)  # what it failed of, the spec may have no more
    return (
        _grow(sizes, workers)
        or _wait_for_new(sizes, workers)
        or _shrink(sizes, workers, alone)
        or _renew(sizes, workers, surges, alone)
        or _wait_for_leaving(workers)
        or Done()
    )


def _stop(failed: Standing, workers: Sequence[Standing]) -> Stop:
    stand_ins = tuple(each.name for each in workers if each.is_stand_in and not each.is_leaving)
    return Stop(f"{failed.name} does not become ready: {failed.failure}; the others stay as they are", stand_ins)


def _grow(sizes: Mapping[str, int], workers: Sequence[Standing]) -> Step | None:
    for pool, size in sizes.items():
        own = [each for each in workers if each.pool == pool and not each.is_stand_in]
        leaving = [each for each in own if each.is_leaving]
        if len(own) - len(leaving) < size:  # who comes takes the name and the place of who goes
            return _left_by(leaving[0]) if leaving else Start(pool)
    return None


def _wait_for_new(sizes: Mapping[str, int], workers: Sequence[Standing]) -> Step | None:
    for each in workers:
        is_of_use = not each.is_stand_in or sizes.get(each.pool, 0) > 0
        if each.is_current and is_of_use and not each.is_used and not each.is_leaving:
            return Wait(f"{each.name} is {each.trouble}")
    return None


def _shrink(sizes: Mapping[str, int], workers: Sequence[Standing], alone: Mapping[str, str]) -> Step | None:
    for pool in dict.fromkeys(each.pool for each in workers):
        staying = [each for each in workers if each.pool == pool and not each.is_leaving]
        own = [each for each in staying if not each.is_stand_in or pool not in sizes]
        if len(own) > sizes.get(pool, 0):
            return _let_go(min(reversed(own), key=lambda each: (each.is_current, each.is_used)), workers, alone)
    return None


def _renew(
    sizes: Mapping[str, int], workers: Sequence[Standing], surges: Mapping[str, bool | None], alone: Mapping[str, str]
) -> Step | None:
    """Of all pools with an old one, or a stand-in that is needed no more, the first that can go on."""
    steps = [
        step for pool in sizes if (step := _renew_pool(pool, sizes[pool], workers, surges.get(pool, False), alone))
    ]
    return min(steps, key=lambda step: (isinstance(step, Stop), isinstance(step, Wait)), default=None)


def _renew_pool(
    pool: str, size: int, workers: Sequence[Standing], surge: bool | None, alone: Mapping[str, str]
) -> Step | None:
    staying = [each for each in workers if each.pool == pool and not each.is_leaving]
    stand_ins = [each for each in staying if each.is_stand_in]
    if stand_ins and not size:
        return Drain(stand_ins[0].name)  # the pool was scaled to none, though it may be the last one for a phase
    if gone := next((each for each in stand_ins if not each.is_current), None):
        return _let_go(gone, workers, alone)  # made for a spec that is not wanted any more
    old = [each for each in staying if not each.is_current]
    if old and surge is None and not stand_ins:
        return Wait(f"looking for room for one more in {pool}")
    if old and surge and not stand_ins:
        return Start(pool, is_stand_in=True)
    if old:
        return _let_go(min(old, key=lambda each: each.is_used), workers, alone)
    return _let_go(stand_ins[0], workers, alone) if stand_ins else None


def _let_go(worker: Standing, workers: Sequence[Standing], alone: Mapping[str, str]) -> Step:
    others = [each for each in workers if each is not worker and not each.is_leaving and each.model == worker.model]
    for phase in kind_of(worker.role).phases if worker.is_used and not worker.is_unserved else ():
        if not any(phase in kind_of(each.role).phases for each in others):
            if worker.is_stand_in:  # those that it stood in for do something else by now
                return Wait(f"{worker.name} stands in, and is the only worker for {phase}")
            reason = (
                f"{worker.name} is the only worker for {phase}, and there is no room for another one beside it; make "
                "room, or have a pool for it grow first"
            )
            return Stop(reason, tuple(each.name for each in others if each.is_stand_in and each.pool == worker.pool))
    if (worker.is_used or worker.is_unserved) and (why := alone.get(worker.name)):
        return Wait(why)
    return Drain(worker.name)


def _wait_for_leaving(workers: Sequence[Standing]) -> Step | None:
    leaving = next((each for each in workers if each.is_leaving), None)
    return _left_by(leaving) if leaving else None


def _left_by(worker: Standing) -> Wait:
    return Wait(f"{worker.name} is being left by its requests")
