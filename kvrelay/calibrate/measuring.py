"""Measuring asks a cluster what a profile is made of, in rounds, and keeps the samples; probes send and read.

    prefill    lone prompts of several lengths; prompts whose beginning is cached (a context before the chunk); prompts
               longer than a step; several prompts in one step
    decode     batches that run together, short and long contexts: the mean step while all of them run
    handoff    the receipts of all these prompts
    slowdown   where prefill and decode share a host: each alone and both at once, by the batch
    mixed      of a mixed worker, instead of the two before: steps of both, by the batch and the chunk

Every point is asked for `repeats` times, in rounds over all points in an order of their own, so that a noisy minute
spoils no point alone. When its time is over it keeps what it has, each point once at least.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from kvrelay.calibrate.effort import Effort, batch_sizes, prefill_lengths
from kvrelay.calibrate.probes import DecodeSample, HandoffSample, PrefillSample, Prober
from kvrelay.client.types import WorkerState

OnProgress = Callable[[str, int, int], None]
MOST_BATCH = 64
MOST_CONTEXT = 4096  # tokens of a batch: what priming it may cost
CONTEXTS_IN_CACHE = 8  # of the prefill worker at least, so that none drives out another
LEAST_WINDOW_S = 0.25  # of steps, where more can be had: a client reads some ms late, at either end
CHUNK_DIFFERENCE = 0.2  # prompts that were in one step took the same time, but for this share


@dataclass(slots=True, kw_only=True)
class Samples:
    """Samples by what was asked."""

    prefill: dict[tuple[tuple[int, int], ...], list[float]] = field(default_factory=lambda: defaultdict(list))
    held_out: set[tuple[tuple[int, int], ...]] = field(default_factory=set)
    long: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))  # prompts longer than a step
    handoffs: dict[int, list[HandoffSample]] = field(default_factory=lambda: defaultdict(list))
    lone: list[PrefillSample] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)  # between steps of `pack` tokens, one after another
    decode: dict[tuple[int, int, bool], list[DecodeSample]] = field(default_factory=lambda: defaultdict(list))
    slowdown: dict[int, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    mixed: dict[tuple[int, int, bool], list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))


class Measuring:
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
        self.samples = Samples()
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
        self.chunk = min(int(limits.get("chunk_tokens", 0)), self.max_chunk)

    @property
    def is_mixed(self) -> bool:
        return self.pools["prefill"][0].role == "mixed"

    @property
    def shares_host(self) -> bool:
        return len({w.address.rpartition(":")[0] for workers in self.pools.values() for w in workers}) == 1

    async def measure(self) -> None:
        await self.prober.prefill([self.prober.prompt(self.pack)])  # opens what is opened at first use
        await self._rounds("prefill and handoff", self._prefill_tasks(), self.effort.repeats)
        await self._rounds("decode", await self._decode_tasks(), self.effort.repeats)
        if self.is_mixed:
            await self._rounds("steps of both", self._mixed_tasks(), self.effort.slowdown_repeats)
        elif self.shares_host:
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
        pairs = []
        for length in {max(1, self.max_chunk // 8), max(1, self.max_chunk // 2)}:
            room = (self.longest - length) // page * page
            starts = {room} if self.effort.is_coarse else {room // 2 // page * page, room}
            pairs += [(length, start) for start in starts if start >= page]
        return pairs

    async def _lone(self, length: int, held_out: bool) -> None:
        samples, handoffs = await self.prober.prefill([self.prober.prompt(length)])
        self.samples.lone += samples
        for sample in handoffs:
            self.samples.handoffs[length].append(sample)
        self._add(((length, 0),), samples[0].seconds, held_out)

    async def _behind(self, length: int, start: int, held_out: bool) -> None:
        known = self.prober.prompt(start)
        await self.prober.remember([known])
        samples, _ = await self.prober.prefill([known + self.prober.prompt(length)])
        if samples[0].cached == start:
            self._add(((length, start),), samples[0].seconds, held_out)

    async def _together(self, count: int, length: int, held_out: bool) -> None:
        """Prompts that wait while another one is computed, and then go into one step."""
        prompts = [self.prober.prompt(n) for n in (self.max_chunk, *[length] * count)]
        samples, _ = await self.prober.prefill(prompts)
        times = [sample.seconds for sample in samples[1:]]
        if max(times) <= (1 + CHUNK_DIFFERENCE) * min(times):
            self._add(((length, 0),) * count, statistics.median(times), held_out)

    async def _in_a_row(self) -> None:
        """Prompts that each have a step of their own, one right after another: from token to token."""
        for samples in await self._series(self.pack, 5):
            self.samples.gaps_s += [after.first_token_s - before.first_token_s for before, after in pairwise(samples)]

    async def _series(self, length: int, count: int) -> list[list[PrefillSample]]:
        """For each prefill worker what it computed right after another prompt, in order. `length` fills a step."""
        prompts = [self.prober.prompt(length) for _ in range(count * len(self.pools["prefill"]))]
        samples, _ = await self.prober.prefill(prompts)
        by_worker: dict[str, list[PrefillSample]] = defaultdict(list)
        for sample in sorted(samples, key=lambda sample: sample.first_token_s):
            by_worker[sample.worker].append(sample)
        return [row[1:] for row in by_worker.values()]

    async def _long(self, length: int) -> None:
        samples, _ = await self.prober.prefill([self.prober.prompt(length)])
        self.samples.long[length].append(samples[0].seconds)

    def _add(self, chunks: tuple[tuple[int, int], ...], seconds: float, held_out: bool) -> None:
        self.samples.prefill[chunks].append(seconds)
        if held_out:
            self.samples.held_out.add(chunks)

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
        samples: list[DecodeSample] = []
        for steps in (self.effort.steps, 4 * self.effort.steps):  # without a prefix cache they come one by one
            if length + steps + 2 > self.prober.model.max_model_len:
                break
            samples = await self.prober.decode(prompts, steps) or samples
            if samples and min(sample.ended_s - sample.begun_s for sample in samples) >= LEAST_WINDOW_S:
                break
        for sample in samples:
            self.samples.decode[sample.batch_size, length, held_out].append(sample)

    # both at once

    def _sizes(self) -> list[int]:
        sizes = [size for size in (1, 4, 16, 48) if size <= self.max_batch]
        return sizes[::2] if self.effort.is_coarse else sizes

    def _slowdown_tasks(self) -> list[Callable[[], Awaitable[None]]]:
        def task(size: int) -> Callable[[], Awaitable[None]]:
            return lambda: self._slowdown(size)

        return [task(size) for size in self._sizes()]

    async def _slowdown(self, size: int) -> None:
        """Alone and beside each other, one right after the other, so that both see the same machine."""
        prober, workers = self.prober, len(self.pools["decode"])
        length = min(2 * self.pack, self.max_chunk)
        room = prober.model.max_model_len - 66
        prompts = [prober.prompt(max(16, min(64, room))) for _ in range(size * workers)]
        steps = min(3 * self.effort.steps, room)
        await prober.remember(prompts)
        alone = await prober.decode(prompts, max(self.effort.steps, steps // 2))
        series = await self._series(length, 4)  # as beside decode, one after another
        lone = [sample for samples in series for sample in samples]
        beside, fed = await prober.decode_beside_prefill(prompts, steps, length, 2 * len(self.pools["prefill"]))
        if not alone or not beside or not lone or len(fed) < 2:
            return
        prefill = _median_s(fed) / _median_s(lone)
        decode = _median_s(beside) / _median_s(alone)
        self.samples.slowdown[size].append((prefill, decode))

    def _mixed_tasks(self) -> list[Callable[[], Awaitable[None]]]:
        """Beside each batch a short chunk and a whole one, and beside the largest one between them to hold out."""

        def task(size: int, share: float, held_out: bool) -> Callable[[], Awaitable[None]]:
            length = round(share * min(self.chunk, self.max_chunk - size))  # more would take a second step
            return lambda: self._mixed(size, max(1, length), held_out)

        sizes = self._sizes()
        asked = [(size, share, False) for size in sizes for share in (0.25, 1.0)]
        return [task(*each) for each in (*asked, (sizes[-1], 0.6, True))]

    async def _mixed(self, size: int, length: int, held_out: bool) -> None:
        """Prompts of one chunk, one after another, each in a step of a batch that decodes."""
        prober = self.prober
        room = prober.model.max_model_len - 66
        prompts = [prober.prompt(max(16, min(64, room))) for _ in range(size)]
        await prober.remember(prompts)
        beside, fed = await prober.decode_beside_prefill(prompts, min(2 * self.effort.steps, room), length, 1)
        for sample in beside:
            self.samples.mixed[size, length, held_out] += [(each.seconds, sample.context_tokens) for each in fed]


def _median_s(samples: Sequence[PrefillSample] | Sequence[DecodeSample]) -> float:
    return statistics.median(sample.seconds for sample in samples)
