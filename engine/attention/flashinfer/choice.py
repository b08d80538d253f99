"""Which of FlashInfer's kernels serves a layer's shape on this GPU: measured at load, and remembered.

    candidates  -> those whose module is there and whose answers are right (trial.py)
                -> the fastest of them: for prompts, and for decode steps of several sizes (timing.py)

The memory of it is one JSON file in the cache folder, by GPU, library version, shape, the sizes that were measured and
the kernels whose modules could not be had: a worker's second start reads it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from engine.attention.flashinfer import timing, trial
from engine.attention.flashinfer.backend import FlashInferBackend
from engine.attention.flashinfer.build import provide
from engine.attention.flashinfer.modules import FOR_EVERY_MODEL, Wanted, module_of, wanted
from engine.attention.flashinfer.shapes import (
    BatchChoice,
    KernelChoice,
    Shape,
    decode_candidates,
    prefill_candidates,
)
from engine.attention.flashinfer.timing import DecodeStep, Limits, Stopwatch
from engine.attention.flashinfer.trial import Problem
from engine.attention.flashinfer.workspace import workspace_bytes
from engine.attention.torch_backend import TorchBackend
from engine.build_cache import PATIENCE_S, cache_folder, locked
from engine.errors import raise_if_broken

logger = logging.getLogger(__name__)

HOPPER = (9, 0)  # whose candidates a rehearsal on a CPU tries
Times = dict[str, float]  # seconds of a call, by kernel


class NotBuilt(Exception):
    """A kernel's module cannot be had."""


def measured(
    backend: FlashInferBackend,
    shapes: Sequence[Shape],
    limits: Limits | None = None,
    stopwatch: Stopwatch | None = None,
    remembered: Path | None = None,
) -> FlashInferBackend:
    """The backend with a kernel chosen for each shape, from memory where it was measured before, and scratch memory for
    all of them.

    Raises RuntimeError when no kernel is right for a shape, or a module that every model needs cannot be had.
    """
    device = backend.flashinfer.device
    path = cache_folder() / "flashinfer-kernels.json" if remembered is None else remembered
    on_gpu = device.type == "cuda"
    capability = torch.cuda.get_device_capability(device) if on_gpu else HOPPER
    failed = provide(wanted(shapes, capability)) if on_gpu else {}
    check_common(failed)
    limits = limits or Limits()
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 0
    least_bytes = workspace_bytes(shapes, multiprocessors, limits.sequences)
    backend = FlashInferBackend(backend.flashinfer.with_workspace(least_bytes))
    trials = _Trials(backend, capability, limits, stopwatch or Stopwatch.on(device), failed)
    choices = {shape: _recalled(path, trials.key(shape)) or _chosen_alone(trials, shape, path) for shape in shapes}
    return FlashInferBackend(backend.flashinfer, choices)


def _chosen_alone(trials: _Trials, shape: Shape, path: Path) -> KernelChoice:
    """While no other process of this machine measures on the GPU, whose times would tell of both. One that has measured
    the same meanwhile has left its choice."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_name(f"measuring-{trials.gpu}"), PATIENCE_S):
        key = trials.key(shape)
        choice = _recalled(path, key)
        if choice is None:
            choice = trials.choose(shape)
            _remember(path, key, choice)
        return choice


def check_common(failed: Mapping[Wanted, str]) -> None:
    """Raise RuntimeError for a module that no other can stand in for."""
    lost = [f"{module[0]}: {failed[module]}" for module in FOR_EVERY_MODEL if module in failed]
    if lost:
        raise RuntimeError(f"FlashInfer's modules that every model needs cannot be had: {'; '.join(lost)}")


class _Trials:
    def __init__(
        self,
        backend: FlashInferBackend,
        capability: tuple[int, int],
        limits: Limits,
        stopwatch: Stopwatch,
        failed: Mapping[Wanted, str],
    ) -> None:
        self._backend = backend
        self._capability = capability
        self._limits = limits
        self._stopwatch = stopwatch
        self._failed = failed

    @property
    def gpu(self) -> str:
        """Which one of the machine's."""
        device = self._backend.flashinfer.device
        return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else str(device)

    def key(self, shape: Shape) -> str:
        device, library = self._backend.flashinfer.device, self._backend.flashinfer.module
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        up_to = " ".join(f"{name} {value}" for name, value in asdict(self._limits).items())
        names = prefill_candidates(shape, self._capability) + decode_candidates(shape, self._capability)
        lacking = [name for name in names if module_of(shape, name) in self._failed]
        without = f"; without {' '.join(lacking)}" if lacking else ""
        return f"{gpu}; {getattr(library, '__version__', '?')}; {_text(shape)}; {up_to}{without}"

    def choose(self, shape: Shape) -> KernelChoice:
        prefill = self._prefill(shape)
        what = f"decode of {_text(shape)}"
        sequences, keys = trial.past_window(trial.DECODE, shape.window)
        problem = trial.make_problem(shape, sequences, keys, 1, self._backend.flashinfer.device)
        names = self._right(what, shape, "decode", decode_candidates(shape, self._capability), problem)
        if len(names) == 1:
            logger.info("%s: %s, the only one", what, names[0])
            return KernelChoice(prefill=prefill, decode=names[0])
        by_batch = best_by_batch(self._decode_times(what, shape, names))
        return KernelChoice(prefill=prefill, decode=by_batch[-1].kernel, by_batch=by_batch)

    def _prefill(self, shape: Shape) -> str:
        what = f"prefill of {_text(shape)}"
        sequences, keys = trial.past_window(trial.PREFILL, shape.window)
        problem = trial.make_problem(shape, sequences, keys, trial.PREFILL[1], self._backend.flashinfer.device)
        names = self._right(what, shape, "prefill", prefill_candidates(shape, self._capability), problem)

        def seconds(name: str) -> float:
            backend = self._with(shape, "prefill", name)
            return self._stopwatch.seconds(lambda: trial.answer(backend, problem))

        return _fastest(timed(what, names, seconds))

    def _decode_times(self, what: str, shape: Shape, names: Sequence[str]) -> dict[tuple[int, int], Times]:
        device = self._backend.flashinfer.device
        times: dict[tuple[int, int], Times] = {}
        for size in timing.sizes(shape, self._limits, timing.most_bytes(device)):
            step = DecodeStep.of(shape, *size, device)

            def seconds(name: str, step: DecodeStep = step) -> float:
                return timing.seconds_of_a_call(name, self._with(shape, "decode", name), step, self._stopwatch)

            times[size] = timed(f"{what}, {size[0]} sequences of {size[1]} keys", names, seconds)
        return times

    def _right(self, what: str, shape: Shape, kind: str, names: Sequence[str], problem: Problem) -> list[str]:
        wanted = trial.answer(TorchBackend(), problem)

        def error_of(name: str) -> float:
            if why := self._failed.get(module_of(shape, name)):
                raise NotBuilt(why)
            return trial.relative_error(self._with(shape, kind, name), problem, wanted)

        return right(what, names, error_of)

    def _with(self, shape: Shape, kind: str, name: str) -> FlashInferBackend:
        choice = KernelChoice(prefill=name) if kind == "prefill" else KernelChoice(decode=name)
        return self._backend.with_choice(shape, choice)


def right(what: str, names: Iterable[str], error_of: Callable[[str], float]) -> list[str]:
    """Those whose answer is the reference's, to within the tolerance. The others are named in the log. Raises
    RuntimeError with each one's failing when none is."""

    def failing(name: str) -> str:
        error = error_of(name)
        return "" if error <= trial.TOLERANCE else f"relative error {error:.2g}"  # NaN is not

    return list(_without_failing(what, names, failing))


def timed(what: str, names: Iterable[str], seconds_of: Callable[[str], float]) -> Times:
    """Each one's time. One that cannot run is left out and named. Raises RuntimeError when none can, EngineBroken for
    one that has taken the device with it."""
    times: Times = {}

    def failing(name: str) -> str:
        times[name] = seconds_of(name)
        return ""

    _without_failing(what, names, failing)
    shown = ", ".join(f"{name} {seconds * 1e6:.0f} us" for name, seconds in times.items())
    logger.info("%s: %s of %s", what, _fastest(times), shown)
    return times


def _without_failing(what: str, names: Iterable[str], failing: Callable[[str], str]) -> list[str]:
    good: list[str] = []
    bad: list[str] = []
    for name in names:
        try:
            why = failing(name)
        except Exception as error:  # a kernel that cannot be built or run here is one not to take
            raise_if_broken(error)
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if why:
            logger.warning("%s is not served by %s: %s", what, name, why)
            bad.append(f"{name}: {why}")
        else:
            good.append(name)
    if not good:
        raise RuntimeError(f"no kernel of FlashInfer gives the right answer for {what}: {'; '.join(bad)}")
    return good


def _fastest(times: Times) -> str:
    return min(times, key=lambda name: times[name])


def best_by_batch(times: Mapping[tuple[int, int], Times]) -> tuple[BatchChoice, ...]:
    """By the times at (sequences, keys). Over all lengths the one that is least behind the best of each, in sum."""
    choices = []
    for sequences, group in groupby(sorted(times), key=lambda size: size[0]):
        by_keys = {keys: times[sequences, keys] for _, keys in group}
        best = {keys: _fastest(each) for keys, each in by_keys.items()}

        def behind(name: str, by_keys: Mapping[int, Times] = by_keys) -> float:
            return sum(each.get(name, float("inf")) / max(min(each.values()), 1e-9) for each in by_keys.values())

        overall = min(dict.fromkeys(best.values()), key=behind)
        differing = tuple(best.items()) if len(set(best.values())) > 1 else ()
        choices.append(BatchChoice(sequences, overall, differing))
    return tuple(choices)


def _text(shape: Shape) -> str:
    return ", ".join(f"{f.name} {getattr(shape, f.name)}" for f in fields(shape)).replace("torch.", "")


def _recall(path: Path) -> dict[str, Any]:
    try:
        kept = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _recalled(path: Path, key: str) -> KernelChoice | None:
    """What was chosen before; None where nothing was, or it cannot be read."""
    try:
        kept = _recall(path)[key]
        by_batch = tuple(
            BatchChoice(int(sequences), str(kernel), tuple((int(keys), str(name)) for keys, name in by_keys))
            for sequences, kernel, by_keys in kept["by_batch"]
        )
        choice = KernelChoice(prefill=str(kept["prefill"]), decode=str(kept["decode"]), by_batch=by_batch)
    except (KeyError, TypeError, ValueError):
        return None
    logger.info("kernels of %s, as measured before: %s", key, kept)
    return choice


def _remember(path: Path, key: str, choice: KernelChoice) -> None:
    """Workers that start together may each write; the last one's file stands, whole."""
    by_batch = [[batch.sequences, batch.kernel, batch.by_keys] for batch in choice.by_batch]
    kept = {"prefill": choice.prefill, "decode": choice.decode, "by_batch": by_batch}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(f".{os.getpid()}.tmp")
        beside.write_text(json.dumps(_recall(path) | {key: kept}, indent=1) + "\n")
        os.replace(beside, path)
    except OSError as error:
        logger.warning("the choice of kernels is not remembered: %s", error)
