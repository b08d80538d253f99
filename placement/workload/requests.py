"""Workload is what the simulator is asked to serve: arrival times and lengths, in columns, a million rows if need be.

Made from a trace, from a request list, or drawn: arrivals from a gamma (Poisson is its case of burstiness 1), lengths
from another workload's. All chance comes from the seed given. Times are seconds, the first request at 0; lengths are
tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from placement.workload.closed_loop import ClosedLoop
from placement.workload.traces import MOONCAKE_BLOCK_TOKENS, Shape, WorkloadError, arrivals_s, read_trace

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
NO_INTS: Ints = np.zeros(0, dtype=np.int64)
NO_FLOATS: Floats = np.zeros(0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workload:
    """One row for each request, in the order they come. `blocks[i]` names the runs of `block_len` tokens with which
    prompt i begins; equal names mean equal tokens, so that a prefix cache can hit. Empty: no two prompts share any.
    Published systems (placement/papers) know neither priorities nor clients that leave."""

    arrival_s: Floats
    prompt_len: Ints
    output_len: Ints
    blocks: Sequence[tuple[int, ...]] = ()
    block_len: int = MOONCAKE_BLOCK_TOKENS
    class_of: Ints = field(default_factory=lambda: NO_INTS)  # into class_names; empty: all are of one class
    class_names: tuple[str, ...] = ()
    priority: Ints = field(default_factory=lambda: NO_INTS)  # lower goes first; empty: all have 0
    cancel_after_s: Floats = field(
        default_factory=lambda: NO_FLOATS
    )  # its client leaves then; inf: stays; empty: all do
    slo_ttft_s: Floats = field(default_factory=lambda: NO_FLOATS)  # that it asks for itself; 0: nothing; empty: none do
    slo_tpot_s: Floats = field(default_factory=lambda: NO_FLOATS)
    loop: ClosedLoop | None = None  # None: requests come when they come, whatever becomes of others
    name: str = "requests"

    def __post_init__(self) -> None:
        count = len(self.arrival_s)
        if not count:
            raise WorkloadError(f"{self.name} has no requests; give at least one")
        if len(self.prompt_len) != count or len(self.output_len) != count or len(self.blocks) not in (0, count):
            raise WorkloadError(f"{self.name}: {count} arrivals need as many prompt and output lengths")
        sizes = (("classes", len(self.class_of)), ("priorities", len(self.priority)))
        targets = (("TTFT targets", len(self.slo_ttft_s)), ("TPOT targets", len(self.slo_tpot_s)))
        for key, size in (*sizes, *targets, ("times of cancels", len(self.cancel_after_s))):
            if size not in (0, count):
                raise WorkloadError(f"{self.name}: {count} arrivals need as many {key}, or none")
        if not (self.cancel_after_s >= 0).all():
            raise WorkloadError(
                f"{self.name}: a client leaves before its request comes; give seconds, 0 or more, or inf"
            )
        if len(self.class_of) and not 0 <= self.class_of.min() <= self.class_of.max() < len(self.class_names):
            raise WorkloadError(f"{self.name}: a request has class {self.class_of.max()}; name it in class_names")
        for key, lengths in (("prompt", self.prompt_len), ("output", self.output_len)):
            if lengths.min() < 1:
                row = int(lengths.argmin())
                raise WorkloadError(
                    f"{self.name}: the {key} of request {row} has {lengths[row]} tokens; give 1 or more"
                )
        if not np.isfinite(self.arrival_s).all():
            raise WorkloadError(f"{self.name}: an arrival time is not a number; give seconds")
        if count > 1 and (gaps := np.diff(self.arrival_s)).min() < 0:
            row = int(gaps.argmin()) + 1
            raise WorkloadError(f"{self.name}: request {row} arrives before the one above it; sort by arrival time")

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def has_decode(self) -> bool:
        """Not where every output is one token, which prefill makes."""
        return bool(self.output_len.max() > 1)

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last."""
        return float(self.arrival_s[-1] - self.arrival_s[0])

    @property
    def rate(self) -> float:
        """Requests per second over the whole; infinite when all come at once."""
        return (len(self) - 1) / self.duration_s if self.duration_s else float("inf")

    def faster(self, factor: float) -> Workload:
        """The same requests, arriving `factor` times as fast: bursts and lulls stay."""
        if not 0 < factor < float("inf"):
            raise WorkloadError(f"speed-up is {factor:g}; give a number above 0")
        return replace(self, arrival_s=self.arrival_s / factor)

    def to_rate(self, rate: float) -> Workload:
        """Sped up or slowed down to `rate` requests/s over the whole."""
        return self.faster(rate / self.rate)

    def first(self, count: int) -> Workload:
        return replace(
            self,
            arrival_s=self.arrival_s[:count],
            prompt_len=self.prompt_len[:count],
            output_len=self.output_len[:count],
            blocks=self.blocks[:count],
            class_of=self.class_of[:count],
            priority=self.priority[:count],
            cancel_after_s=self.cancel_after_s[:count],
            slo_ttft_s=self.slo_ttft_s[:count],
            slo_tpot_s=self.slo_tpot_s[:count],
        )

    def without_prefixes(self, rows: Ints) -> Workload:
        """These of its requests; they share no prefix."""
        return Workload(
            arrival_s=self.arrival_s[rows],
            prompt_len=self.prompt_len[rows],
            output_len=self.output_len[rows],
            name=self.name,
            **self.marks(rows),
        )

    def resampled(self, count: int, rate: float, *, seed: int) -> Workload:
        """`count` Poisson requests at a rate, lengths drawn from these by rows, no prefix shared."""
        rng = np.random.default_rng(seed)
        rows = rng.integers(0, len(self), size=count)
        return Workload(
            arrival_s=np.asarray(arrivals_s(count, rate, 1.0, rng)),
            prompt_len=self.prompt_len[rows],
            output_len=self.output_len[rows],
            name=f"{count} requests after {self.name}",
            **self.marks(rows),
        )

    def marks(self, rows: Ints) -> dict[str, Any]:
        """What is said of these of its requests, beside times and lengths."""
        columns = ("class_of", "priority", "cancel_after_s", "slo_ttft_s", "slo_tpot_s")
        taken = {key: column[rows] for key in columns if len(column := getattr(self, key))}
        return {"class_names": self.class_names, **taken}

    def targets_s(self, ttft_s: float, tpot_s: float) -> tuple[Floats, Floats]:
        """The TTFT and TPOT target of each request: what it asks for itself, else these."""
        return own_or(self.slo_ttft_s, ttft_s, len(self)), own_or(self.slo_tpot_s, tpot_s, len(self))


def own_or(own_s: Floats, usual_s: float, count: int) -> Floats:
    """`own_s`: of `count` requests; 0: this one has none; empty: none has."""
    usual = np.full(count, usual_s)
    return np.where(own_s > 0, own_s, usual) if len(own_s) else usual


def from_shapes(shapes: Sequence[Shape], name: str) -> Workload:
    has_blocks = any(shape.blocks for shape in shapes)
    has_priorities = any(shape.priority for shape in shapes)
    has_cancels = any(shape.cancel_after_s < np.inf for shape in shapes)
    names = tuple(sorted({shape.kind for shape in shapes} - {""}))
    if names and not all(shape.kind for shape in shapes):
        raise WorkloadError(f"{name}: some requests have no class; give each one or take the column out")
    return Workload(
        arrival_s=np.array([shape.at_s for shape in shapes]),
        prompt_len=np.array([shape.input_len for shape in shapes], dtype=np.int64),
        output_len=np.array([shape.output_len for shape in shapes], dtype=np.int64),
        blocks=[shape.blocks for shape in shapes] if has_blocks else (),
        block_len=shapes[0].block_len if shapes else MOONCAKE_BLOCK_TOKENS,
        class_of=np.array([names.index(shape.kind) for shape in shapes], dtype=np.int64) if names else NO_INTS,
        class_names=names,
        priority=np.array([shape.priority for shape in shapes], dtype=np.int64) if has_priorities else NO_INTS,
        cancel_after_s=np.array([shape.cancel_after_s for shape in shapes]) if has_cancels else NO_FLOATS,
        name=name,
    )


def from_trace(path: Path) -> Workload:
    """A CSV (Azure's, or another with arrivals and lengths) or a Mooncake JSONL. Raises WorkloadError naming file, line
    and key."""
    return from_shapes(read_trace(path), path.name)


def from_rows(rows: Sequence[Sequence[float]], name: str = "requests") -> Workload:
    """Rows of [arrival s, prompt tokens, output tokens]."""
    columns = np.asarray(rows, dtype=np.float64)
    if columns.ndim != 2 or columns.shape[1] != 3:
        raise WorkloadError(f"{name}: give rows of arrival s, prompt tokens, output tokens")
    return Workload(
        arrival_s=columns[:, 0],
        prompt_len=columns[:, 1].astype(np.int64),
        output_len=columns[:, 2].astype(np.int64),
        name=name,
    )


def read_request_list(path: Path) -> Workload:
    """A JSON object with `reqs`: rows of [arrival s, prompt tokens, output tokens], arrivals at 1 request/s or as they
    are. Raises WorkloadError naming the file."""
    try:
        read: Any = json.loads(path.read_text(encoding="utf-8"))
        return from_rows(read["reqs"], path.name)
    except OSError as error:
        raise WorkloadError(f"request list {path} cannot be read: {error.strerror}; give a file") from None
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, WorkloadError):
            raise
        raise WorkloadError(f"{path} is no request list; give a JSON object with reqs, rows of 3 numbers") from None
