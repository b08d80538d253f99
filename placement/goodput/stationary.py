"""What one run of a simulation says about the long run: where its beginning ends, and how sure a mean of it is.

The beginning is cut off by MSER-5 (White, Cobb and Spratt 2000): means of 5 requests each, cut where the standard error
of what is left is least, but never more than half. The end is cut where requests had no successors that would have
disturbed them. What is left is cut into batches, whose means are nearly independent when batches are long (law of
large numbers for batch means); Student's t gives the interval. A correlation left between neighbours widens it.
"""

from __future__ import annotations

import math

import numpy as np

from placement.plan import Interval
from placement.workload.requests import Floats

MSER_BATCH = 5
NUM_BATCHES = 24
SECTIONS = 10
Z_90 = 1.6449  # two-sided 90%


def mser(values: Floats) -> int:
    """How many of the first values belong to the beginning; at most half of them. Not-served ones (nan) count as the
    latest."""
    late = np.where(np.isfinite(values), values, np.nanmax(values, initial=0.0))
    count = len(late) // MSER_BATCH
    if count < 10:
        return 0
    means = late[: count * MSER_BATCH].reshape(count, MSER_BATCH).mean(axis=1)[::-1]
    sizes = np.arange(1, count + 1)
    totals, squares = np.cumsum(means), np.cumsum(means * means)
    error = (squares - totals * totals / sizes) / sizes**2  # of what is left after count - size batches are cut
    left = count // 2 + int(np.argmin(error[count // 2 - 1 :]))
    return (count - left) * MSER_BATCH


def batch_means(values: Floats) -> Floats:
    size = max(1, len(values) // NUM_BATCHES)
    count = len(values) // size
    means: Floats = values[len(values) - count * size :].reshape(count, size).mean(axis=1)
    return means


def t_90(degrees: int) -> float:
    """Student's t, two-sided 90% (Cornish and Fisher's expansion; within 1% from 3 degrees on)."""
    z, n = Z_90, degrees
    return (
        z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2) + (3 * z**7 + 19 * z**5) / (384 * n**3)
    )


def neighbours(means: Floats) -> float:
    """Correlation between one batch and the next, 0 where there is none to see."""
    apart = means - means.mean()
    total = float(apart @ apart)
    return float(apart[1:] @ apart[:-1]) / total if total > 0 else 0.0


def mean_interval(values: Floats) -> tuple[Interval, float]:
    """The mean of a stationary series with its 90% interval, and the correlation between neighbouring batches."""
    means = batch_means(values)
    mean = float(values.mean())
    if len(means) < 2:
        return Interval(mean, -math.inf, math.inf), 0.0
    correlation = neighbours(means)
    spread = float(means.std(ddof=1)) / math.sqrt(len(means)) * t_90(len(means) - 1)
    half = spread * math.sqrt((1 + max(0.0, correlation)) / (1 - min(0.9, max(0.0, correlation))))
    return Interval(mean, mean - half, mean + half), correlation


def share_interval(met: Floats) -> tuple[Interval, float]:
    """The same of a share: within 0 to 1, and never narrower than so many independent requests would give (Wilson)."""
    interval, correlation = mean_interval(met)
    low, high = wilson(interval.value, len(met))
    return Interval(interval.value, max(0.0, min(low, interval.low)), min(1.0, max(high, interval.high))), correlation


def wilson(share: float, count: int) -> tuple[float, float]:
    squared = Z_90**2 / count
    middle = (share + squared / 2) / (1 + squared)
    half = math.sqrt(share * (1 - share) * squared + squared**2 / 4) / (1 + squared)
    return max(0.0, middle - half), min(1.0, middle + half)


def percentile_interval(values: Floats, at: float) -> Interval:
    """A percentile of the whole, and its 90% interval from those of its parts."""
    late = np.where(np.isfinite(values), values, np.inf)
    value = _percentile(late, at)
    size = len(late) // SECTIONS
    if size < 10:
        return Interval(value, 0.0, math.inf)
    parts = np.array([_percentile(late[i * size : (i + 1) * size], at) for i in range(SECTIONS)])
    if not np.isfinite(parts).all() or not math.isfinite(value):
        finite = parts[np.isfinite(parts)]
        return Interval(value, float(finite.min()) if len(finite) else math.inf, math.inf)
    half = float(np.sqrt(((parts - value) ** 2).sum() / (SECTIONS - 1) / SECTIONS)) * t_90(SECTIONS - 1)
    return Interval(value, max(0.0, value - half), value + half)


def _percentile(values: Floats, at: float) -> float:
    return float(np.percentile(values, at, method="lower" if np.isinf(values).any() else "linear"))


def is_growing(in_system: Floats) -> bool:
    """Whether a queue grows without end: how many were there, at even times. It does when its second half rises by a
    straight line that explains most of it, by more than chance lets a number of requests vary (its square root)."""
    half = in_system[len(in_system) // 2 :]
    if len(half) < 8 or half[-1] < 16:
        return False
    at = np.arange(len(half)) - (len(half) - 1) / 2
    slope = float(at @ half) / float(at @ at)
    rise = slope * len(half)
    scatter = half - half.mean() - slope * at
    explained = 1 - float(scatter @ scatter) / max(1e-12, float(((half - half.mean()) ** 2).sum()))
    return rise > max(0.1 * float(half.mean()), 4 * math.sqrt(float(half.mean()))) and explained > 0.6
