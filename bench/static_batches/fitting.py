"""fitted finds the figures of hardware files with which the roofline comes nearest to measured batches.

Some figures are of an engine, and the same on every GPU; the others of a GPU, and held near their mean over all. Each
has a prior, what one would say who has seen no batch, and is held near it by its spread: a figure that no batch says
anything of stays there. Levenberg and Marquardt's steps on the logarithms of predicted over measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from placement.latency.hardware import Hardware
from placement.latency.measured import PHASES, Batch, predicted_s

Floats = npt.NDArray[np.float64]
ENGINE = {  # figure: prior, and by what factor (a logarithm) it may well be another
    "efficiency.half_width": (5000.0, 0.7),
    "efficiency.attention_flops": (0.4, 0.3),
    "efficiency.attention_bandwidth": (0.9, 0.1),
    "efficiency.half_heads": (30.0, 1.0),
    "efficiency.overlap": (0.35, 0.5),
    "overhead.step_s": (0.4e-3, 0.7),
    "overhead.request_s": (6e-6, 0.7),
}
GPU = {
    "efficiency.prefill_flops": (0.85, 0.2),
    "efficiency.prefill_flops_float8": (0.75, 0.2),
    "efficiency.decode_bandwidth": (0.85, 0.1),
    "efficiency.collective": (0.7, 0.3),
    "overhead.prefill_step_s": (1.2e-3, 0.5),
    "overhead.layer_s": (30e-6, 0.5),
    "overhead.reduce_s": (12e-6, 0.5),
    "overhead.hop_s": (0.5e-6, 1.0),
}
OWN = {("l40s", "efficiency.collective"): 0.5}  # priors of one GPU: no NVLink, copies that pass through the host
NOISE = 0.3  # of one batch's logarithm: far more than it has, as batches of a setting err alike
SPREAD = 0.3  # of how far a GPU's figure is from its prior, around the mean over GPUs
STEPS = 20
GAIN = 1e-4  # of the loss, for which no further step is made
Figures = Mapping[str, float]


def fitted(batches: Sequence[Batch], hardware: Mapping[str, Hardware]) -> dict[str, Hardware]:
    """Hardware files by name, as given but for the figures above."""
    return Fit(batches, hardware).run()


class Fit:
    def __init__(self, batches: Sequence[Batch], hardware: Mapping[str, Hardware]) -> None:
        self._batches = batches
        self._hardware = hardware
        self._owner = np.array([list(hardware).index(batch.setting.hardware) for batch in batches] * len(PHASES))
        self._measured = np.array([batch.measured_s[phase] for phase in PHASES for batch in batches])
        own = [(OWN.get((name, path), value), sigma) for name in hardware for path, (value, sigma) in GPU.items()]
        prior, sigma = zip(*ENGINE.values(), *own, strict=True)
        self._prior, self._sigma = np.log(prior), np.array(sigma)
        self._damping = 1e-2

    def run(self) -> dict[str, Hardware]:
        at, off = self._prior, self._off(self._prior)
        for _ in range(STEPS):
            slopes = self._slopes(at, off)
            nearer = self._nearer(at, off, slopes)
            if nearer is None:
                break
            gained = off @ off - nearer[1] @ nearer[1]
            at, off = nearer
            if gained < GAIN * (off @ off):
                break
        return self._files(at)

    def _nearer(self, at: Floats, off: Floats, slopes: Floats) -> tuple[Floats, Floats] | None:
        gradient, curvature = slopes.T @ off, slopes.T @ slopes
        while self._damping < 1e6:
            step = np.linalg.solve(curvature + self._damping * np.diag(np.diag(curvature)), -gradient)
            found = self._off(at + step)
            if found @ found < off @ off:
                self._damping /= 5
                return at + step, found
            self._damping *= 4
        return None

    def _slopes(self, at: Floats, off: Floats, little: float = 1e-3) -> Floats:
        """One column for each figure. A figure of a GPU moves that one's batches alone: all GPUs are asked at once."""
        slopes = np.zeros((len(off), len(at)))
        for column in range(len(ENGINE)):
            slopes[:, column] = (self._off(at + little * _unit(len(at), [column])) - off) / little
        for figure in range(len(GPU)):
            columns = range(len(ENGINE) + figure, len(at), len(GPU))
            moved = (self._misses(at + little * _unit(len(at), columns)) - off[: len(self._measured)]) / little
            for gpu, column in enumerate(columns):
                held = (self._held(at + little * _unit(len(at), [column])) - off[len(self._measured) :]) / little
                slopes[:, column] = np.concatenate([np.where(self._owner == gpu, moved, 0.0), held])
        return slopes

    def _off(self, at: Floats) -> Floats:
        return np.concatenate([self._misses(at), self._held(at)])

    def _misses(self, at: Floats) -> Floats:
        files = self._files(at)
        predicted = [time for phase in PHASES for time in predicted_s(self._batches, files, phase)]
        return np.asarray(np.log(np.array(predicted) / self._measured) / NOISE)

    def _held(self, at: Floats) -> Floats:
        own = (at - self._prior)[len(ENGINE) :].reshape(len(self._hardware), len(GPU))
        return np.concatenate([(at - self._prior) / self._sigma, ((own - own.mean(axis=0)) / SPREAD).ravel()])

    def _files(self, at: Floats) -> dict[str, Hardware]:
        values = [float(value) for value in np.exp(at)]
        shared = dict(zip(ENGINE, values, strict=False))
        files = {}
        for index, (name, hardware) in enumerate(self._hardware.items()):
            begin = len(ENGINE) + index * len(GPU)
            files[name] = with_figures(hardware, shared | dict(zip(GPU, values[begin:], strict=False)))
        return files


def with_figures(hardware: Hardware, figures: Figures) -> Hardware:
    """The file with these values, by names such as `overhead.step_s`; a share is 1 at most."""
    changed: dict[str, dict[str, Any]] = {"efficiency": {}, "overhead": {}}
    for path, value in figures.items():
        section, key = path.split(".")
        old = figure_at(hardware, path)
        is_share = section == "efficiency" and not key.startswith("half_")
        changed[section][key] = old.model_copy(update={"value": min(1.0, value) if is_share else value})
    sections = {name: getattr(hardware, name).model_copy(update=keys) for name, keys in changed.items()}
    return hardware.model_copy(update=sections)


def figure_at(hardware: Hardware, path: str) -> Any:
    """One that the file leaves out is that of wider dtypes."""
    section, key = path.split(".")
    return getattr(getattr(hardware, section), key) or hardware.efficiency.prefill_flops


def _unit(length: int, columns: Sequence[int]) -> Floats:
    unit = np.zeros(length)
    unit[list(columns)] = 1.0
    return unit
