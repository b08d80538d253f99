"""Traffic draws the requests that an estimate is made with: lengths like a workload's, arrivals at any rate.

One seed gives one sequence of lengths and of unit-rate gaps, whatever the rate and the number of requests: two rates,
or two candidates, are compared on the same requests (paired random numbers), and a longer run begins as a shorter one
did. Prompts that share prefixes keep their order, lap after lap, each lap with prefixes of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from placement.plan import RequestClass
from placement.workload.closed_loop import ClosedLoop
from placement.workload.requests import NO_INTS, Floats, Ints, Workload
from placement.workload.traces import WorkloadError

ROUNDED = 0.02  # by so much, and by chance, a share may be beside that of a trace


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Traffic:
    """`burstiness`: shape of the gamma-distributed gaps; 1 is Poisson, less is burstier. `is_replay`: the workload's
    own gaps, bursts and lulls, at a pace that gives the rate; it is then played as it is, as often as the count
    asks. `are_lengths_apart`: outputs are drawn by themselves, whatever the prompt. `streams` of the seed: for gaps,
    rows, and outputs that are drawn apart. `loop`: of clients who wait for their answers; at an infinite rate they set
    the pace."""

    source: Workload
    burstiness: float = 1.0
    is_replay: bool = False
    are_lengths_apart: bool = False
    loop: ClosedLoop | None = None
    streams: tuple[int, int, int] = (1, 0, 2)

    def __post_init__(self) -> None:
        if not (self.burstiness > 0 and np.isfinite(self.burstiness)):
            raise WorkloadError(f"burstiness is {self.burstiness:g}; give a number above 0 (1 is Poisson)")
        if self.is_replay and not self.source.duration_s:
            raise WorkloadError(f"{self.source.name}: all requests come at once; a replay needs times that differ")

    @property
    def is_bursty(self) -> bool:
        """More than Poisson arrivals are, or may be."""
        return self.is_replay or self.burstiness < 1

    def spread(self) -> Traffic:
        """The same requests as Poisson arrivals."""
        return replace(self, burstiness=1.0, is_replay=False)

    def draw(self, rate: float, count: int, seed: int) -> Workload:
        """`count` requests at `rate` a second, the first at 0."""
        drawn = self._drawn(rate, count, seed)
        return replace(drawn, arrival_s=drawn.arrival_s - drawn.arrival_s[0])

    def during(self, seconds: float, rate: float, seed: int) -> Workload:
        """All that arrive within so many seconds, at least one; of a replay, the workload's own requests, once."""
        if self.is_replay:
            return self.source.to_rate(rate)
        mean = rate * seconds
        most = int(mean + 8 * (mean / min(1.0, self.burstiness)) ** 0.5 + 64)
        drawn = self._drawn(rate, most, seed)
        count = max(1, int(np.searchsorted(drawn.arrival_s, seconds)))
        return replace(drawn.first(count), name=f"{count} requests after {self.source.name}")

    def _drawn(self, rate: float, count: int, seed: int) -> Workload:
        gaps, lengths, outputs = (np.random.default_rng([seed, stream]) for stream in self.streams)
        rows, laps = self._rows(count, lengths)
        output_rows = outputs.integers(0, len(self.source), size=count) if self.are_lengths_apart else rows
        if self.is_replay:
            arrival_s = self._replayed(rows, laps) * (self.source.rate / rate)
        else:
            unit = gaps.gamma(shape=self.burstiness, scale=1 / self.burstiness, size=count)
            arrival_s = np.cumsum(unit) / rate
        return Workload(
            arrival_s=arrival_s,
            prompt_len=self.source.prompt_len[rows],
            output_len=self.source.output_len[output_rows],
            blocks=self._blocks(rows, laps),
            block_len=self.source.block_len,
            loop=self.loop,
            name=f"{count} requests after {self.source.name}",
            **self.source.marks(rows),
        )

    def _rows(self, count: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """Which rows of the source, and in which lap over it."""
        size = len(self.source)
        if self.is_replay:
            place = np.arange(count)
        elif self.source.blocks:
            place = np.arange(count) + rng.integers(0, size)
        else:
            return rng.integers(0, size, size=count), np.zeros(count, dtype=np.int64)
        return place % size, place // size

    def _replayed(self, rows: Ints, laps: Ints) -> Floats:
        lap_s = self.source.duration_s + 1 / self.source.rate
        times: Floats = self.source.arrival_s[rows] + laps * lap_s
        return times

    def _blocks(self, rows: Ints, laps: Ints) -> Sequence[tuple[int, ...]]:
        source = self.source.blocks
        if not source:
            return ()
        if not laps.any():
            return [source[row] for row in rows]
        apart = 1 + max((max(blocks) for blocks in source if blocks), default=0)
        shifts = (laps * apart).tolist()
        return [
            tuple(block + shift for block in source[row]) if shift else source[row]
            for row, shift in zip(rows, shifts, strict=True)
        ]


def with_classes(workload: Workload, classes: Sequence[RequestClass], seed: int) -> Workload:
    """The workload with its class column in the order of `classes`, and their targets, which its requests ask for;
    where it has none, drawn by their shares. Raises WorkloadError, also where the column's shares are others."""
    names = tuple(each.name for each in classes)
    if not names:
        return replace(workload, class_of=NO_INTS, class_names=())
    if len(set(names)) < len(names):
        raise WorkloadError(f"classes are {', '.join(names)}; give each its own name")
    if len(workload.class_of):
        if unknown := [name for name in workload.class_names if name not in names]:
            raise WorkloadError(f"{workload.name}: class {unknown[0]} has no targets; give them, or take it out")
        order = np.array([names.index(name) for name in workload.class_names], dtype=np.int64)
        class_of = order[workload.class_of]
        _raise_if_shares_differ(workload.name, class_of, classes)
        return _classed(workload, class_of, classes)
    shares = np.array([each.share for each in classes], dtype=np.float64)
    if not (shares > 0).all():
        raise WorkloadError(f"the share of class {names[int(shares.argmin())]} is {shares.min():g}; give one above 0")
    by_name = np.argsort(names)  # in whichever order they are given, the same requests are of each
    p = shares[by_name] / shares[by_name].sum()
    drawn = np.random.default_rng([seed, 2]).choice(by_name, size=len(workload), p=p)
    return _classed(workload, drawn.astype(np.int64), classes)


def _raise_if_shares_differ(name: str, class_of: Ints, classes: Sequence[RequestClass]) -> None:
    """The trace's own shares are what is planned for: others would be ignored."""
    counts = np.bincount(class_of, minlength=len(classes)).tolist()
    if missing := [each.name for each, count in zip(classes, counts, strict=True) if not count]:
        raise WorkloadError(f"{name}: no request is of class {missing[0]}; give its name as there, or take it out")
    whole = sum(each.share for each in classes)
    for each, count in zip(classes, counts, strict=True):
        said, has = each.share / whole, count / len(class_of)
        if abs(said - has) > ROUNDED + 3 * (has * (1 - has) / len(class_of)) ** 0.5:
            raise WorkloadError(
                f"the share of class {each.name} is {said:.3g}, and {has:.3g} of the requests of {name} are of it; "
                "give the trace's share, or a trace without a class column"
            )


def _classed(workload: Workload, class_of: Ints, classes: Sequence[RequestClass]) -> Workload:
    targets_s = np.array([(each.slo.ttft_s, each.slo.tpot_s) for each in classes])
    targets_s[np.isinf(targets_s)] = 0.0  # as a request says that it wants none
    ttft_s, tpot_s = targets_s[class_of].T
    names = tuple(each.name for each in classes)
    return replace(workload, class_of=class_of, class_names=names, slo_ttft_s=ttft_s, slo_tpot_s=tpot_s)
