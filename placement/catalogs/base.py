"""Catalog says what can be bought: for each parallel degree of a model on a kind of GPU, the worker that it makes.

It is where a latency model, a memory budget and a price meet; the search above it knows neither rooflines nor tables.
A degree that cannot be had is answered with the reason, in one sentence, so that the report can say why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from placement.latency.base import LatencyModel
from placement.latency.speculation import Speculation


class PlanError(ValueError):
    """What was asked for cannot be planned: one sentence naming the key, the value and the mend."""


@dataclass(frozen=True, slots=True, order=True)
class Degrees:
    """A worker's tensor- and pipeline-parallel degree. `threads`: of each of its processes, where they run on a CPU, so
    that what is counted as GPUs is cores. 0: on GPUs, or what a worker has is not known."""

    tp: int = 1
    pp: int = 1
    threads: int = 0

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * max(1, self.threads)

    @property
    def unit(self) -> str:
        """What a worker takes so many of."""
        return "core" if self.threads else "GPU"

    def __str__(self) -> str:
        cut = f"TP {self.tp}" if self.pp == 1 else f"TP {self.tp} x PP {self.pp}"
        if not self.threads:
            return cut
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return threads if self.tp == self.pp == 1 else f"{cut} of {threads}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCost:
    """What one GPU (or, for CPU workers, one worker's share of its machine) costs while it runs."""

    usd_per_gpu_hour: float
    watts_per_gpu: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One worker of given degrees.

    `error`: by how much the latency model was wrong where it was checked, as a share of a time (0.1: nine times in ten
    within 10%). `num_pages` pages of `page_size` tokens are left for KV beside the weights. `max_len`: tokens of a
    request at most, however much KV there is room for; 0: no limit is known.
    """

    degrees: Degrees
    latency: LatencyModel
    num_pages: int
    page_size: int = 16
    max_len: int = 0
    max_batch_tokens: int = 2048  # of a prefill step
    pack_tokens: int | None = None  # no prompt joins a prefill step that has so many; None: max_batch_tokens
    max_batch_size: int = 256  # of a decode step
    step_overhead_s: float = 0.0
    message_s: float = 0.0005  # one way, between two processes
    handoff_s: float = 0.0  # what a handoff takes beside the bytes and a message
    error: float = 0.0
    slowdown: tuple[tuple[int, float, float], ...] = ()  # by a worker of the other phase on its host, if it shares one:
    # rows of (requests that decode, factor of a prefill step, factor of their decode step)
    speculation: Speculation | None = None  # where it is asked whether to guess ahead
    speculative_pages: int = 0  # are left then, beside a draft model

    @property
    def kv_tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def longest(self) -> int:
        """Tokens of a request that it serves, at most."""
        return min(self.kv_tokens, self.max_len or self.kv_tokens)


class Catalog(Protocol):
    @property
    def model(self) -> str:
        """What is served, for the report."""

    @property
    def hardware(self) -> str:
        """The kind of GPU, for the report."""

    @property
    def gpus_per_node(self) -> int:
        """GPUs that share the fast link; a stage with more of them than this cannot be."""

    @property
    def cost(self) -> MachineCost: ...

    def degrees(self, max_gpus: int) -> Sequence[Degrees]:
        """The degrees worth asking for, that take at most `max_gpus`."""

    def offer(self, degrees: Degrees, *, within_node: bool = True) -> Offer | str:
        """The worker, or why there is none. `within_node` False: its KV leaves over the link between nodes."""
