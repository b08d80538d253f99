"""calibrate measures a running cluster by its ordinary API and makes a profile of it.

It decides what to ask and how often, and what the answers come to; kvrelay/calibrate/probes.py sends and reads.

    prefill    lone prompts of several lengths; prompts whose beginning is cached (a context before the chunk); prompts
               longer than a step; several prompts in one step
    decode     batches that run together, short and long contexts: the mean step while all of them run
    handoff    the receipts of all these prompts
    slowdown   where prefill and decode share a host: each alone and both at once, by the batch

Every point is asked for `repeats` times, in rounds over all points in an order of their own, so that a noisy minute
spoils no point alone, and is the median. Some points are held out of the tables; what those say of them is the error.
It assumes that nobody else uses the cluster meanwhile. When its time is over it keeps what it has, each point once at
least.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from kvrelay.calibrate.probes import DecodeSeen, HandoffSeen, PrefillSeen, Prober
from kvrelay.client.client import AsyncClient
from kvrelay.client.types import ClusterStatus, ServedModel, WorkerState
from placement.latency.profile import (
    DecodePoint,
    Fault,
    PoolFacts,
    PrefillPoint,
    Profile,
    ProfileLatency,
    SlowdownPoint,
    TransferPoint,
)

OnProgress = Callable[[str, int, int], None]
ERROR_SHARE = 0.9
MOST_BATCH = 64
LEAST_LEN = 128  # tokens that a sequence may have: a prompt and the steps of a window
MOST_CONTEXT = 4096  # tokens of a batch: what priming it may cost
CONTEXTS_IN_CACHE = 8  # of the prefill worker at least, so that none drives out another
CHUNK_DIFFERENCE = 0.2  # prompts that were in one step took the same time, but for this share


class CalibrationError(Exception):
    """A cluster that cannot be measured: one sentence with the mend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much to measure. `steps`: of decode in one window. `at_most_s`: no second look at anything after that."""

    repeats: int = 5
    steps: int = 32
    slowdown_repeats: int = 3
    at_most_s: float = 150.0
    is_coarse: bool = False  # every second point of the grids


QUICK = Effort(repeats=2, steps=16, slowdown_repeats=1, at_most_s=45.0, is_coarse=True)


@dataclass(slots=True, kw_only=True)
class _Found:
    """Samples by what was asked."""

    prefill: dict[tuple[tuple[int, int], ...], list[float]] = field(default_factory=lambda: defaultdict(list))
    held_out: set[tuple[tuple[int, int], ...]] = field(default_factory=set)
    long: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))  # prompts longer than a step
    handoffs: dict[int, list[HandoffSeen]] = field(default_factory=lambda: defaultdict(list))
    lone: list[PrefillSeen] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)  # between steps of `pack` tokens, one after another
    decode: dict[tuple[int, int, bool], list[DecodeSeen]] = field(default_factory=lambda: defaultdict(list))
    slowdown: dict[int, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))


async def calibrate(
    client: AsyncClient,
    *,
    effort: Effort = Effort(),
    seed: int = 0,
    machine: dict[str, Any] | None = None,
    commit: str = "",
    on_progress: OnProgress = lambda what, done, total: None,
) -> Profile:
    """Raises KvrelayError if the cluster cannot be asked, CalibrationError if it cannot be measured."""
    model, status = await client.model_info(), await client.status()
    ready = [worker for worker in status.workers if worker.state == "ready"]
    pools = {role: [worker for worker in ready if worker.role == role] for role in ("prefill", "decode")}
    _check(model, pools, status)
    run = _Calibration(Prober(client, model, seed), pools, effort, seed, on_progress)
    await run.measure()
    profile = _profile(run, model, pools, machine or {}, commit)
    return replace(profile, router={name: _value(text) for name, text in sorted(status.limits.items())})


def _check(model: ServedModel, pools: dict[str, list[WorkerState]], status: ClusterStatus) -> None:
    for role, workers in pools.items():
        if not workers:
            raise CalibrationError(f"no {role} worker is ready; see kvrelay status")
        kinds = {(w.page_size, w.total_pages, tuple(sorted(w.limits.items()))) for w in workers}
        if len(kinds) > 1:
            names = ", ".join(w.name for w in workers)
            raise CalibrationError(f"the {role} workers {names} differ in memory or limits; give all the same")
    degrees = {role: _degree(workers[0]) for role, workers in pools.items()}
    if len(set(degrees.values())) > 1:
        each = " and ".join(f"{degree} in the {role} pool" for role, degree in degrees.items())
        raise CalibrationError(f"tensor_parallel is {each}; a profile is of one degree, so give both the same")
    if not pools["prefill"][0].page_size:
        raise CalibrationError("the router does not say its workers' page size; it runs another version of kvrelay")
    if model.max_model_len < LEAST_LEN:
        raise CalibrationError(
            f"max_model_len is {model.max_model_len}; give the cluster {LEAST_LEN} or more to be measured"
        )
    if busy := status.num_in_flight + status.num_queued:
        raise CalibrationError(f"{busy} requests are being served; calibrate a cluster that nobody else uses")


def _degree(worker: WorkerState) -> int:
    return int(worker.limits.get("tensor_parallel", 1))


class _Calibration:
    def __init__(
        self,
        prober: Prober,
        pools: dict[str, list[WorkerState]],
        effort: Effort,
        seed: int,
        on_progress: OnProgress,
    ) -> None:
        self.prober = prober
        self.pools = pools
        self.effort = effort
        self.found = _Found()
        self._order = random.Random(seed)
        self._on_progress = on_progress
        limits = pools["prefill"][0].limits
        self.longest = prober.model.max_model_len - 2  # of a prompt that makes two tokens
        self.max_chunk = min(int(limits.get("max_batch_tokens", 512)), self.longest)
        pack = limits.get("pack_tokens", "None")
        self.pack = min(int(pack), self.max_chunk) if pack.isdigit() else self.max_chunk
        self.max_batch = min(int(pools["decode"][0].limits.get("max_batch_size", 64)), MOST_BATCH)
        tokens = min(worker.total_pages * worker.page_size for workers in pools.values() for worker in workers)
        self.max_context = min(MOST_CONTEXT, tokens // CONTEXTS_IN_CACHE)

    @property
    def shares_host(self) -> bool:
        return len({w.address.rpartition(":")[0] for workers in self.pools.values() for w in workers}) == 1

    async def measure(self) -> None:
        await self.prober.prefill([self.prober.prompt(self.pack)])  # opens what is opened at first use
        await self._rounds("prefill and handoff", self._prefill_tasks(), self.effort.repeats)
        await self._rounds("decode", await self._decode_tasks(), self.effort.repeats)
        if self.shares_host:
            await self._rounds("both at once", self._slowdown_tasks(), self.effort.slowdown_repeats)

    async def _rounds(self, what: str, tasks: list[Callable[[], Awaitable[None]]], repeats: int) -> None:
        total = repeats * len(tasks)
        begun_s = time.monotonic()
        for done in range(total):
            if done % len(tasks) == 0:
                self._order.shuffle(tasks)
            if done >= len(tasks) and time.monotonic() - begun_s > self.effort.at_most_s / 3:
                break
            self._on_progress(what, done, total)
            await tasks[done % len(tasks)]()
        self._on_progress(what, total, total)

    # prefill

    def _prefill_tasks(self) -> list[Callable[[], Awaitable[None]]]:
        def task(call: Callable[..., Awaitable[None]], *args: Any) -> Callable[[], Awaitable[None]]:
            return lambda: call(*args)

        lengths, held = prefill_lengths(self.max_chunk, self.effort.is_coarse)
        lengths, held = sorted({*lengths, self.pack}), [length for length in held if length != self.pack]
        tasks = [task(self._lone, length, length in held) for length in (*lengths, *held)]
        tasks += [task(self._behind, n, start, False) for n, start in self._contexts()]
        if len(self.pools["prefill"]) == 1:  # of several, each would take some
            tasks.append(task(self._together, 4, max(1, self.pack // 4), False))
            tasks.append(task(self._together, 2, max(1, self.pack * 3 // 4), True))
        tasks.append(task(self._in_a_row))
        if self.longest >= self.max_chunk + 32:
            tasks.append(task(self._long, min(self.longest, 2 * self.max_chunk)))
        return tasks

    def _contexts(self) -> list[tuple[int, int]]:
        """(tokens to compute, tokens cached before them)"""
        page = self.pools["prefill"][0].page_size
        found = []
        for length in {max(1, self.max_chunk // 8), max(1, self.max_chunk // 2)}:
            room = (self.longest - length) // page * page
            starts = {room} if self.effort.is_coarse else {room // 2 // page * page, room}
            found += [(length, start) for start in starts if start >= page]
        return found

    async def _lone(self, length: int, held_out: bool) -> None:
        seen, handoffs = await self.prober.prefill([self.prober.prompt(length)])
        self.found.lone += seen
        for one in handoffs:
            self.found.handoffs[length].append(one)
        self._add(((length, 0),), seen[0].seconds, held_out)

    async def _behind(self, length: int, start: int, held_out: bool) -> None:
        known = self.prober.prompt(start)
        await self.prober.remember([known])
        seen, _ = await self.prober.prefill([known + self.prober.prompt(length)])
        if seen[0].cached == start:
            self._add(((length, start),), seen[0].seconds, held_out)

    async def _together(self, count: int, length: int, held_out: bool) -> None:
        """Prompts that wait while another one is computed, and then go into one step."""
        prompts = [self.prober.prompt(n) for n in (self.max_chunk, *[length] * count)]
        seen, _ = await self.prober.prefill(prompts)
        times = [one.seconds for one in seen[1:]]
        if max(times) <= (1 + CHUNK_DIFFERENCE) * min(times):
            self._add(((length, 0),) * count, statistics.median(times), held_out)

    async def _in_a_row(self) -> None:
        """Prompts that each have a step of their own, one right after another: from token to token."""
        for seen in await self._series(self.pack, 5):
            self.found.gaps_s += [after.first_token_s - before.first_token_s for before, after in pairwise(seen)]

    async def _series(self, length: int, count: int) -> list[list[PrefillSeen]]:
        """For each prefill worker what it computed right after another prompt, in order. `length` fills a step."""
        prompts = [self.prober.prompt(length) for _ in range(count * len(self.pools["prefill"]))]
        seen, _ = await self.prober.prefill(prompts)
        by_worker: dict[str, list[PrefillSeen]] = defaultdict(list)
        for one in sorted(seen, key=lambda one: one.first_token_s):
            by_worker[one.worker].append(one)
        return [found[1:] for found in by_worker.values()]

    async def _long(self, length: int) -> None:
        seen, _ = await self.prober.prefill([self.prober.prompt(length)])
        self.found.long[length].append(seen[0].seconds)

    def _add(self, chunks: tuple[tuple[int, int], ...], seconds: float, held_out: bool) -> None:
        self.found.prefill[chunks].append(seconds)
        if held_out:
            self.found.held_out.add(chunks)

    # decode

    async def _decode_tasks(self) -> list[Callable[[], Awaitable[None]]]:
        """(batch, prompt) by batch sizes and two lengths of context; the prompts are made once and cached, so that a
        batch is together at once."""
        sizes, held = batch_sizes(self.max_batch, self.effort.is_coarse)
        short = 16
        asked = [(size, short) for size in (*sizes, *held)]
        most = self.longest - self.effort.steps
        asked += [(size, far) for size in sizes if (far := min(most, self.max_context // size)) >= 4 * short]
        workers = len(self.pools["decode"])
        prompts = {length: [] for _, length in asked}  # type: dict[int, list[list[int]]]
        for size, length in asked:
            while len(prompts[length]) < size * workers:
                prompts[length].append(self.prober.prompt(length))
        for known in prompts.values():
            await self.prober.remember(known)

        def task(size: int, length: int) -> Callable[[], Awaitable[None]]:
            return lambda: self._decode(prompts[length][: size * workers], length, size in held)

        return [task(size, length) for size, length in asked]

    async def _decode(self, prompts: list[list[int]], length: int, held_out: bool) -> None:
        for steps in (self.effort.steps, 4 * self.effort.steps):  # without a prefix cache they come one by one
            if length + steps + 2 > self.prober.model.max_model_len:
                break
            seen = await self.prober.decode(prompts, steps)
            for one in seen:
                self.found.decode[one.batch_size, length, held_out].append(one)
            if seen:
                break

    # both at once

    def _slowdown_tasks(self) -> list[Callable[[], Awaitable[None]]]:
        sizes = [size for size in (1, 4, 16, 48) if size <= self.max_batch]
        sizes = sizes[::2] if self.effort.is_coarse else sizes

        def task(size: int) -> Callable[[], Awaitable[None]]:
            return lambda: self._slowdown(size)

        return [task(size) for size in sizes]

    async def _slowdown(self, size: int) -> None:
        """Alone and beside each other, one right after the other, so that both see the same machine."""
        prober, workers = self.prober, len(self.pools["decode"])
        length = min(2 * self.pack, self.max_chunk)
        room = prober.model.max_model_len - 66
        prompts = [prober.prompt(max(16, min(64, room))) for _ in range(size * workers)]
        steps = min(3 * self.effort.steps, room)
        await prober.remember(prompts)
        alone = await prober.decode(prompts, max(self.effort.steps, steps // 2))
        lone = [one for seen in await self._series(length, 4) for one in seen]  # as beside decode, one after another
        beside, fed = await prober.decode_beside_prefill(prompts, steps, length, 2 * len(self.pools["prefill"]))
        if not alone or not beside or not lone or len(fed) < 2:
            return
        prefill = statistics.median(one.seconds for one in fed) / statistics.median(one.seconds for one in lone)
        decode = statistics.median(one.seconds for one in beside) / statistics.median(one.seconds for one in alone)
        self.found.slowdown[size].append((prefill, decode))


def prefill_lengths(max_chunk: int, is_coarse: bool) -> tuple[list[int], list[int]]:
    """Lengths to measure, by doubling and halfway between, and lengths to hold out, elsewhere between."""
    doubled = sorted({1, max_chunk, *(max_chunk >> k for k in range(1, 6) if max_chunk >> k >= 8)})
    between = [(a + b) // 2 for a, b in pairwise(doubled[-3:])] if not is_coarse else []
    grid = sorted({*doubled, *between})
    held = {a + (b - a) * 2 // 5 for a, b in pairwise(grid) if b - a >= 4} - set(grid)
    wanted = sorted(held)[-4:]
    return grid, wanted


def batch_sizes(max_batch: int, is_coarse: bool) -> tuple[list[int], list[int]]:
    """By doubling, and between to hold out."""
    doubled = [1 << k for k in range(max_batch.bit_length()) if 1 << k <= max_batch]
    sizes = sorted({*(doubled[::2] if is_coarse else doubled), max_batch})
    held = sorted({(a + b) // 2 for a, b in pairwise(sizes)} - set(sizes))
    return sizes, held[: 2 if is_coarse else 4]


# What was found, as a profile


def _profile(
    run: _Calibration,
    model: ServedModel,
    pools: dict[str, list[WorkerState]],
    machine: dict[str, Any],
    commit: str,
) -> Profile:
    found = run.found
    lone = [one for one in found.lone if one.prompt_len <= run.pack]
    overhead_s = _overhead_s(found, run.pack)
    message_s = max(1e-5, statistics.median((one.queue_s + one.answer_s) / 2 for one in lone))
    exposed_s = [one.exposed_s for seen in found.handoffs.values() for one in seen]
    profile = Profile(
        model={
            name: getattr(model, name)
            for name in ("name", "architecture", "dtype", "fingerprint", "num_params", "max_model_len")
        },
        machine=machine,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=commit,
        page_size=pools["prefill"][0].page_size,
        tp=_degree(pools["prefill"][0]),
        prefill_pool=_pool(pools["prefill"]),
        decode_pool=_pool(pools["decode"]),
        prefill=_prefill_points(run, overhead_s),
        decode=_decode_points(found),
        transfer=_transfer_points(found),
        prefill_overhead_s=overhead_s,
        message_s=message_s,
        handoff_s=max(0.0, statistics.median(exposed_s) - message_s) if exposed_s else 0.0,
        client_s=max(0.0, statistics.median(one.outside_s + one.route_s for one in found.lone)),
        slowdown=tuple(_slowdown_point(size, pairs) for size, pairs in sorted(found.slowdown.items())),
        notes={"repeats": run.effort.repeats, "steps": run.effort.steps},
    )
    return replace(profile, error=errors(profile))


def _overhead_s(found: _Found, tokens: int) -> float:
    """By how much steps that follow one another take longer than the same step alone: the driver, and what the last
    handoff still computes."""
    alone = found.prefill.get(((tokens, 0),), ())
    return max(0.0, statistics.median(found.gaps_s) - statistics.median(alone)) if found.gaps_s and alone else 0.0


def _pool(workers: Sequence[WorkerState]) -> PoolFacts:
    options = {name: _value(text) for name, text in sorted(workers[0].limits.items())}
    return PoolFacts(count=len(workers), num_pages=workers[0].total_pages, options=options)


def _value(text: str) -> int | float | str | bool:
    if text in ("True", "False"):
        return text == "True"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _prefill_points(run: _Calibration, overhead_s: float) -> tuple[PrefillPoint, ...]:
    found = run.found
    points = [
        PrefillPoint(
            chunks=chunks, seconds=statistics.median(times), repeats=len(times), held_out=chunks in found.held_out
        )
        for chunks, times in sorted(found.prefill.items())
    ]
    whole_s = next((p.seconds for p in points if p.chunks == ((run.max_chunk, 0),)), 0.0)
    is_cached = any(start for point in points for _, start in point.chunks)
    for length, times in found.long.items():  # its second step, by what the first takes
        left_s = statistics.median(times) - whole_s - overhead_s
        if left_s > 0 and length <= 2 * run.max_chunk:
            chunk = (length - run.max_chunk, run.max_chunk)
            points.append(PrefillPoint(chunks=(chunk,), seconds=left_s, repeats=len(times), held_out=is_cached))
    return tuple(points)


def _decode_points(found: _Found) -> tuple[DecodePoint, ...]:
    return tuple(
        DecodePoint(
            batch_size=size,
            context_tokens=round(statistics.median(one.context_tokens for one in seen)),
            seconds=statistics.median(one.seconds for one in seen),
            repeats=len(seen),
            held_out=held_out,
        )
        for (size, _, held_out), seen in sorted(found.decode.items())
    )


def _transfer_points(found: _Found) -> tuple[TransferPoint, ...]:
    points = [
        TransferPoint(
            tokens=length,
            bytes=round(statistics.median(one.bytes for one in seen)),
            seconds=statistics.median(one.seconds for one in seen),
            exposed_s=statistics.median(one.exposed_s for one in seen),
            repeats=len(seen),
        )
        for length, seen in sorted(found.handoffs.items())
    ]
    return tuple(replace(point, held_out=i % 3 == 2) for i, point in enumerate(points))


def _slowdown_point(size: int, pairs: Sequence[tuple[float, float]]) -> SlowdownPoint:
    return SlowdownPoint(
        batch_size=size,
        prefill=max(1.0, statistics.median(prefill for prefill, _ in pairs)),
        decode=max(1.0, statistics.median(decode for _, decode in pairs)),
    )


def errors(profile: Profile) -> Fault:
    """Nine times in ten, at the points held out."""
    latency = ProfileLatency(profile)
    between_s = profile.prefill_overhead_s
    prefill = [(latency.prefill_s(p.chunks) - between_s, p.seconds) for p in profile.prefill if p.held_out]
    decode = [
        (latency.decode_line(point.batch_size, point.context_tokens).step_s, point.seconds)
        for point in profile.decode
        if point.held_out
    ]
    transfer = [(latency.transfer_s(p.tokens), p.seconds) for p in profile.transfer if p.held_out and p.seconds]
    return Fault(prefill=_wrong(prefill), decode=_wrong(decode), transfer=_wrong(transfer))


def _wrong(pairs: Iterable[tuple[float, float]]) -> float:
    shares = sorted(abs(predicted / measured - 1) for predicted, measured in pairs)
    return shares[math.ceil(ERROR_SHARE * len(shares)) - 1] if shares else 0.0
