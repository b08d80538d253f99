"""Groups of requests that decode in step, and what is known of each request: the columns of one simulation.

A step costs the same whatever their number. Groups are cut and joined at the front of a queue; only the smaller part is
counted anew, so a request costs little however often that happens.
"""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush

from placement.workload.requests import Workload


class Group:
    """Requests that decode in step. Request i has base[i] + rounds tokens of context and ends when rounds == fin[i]."""

    __slots__ = ("context", "count", "ends", "order", "rounds")

    def __init__(self) -> None:
        self.rounds = 0
        self.count = 0
        self.context = 0
        self.order: deque[int] = deque()  # first come first served; may still hold some that have ended
        self.ends: list[tuple[int, int]] = []

    @property
    def load(self) -> int:
        """What the cap counts: sum(context + 1)."""
        return self.context + self.count


class Requests:
    """Columns, by request."""

    def __init__(self, workload: Workload) -> None:
        count = len(workload)
        self.workload = workload
        self.arrival: list[float] = workload.arrival_s.tolist()
        self.prompt: list[int] = workload.prompt_len.tolist()
        self.output: list[int] = workload.output_len.tolist()
        self.first_token: list[float] = [0.0] * count
        self.finish: list[float] = [0.0] * count
        self.is_done: list[bool] = [False] * count
        self.fin: list[int] = [0] * count
        self.base: list[int] = [0] * count
        self.owner: list[Group | None] = [None] * count  # the group that a request decodes in

    def next_end(self, group: Group) -> int | None:
        """The round in which the next of the group ends; drops what stands there of requests that have left it."""
        ends = group.ends
        while ends:
            end, request = ends[0]
            if self.owner[request] is group and self.fin[request] == end:
                return end
            heappop(ends)
        return None


def cut(group: Group, most: int, requests: Requests) -> tuple[Group, Group]:
    """Two groups: as many from the front as have a load of at most `most`, and the rest. The smaller part is moved
    into a group of its own; its old places among the ends are found to be stale later."""
    order, rounds, is_done, base = group.order, group.rounds, requests.is_done, requests.base
    moved: deque[int] = deque()
    over = group.load - most
    if over < most:
        while over > 0:
            if not is_done[request := order.pop()]:
                over -= base[request] + rounds + 1
                moved.appendleft(request)
        rest = _move_out(group, moved, requests)
        return group, rest
    while True:
        if is_done[request := order.popleft()]:
            continue
        most -= base[request] + rounds + 1
        if most < 0:
            order.appendleft(request)
            return _move_out(group, moved, requests), group
        moved.append(request)


def _move_out(group: Group, moved: deque[int], requests: Requests) -> Group:
    new = Group()
    new.rounds, new.order, new.count = group.rounds, moved, len(moved)
    for request in moved:
        requests.owner[request] = new
        new.context += requests.base[request] + new.rounds
    new.ends = [(requests.fin[i], i) for i in moved]
    heapify(new.ends)
    group.count -= new.count
    group.context -= new.context
    return new


def joined(front: Group, back: Group, requests: Requests) -> Group:
    """One group, those of `front` before those of `back`; the smaller one's members are counted anew."""
    if not front.count:
        return back
    keep, move = (front, back) if front.count >= back.count else (back, front)
    shift = keep.rounds - move.rounds
    moved = [i for i in move.order if not requests.is_done[i]]
    base, fin, owner, ends = requests.base, requests.fin, requests.owner, keep.ends
    for request in moved:
        base[request] -= shift
        fin[request] += shift
        owner[request] = keep
        heappush(ends, (fin[request], request))
    if keep is front:
        keep.order.extend(moved)
    else:
        keep.order.extendleft(reversed(moved))
    keep.count += move.count
    keep.context += move.context
    return keep
