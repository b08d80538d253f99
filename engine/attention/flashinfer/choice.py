"""Which of FlashInfer's kernels serves a layer's shape on this GPU: measured at load, and remembered.

A kernel is tried on pages in random order whose unowned bytes, and those past each sequence's end, are NaN. What it
gives must agree with the torch reference; of those that do, the fastest is taken. Nothing is taken on trust: a kernel
that ignores an option, or reads what is not its own, fails here and is not used.

The memory of it is one JSON file in the cache folder, by GPU, library version and shape.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.attention.base import AttentionCall, StepMeta
from engine.attention.flashinfer.backend import FlashInferBackend
from engine.attention.flashinfer.build import build
from engine.attention.flashinfer.shapes import FP8, KernelChoice, Shape, decode_candidates, prefill_candidates
from engine.attention.tables import page_tables
from engine.attention.torch_backend import TorchBackend

logger = logging.getLogger(__name__)

TOLERANCE = 2e-2  # of the output's norm: a half-precision output against one accumulated in float32
DECODE = (32, 1024)  # sequences, keys of each
PREFILL = (2, 2048)  # the second is shorter, and ends within a page
LONGER_THAN_WINDOW = 1.25  # a trial's sequences, at least
REPEATS = 10


@dataclass(frozen=True, slots=True)
class Measured:
    """How a kernel did: `error` relative to the reference's norm, and its time."""

    error: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Problem:
    """A step over pages of its own."""

    q_THD: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    meta: StepMeta
    call: AttentionCall


def choose(what: str, names: Sequence[str], measure: Callable[[str], Measured]) -> str:
    """The fastest name whose answer is right. Raises RuntimeError with each one's failing when none is."""
    right: dict[str, float] = {}
    wrong: list[str] = []
    for name in names:
        try:
            result = measure(name)
        except Exception as error:  # a kernel that cannot be built or run here is one not to take
            wrong.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
            continue
        if result.error <= TOLERANCE:  # NaN is not
            right[name] = result.seconds
        else:
            wrong.append(f"{name}: relative error {result.error:.2g}")
    for failing in wrong:
        logger.warning("%s is not served by %s", what, failing)
    if not right:
        raise RuntimeError(f"no kernel of FlashInfer gives the right answer for {what}: {'; '.join(wrong)}")
    best = min(right, key=lambda name: right[name])
    logger.info("%s: %s of %s", what, best, {name: f"{seconds * 1e6:.0f} us" for name, seconds in right.items()})
    return best


def measured(backend: FlashInferBackend, shapes: Sequence[Shape], remembered: Path | None = None) -> FlashInferBackend:
    """The backend with a kernel chosen for each shape: from memory where it was measured before."""
    path = memory_path() if remembered is None else remembered
    device = backend.flashinfer.device
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    unknown = [shape for shape in shapes if _key(backend, shape) not in _recall(path)]
    if unknown and device.type == "cuda":
        build(shapes, capability)
    choices: dict[Shape, KernelChoice] = {}
    for shape in shapes:
        key = _key(backend, shape)
        names = _recall(path).get(key)
        if names is None:
            names = _measure(backend, shape, capability)
            _remember(path, key, names)
        choices[shape] = KernelChoice(**names)
    return FlashInferBackend(backend.flashinfer, choices)


def _measure(backend: FlashInferBackend, shape: Shape, capability: tuple[int, int]) -> dict[str, str]:
    names: dict[str, str] = {}
    for kind, candidates, size in (
        ("prefill", prefill_candidates(shape, capability), PREFILL),
        ("decode", decode_candidates(shape, capability), DECODE),
    ):
        sequences, keys = past_window(size, shape.window)
        problem = make_problem(shape, sequences, keys, 1 if kind == "decode" else size[1], backend.flashinfer.device)
        wanted = answer(TorchBackend(), problem)

        def measure(name: str, kind: str = kind, problem: Problem = problem, wanted: torch.Tensor = wanted) -> Measured:
            return try_kernel(backend.with_choice(shape, KernelChoice(**{kind: name})), problem, wanted)

        names[kind] = choose(f"{kind} of {_text(shape)}", candidates, measure)
    return names


def past_window(size: tuple[int, int], window: int) -> tuple[int, int]:
    """(sequences, keys): about as many keys in all, but each sequence well longer than the window. In shorter ones a
    kernel that ignores the window would look right."""
    sequences, keys = size
    longer = int(window * LONGER_THAN_WINDOW)
    return (sequences, keys) if longer <= keys else (max(min(sequences, 2), sequences * keys // longer), longer)


def make_problem(shape: Shape, sequences: int, keys: int, rows: int, device: torch.device) -> Problem:
    """`rows` of each sequence's last positions over `keys` keys in poisoned pages."""
    generator = torch.Generator().manual_seed(0)
    lengths = [keys - (i * 7) % min(keys, 13) for i in range(sequences)]  # last pages filled differently
    starts = np.array([max(0, n - rows) for n in lengths], dtype=np.int32)
    query_starts = np.cumsum([0, *(n - s for n, s in zip(lengths, starts, strict=True))]).astype(np.int32)
    counts = [-(-n // shape.page_size) for n in lengths]
    order = torch.randperm(sum(counts) + 1, generator=generator).numpy().astype(np.int32)
    tables = np.zeros((sequences, max(counts)), dtype=np.int32)
    at = 0
    for i, count in enumerate(counts):
        tables[i, :count] = order[at : at + count]
        at += count
    k_pages, v_pages = (_pages(shape, tables, lengths, counts, int(order.size), seed, device) for seed in (1, 2))
    q = torch.randn(int(query_starts[-1]), shape.heads, shape.head_dim, generator=generator)
    sinks = torch.randn(shape.heads, generator=generator).to(device) if shape.sinks else None
    placed = page_tables(query_starts, starts, tables, shape.page_size).place(
        lambda arrays: {name: torch.from_numpy(np.ascontiguousarray(a)).to(device) for name, a in arrays.items()}
    )
    none = torch.zeros(0, dtype=torch.long, device=device)
    meta = StepMeta(
        token_ids=torch.zeros(q.shape[0], dtype=torch.long),
        positions=none,
        query_starts=torch.from_numpy(query_starts),
        starts=torch.from_numpy(starts),
        block_tables=torch.from_numpy(tables).to(device),
        slots=none,
        page_size=shape.page_size,
        tables=placed,
    )
    call = AttentionCall(shape.scaling, shape.window, shape.softcap, sinks, *_scales(shape))
    return Problem(q.to(device, shape.dtype), k_pages, v_pages, meta, call)


def _scales(shape: Shape) -> tuple[float, float]:
    return (0.5, 0.25) if shape.kv_dtype == FP8 else (1.0, 1.0)


def _pages(
    shape: Shape,
    tables: np.ndarray[Any, np.dtype[np.int32]],
    lengths: Sequence[int],
    counts: Sequence[int],
    total: int,
    seed: int,
    device: torch.device,
) -> torch.Tensor:
    size = shape.page_size
    values = torch.full((total, size, shape.kv_heads, shape.head_dim), float("nan"))
    generator = torch.Generator().manual_seed(seed)
    for i, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        rows = torch.full((count * size, shape.kv_heads, shape.head_dim), float("nan"))
        rows[:length] = torch.randn(length, shape.kv_heads, shape.head_dim, generator=generator)
        values[torch.from_numpy(tables[i, :count].astype(np.int64))] = rows.view(count, size, *rows.shape[1:])
    return values.to(shape.kv_dtype).to(device)


def answer(backend: FlashInferBackend | TorchBackend, problem: Problem) -> torch.Tensor:
    return backend.attend(problem.q_THD, problem.k_pages, problem.v_pages, problem.meta, problem.call)


def try_kernel(backend: FlashInferBackend, problem: Problem, wanted: torch.Tensor) -> Measured:
    got = answer(backend, problem)
    error = float((got.float() - wanted.float()).norm() / wanted.float().norm())
    return Measured(error, seconds_of(lambda: answer(backend, problem), backend.flashinfer.device))


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """The median by the device's own clock, after a warm-up; off CUDA nothing is timed."""
    if device.type != "cuda":
        return 0.0
    times: list[float] = []
    for _ in range(REPEATS + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[2:])


def memory_path() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "kvrelay" / "flashinfer-kernels.json"


def _key(backend: FlashInferBackend, shape: Shape) -> str:
    device, library = backend.flashinfer.device, backend.flashinfer.module
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return f"{gpu}; {getattr(library, '__version__', '?')}; {_text(shape)}"


def _text(shape: Shape) -> str:
    return ", ".join(f"{f.name} {getattr(shape, f.name)}" for f in fields(shape)).replace("torch.", "")


def _recall(path: Path) -> dict[str, dict[str, str]]:
    try:
        kept = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _remember(path: Path, key: str, names: dict[str, str]) -> None:
    """Workers that start together may each write; the last one's file stands, whole."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(f".{os.getpid()}.tmp")
        beside.write_text(json.dumps(_recall(path) | {key: names}, indent=1) + "\n")
        os.replace(beside, path)
    except OSError as error:
        logger.warning("the choice of kernels is not remembered: %s", error)
