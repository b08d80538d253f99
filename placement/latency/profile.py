"""A profile is what was measured of one pair of workers, or of one mixed worker: how long their steps take, what they
hold, how sure that is.

`kvrelay calibrate` writes it (JSON), ProfileLatency and ProfileCatalog answer the planner's questions from it, and the
simulator takes from it what workers on one host cost each other. Values only. Times are seconds. Points that say
`held_out` are in no line of a latency model: `error` comes from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from placement.latency.base import LatencyError
from placement.latency.under_load import UnderLoad, wrong_by


class ProfileError(LatencyError):
    """A profile that cannot be used: one sentence naming the file, the key and the mend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPoint:
    """One kind of step: chunks of (tokens computed, tokens before them); the median of `repeats`."""

    chunks: tuple[tuple[int, int], ...]
    seconds: float
    repeats: int = 1
    held_out: bool = False

    @property
    def tokens(self) -> int:
        return sum(length for length, _ in self.chunks)

    @property
    def attended(self) -> float:
        """Tokens that each token attends to, itself counted, on average."""
        return sum(length * (start + (length + 1) / 2) for length, start in self.chunks) / self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePoint:
    """A step of a batch that attends to `context_tokens` in all; from one step's begin to the next."""

    batch_size: int
    context_tokens: int
    seconds: float
    repeats: int = 1
    held_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPoint(PrefillPoint):
    """A step that also decodes for `batch_size` requests, which attend to `context_tokens` in all."""

    batch_size: int
    context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPoint:
    """A handoff: seconds in which bytes moved, and what of them prefill did not hide."""

    tokens: int
    bytes: int
    seconds: float
    exposed_s: float
    repeats: int = 1
    held_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowdownPoint:
    """Workers on one host, both at work: by how much a decode step of this batch size and a prefill step beside it are
    longer than alone (1.2: a fifth)."""

    batch_size: int
    prefill: float
    decode: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """By how much the tables were wrong at the points held out, nine times in ten, as a share of the time."""

    prefill: float = 0.0
    decode: float = 0.0
    transfer: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFacts:
    """What all workers of one role have in common. `options`: limits of their policies, by WorkerOptions' names."""

    count: int
    num_pages: int
    options: Mapping[str, int | float | str | bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    model: Mapping[str, Any]  # name, architecture, dtype, fingerprint, num_params, max_model_len
    machine: Mapping[str, Any]
    date: str
    commit: str
    page_size: int
    prefill_pool: PoolFacts
    decode_pool: PoolFacts
    prefill: tuple[PrefillPoint, ...]
    decode: tuple[DecodePoint, ...]
    transfer: tuple[TransferPoint, ...]
    mixed: tuple[MixedPoint, ...] = ()  # there are some where the workers are mixed: both pools are then the one
    tp: int = 1
    pp: int = 1
    threads: int = 0  # of each of a worker's processes; 0: of workers on GPUs, or not known
    router: Mapping[str, int | float | str | bool] = field(default_factory=dict)  # limits of its policy
    prefill_overhead_s: float = 0.0  # what a prefill worker does between two steps; decode steps have theirs in them
    message_s: float = 0.0005  # one way, between two processes
    handoff_s: float = 0.0  # what a handoff takes beside the bytes: announcing, checking, committing
    client_s: float = 0.0  # of what a client waits for a token: to the router, in it, and back
    slowdown: tuple[SlowdownPoint, ...] = ()  # empty: the workers do not share a host
    error: Fault = field(default_factory=Fault)
    load: UnderLoad | None = None  # what a live load showed; None: none was served
    notes: Mapping[str, Any] = field(default_factory=dict)  # how it was measured; load of the machine
    name: str = "profile"

    @property
    def is_mixed(self) -> bool:
        return bool(self.mixed)

    @property
    def is_shared_host(self) -> bool:
        return bool(self.slowdown)

    @property
    def by_batch(self) -> tuple[tuple[int, float, float], ...]:
        """As SharedHost has it: what the load showed, else the probes; empty where the workers share no host."""
        if not self.slowdown or self.load is None:
            return tuple((point.batch_size, point.prefill, point.decode) for point in self.slowdown)
        prefill, decode = self.load.prefill, self.load.decode
        return ((1, prefill.beside / prefill.alone, decode.beside / decode.alone),)

    @property
    def loaded_handoff_s(self) -> float:
        """What a handoff takes beside its bytes while all are at work, where that is known."""
        return self.load.handoff_s if self.load else self.handoff_s

    @property
    def wrong_by(self) -> tuple[float, float]:
        """A time of prefill and of decode, nine times in ten, as a share."""
        load = self.load
        swings = (load.prefill, load.decode) if load else (None, None)
        return wrong_by(self.error.prefill, swings[0]), wrong_by(self.error.decode, swings[1])
