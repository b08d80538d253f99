"""fitted finds the overheads with which the simulator comes nearest to what was measured: a few figures, many runs.

Gauss and Newton's steps on the logarithms of predicted over measured, shortened until they gain; a run that is far off
counts no more than one that is FAR off (Huber). Derivatives are differences: each costs a simulation of every case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from bench.closed_loops.measured import Measured
from bench.closed_loops.server import NONE, Overheads, simulated

Floats = npt.NDArray[np.float64]
SCALES = {"step_s": 1e-3, "token_s": 2e-5, "request_s": 1e-3, "prefill": 0.2, "attention": 0.5}
BEGIN = {"step_s": 2e-4, "token_s": 2e-5, "request_s": 2e-3, "prefill": 1.0, "attention": 1.0}
SERVER = ("step_s", "token_s", "request_s")
NAMES = ("ttft_mean", "itl_mean", "ttft_p95", "itl_p95")
FAR = 0.25
STEPS = 5
ASKED_EACH = 8  # fewer than in a run that is shown, to be quicker


def fitted(runs: Sequence[Measured], keys: Sequence[str] = SERVER, *, steps: int = STEPS) -> Overheads:
    """With these of an Overheads' fields."""
    at = np.array([BEGIN[key] / SCALES[key] for key in keys])
    off = _off(runs, keys, at)
    for _ in range(steps):
        slopes = np.array([(_off(runs, keys, at + 0.2 * each) - off) / 0.2 for each in np.eye(len(keys))]).T
        weights = np.sqrt(np.minimum(1.0, FAR / np.maximum(np.abs(off), 1e-9)))
        towards = np.linalg.lstsq(slopes * weights[:, None], -off * weights, rcond=None)[0]
        nearer = _nearer(runs, keys, at, off, towards)
        if nearer is None:
            break
        at, off = nearer
    return overheads_of(keys, at)


def _nearer(
    runs: Sequence[Measured], keys: Sequence[str], at: Floats, off: Floats, towards: Floats
) -> tuple[Floats, Floats] | None:
    for share in (1.0, 0.5, 0.2):
        there = np.maximum(at + share * towards, 0.0)
        found = _off(runs, keys, there)
        if _loss(found) < _loss(off):
            return there, found
    return None


def _loss(off: Floats) -> float:
    far = np.abs(off)
    return float(np.where(far < FAR, far**2 / 2, FAR * (far - FAR / 2)).sum())


def _off(runs: Sequence[Measured], keys: Sequence[str], at: Floats) -> Floats:
    overheads = overheads_of(keys, at)
    found = [simulated(run.case, overheads, asked_each=ASKED_EACH) for run in runs]
    pairs = [(values[name], run.values[name]) for values, run in zip(found, runs, strict=True) for name in NAMES]
    predicted, measured = np.array(pairs).T
    return np.asarray(np.log(predicted / measured))


def overheads_of(keys: Sequence[str], at: Floats) -> Overheads:
    given: Mapping[str, float] = {key: float(value) * SCALES[key] for key, value in zip(keys, at, strict=True)}
    return replace(NONE, **given)
