"""What a benchmark's results say: latencies of each request, percentiles, goodput, attainment, handoffs, phases.

Pure arithmetic over `Outcome`s. The conventions, with all times as the client sees them:

    TTFT  due -> first token             due: when the request should have been sent
    TPOT  (E2E - TTFT) / (tokens - 1)    for each request with two tokens or more
    ITL   each gap between two messages that bring tokens
    E2EL  due -> last token
    goodput: requests/s that meet all SLOs; attainment: their share of all requests, failed ones counted as missing
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from kvrelay.client.types import Receipt, Timeline, Usage

METRICS = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
}
SLO_METRICS = ("ttft", "tpot", "e2el")


class MetricsError(ValueError):
    """A metric, percentile or target that does not exist: one sentence naming it and the mend."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of one request. Times in seconds since the run's start (`time.perf_counter`)."""

    index: int
    due_s: float
    input_len: int
    token_times_s: list[float] = field(default_factory=list)  # one for each message that brought tokens
    output_len: int = 0
    ended_s: float = 0.0
    code: str = ""  # empty: it succeeded
    message: str = ""
    request_id: str = ""
    usage: Usage | None = None
    timeline: Timeline | None = None
    receipt: Receipt | None = None

    @property
    def succeeded(self) -> bool:
        return not self.code

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.due_s

    @property
    def e2e_s(self) -> float:
        return self.token_times_s[-1] - self.due_s

    @property
    def tpot_s(self) -> float:
        """0 for a single token, which meets every target."""
        return (self.e2e_s - self.ttft_s) / (self.output_len - 1) if self.output_len > 1 else 0.0

    @property
    def itls_s(self) -> list[float]:
        return [after - before for before, after in pairwise(self.token_times_s)]


def percentile(ordered: Sequence[float], p: float) -> float:
    """The p-th percentile (0 to 100) of values in ascending order, linear between neighbours as numpy's default."""
    if not ordered:
        return math.nan
    rank = (len(ordered) - 1) * p / 100.0
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def parse_goodput(pairs: Iterable[str]) -> dict[str, float]:
    """SLOs such as ["ttft:500", "tpot:50"], in ms, by metric in seconds. Raises MetricsError."""
    slos_s: dict[str, float] = {}
    for pair in pairs:
        name, _, text = pair.partition(":")
        if name not in SLO_METRICS:
            raise MetricsError(f"goodput has {pair!r}; give METRIC:MILLISECONDS, the metric {', '.join(SLO_METRICS)}")
        slos_s[name] = _positive(f"goodput {name}", text) / 1000.0
    return slos_s


def parse_percentiles(text: str) -> list[float]:
    """Percentiles such as "50,90,99"."""
    return [_percent(part.strip()) for part in text.split(",") if part.strip()]


def parse_metrics(text: str) -> list[str]:
    """Metric names such as "ttft,tpot"."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        if name not in METRICS:
            raise MetricsError(f"percentile metrics has {name!r}; there are {', '.join(METRICS)}")
    return names


def _positive(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise MetricsError(f"{key} is {text!r}; give milliseconds above 0")
    return value


def _percent(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 100:
        raise MetricsError(f"metric percentiles has {text!r}; give numbers from 0 to 100 joined by commas")
    return value


def meets(outcome: Outcome, slos_s: Mapping[str, float]) -> bool:
    """Whether a request succeeded within all targets."""
    if not outcome.succeeded:
        return False
    seen_s = {"ttft": outcome.ttft_s, "tpot": outcome.tpot_s, "e2el": outcome.e2e_s}
    return all(seen_s[name] <= limit_s for name, limit_s in slos_s.items())


def summarise(
    outcomes: Sequence[Outcome],
    duration_s: float,
    slos_s: Mapping[str, float],
    metrics: Sequence[str],
    percentiles: Sequence[float],
) -> dict[str, Any]:
    """One JSON-able object: counts, rates, and for each metric mean, median, std and percentiles in ms."""
    good = [outcome for outcome in outcomes if outcome.succeeded]
    input_tokens = sum(outcome.usage.prompt_tokens if outcome.usage else outcome.input_len for outcome in good)
    output_tokens = sum(outcome.output_len for outcome in good)
    result: dict[str, Any] = {
        "requests": len(outcomes),
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "errors": _errors(outcomes),
        "duration_s": duration_s,
        "total_input_tokens": input_tokens,
        "cached_input_tokens": sum(outcome.usage.cached_tokens for outcome in good if outcome.usage),
        "total_output_tokens": output_tokens,
        "request_throughput": len(good) / duration_s,
        "output_throughput": output_tokens / duration_s,
        "total_token_throughput": (input_tokens + output_tokens) / duration_s,
    }
    if slos_s:
        within = sum(meets(outcome, slos_s) for outcome in outcomes)
        result["slos_ms"] = {name: limit_s * 1000.0 for name, limit_s in slos_s.items()}
        result["request_goodput"] = within / duration_s
        result["attainment"] = within / len(outcomes) if outcomes else math.nan
    result["latency_ms"] = {name: _statistics(values_s(name, good), percentiles) for name in metrics}
    result["handoff"] = _handoff(good, percentiles)
    result["phases_ms"] = _phases(good)
    return result


def values_s(metric: str, good: Sequence[Outcome]) -> list[float]:
    """Of those that succeeded."""
    if metric == "itl":
        return [gap for outcome in good for gap in outcome.itls_s]
    if metric == "tpot":
        return [outcome.tpot_s for outcome in good if outcome.output_len > 1]
    return [outcome.ttft_s if metric == "ttft" else outcome.e2e_s for outcome in good]


def _statistics(values_s: Iterable[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    ordered = sorted(1000.0 * value for value in values_s)
    keys = ["mean", "median", "std", *(f"p{p:g}" for p in percentiles)]
    if not ordered:
        return dict.fromkeys(keys)
    mean = math.fsum(ordered) / len(ordered)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in ordered) / len(ordered))
    figures = [mean, percentile(ordered, 50), std, *(percentile(ordered, p) for p in percentiles)]
    return dict(zip(keys, figures, strict=True))


def _errors(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """By code: how many, and the first one's sentence."""
    failed = [outcome for outcome in outcomes if not outcome.succeeded]
    counts = Counter(outcome.code for outcome in failed)
    first = {outcome.code: outcome.message for outcome in reversed(failed)}
    return {code: {"count": count, "first": first[code]} for code, count in counts.most_common()}


def _handoff(good: Sequence[Outcome], percentiles: Sequence[float]) -> dict[str, Any]:
    """Sums over the receipts. A request without one ended at prefill, or nothing had to move."""
    receipts = [outcome.receipt for outcome in good if outcome.receipt is not None]
    moved_bytes = sum(receipt.bytes for receipt in receipts)
    transfer_s = math.fsum(receipt.transfer_s for receipt in receipts)
    return {
        "receipts_good": sum(receipt.checksums_ok for receipt in receipts),
        "receipts_unchecked": sum(not receipt.checksums_ok for receipt in receipts),
        "without_handoff": len(good) - len(receipts),
        "transports": dict(Counter(receipt.transport for receipt in receipts if receipt.transport)),
        "pages": sum(receipt.pages for receipt in receipts),
        "cached_pages": sum(receipt.cached_pages for receipt in receipts),
        "bytes": moved_bytes,
        "transfer_s": transfer_s,
        "gb_per_s": moved_bytes / transfer_s / 1e9 if transfer_s > 0 else None,
        "exposed_ms": _statistics((receipt.exposed_s for receipt in receipts), percentiles),
        "resends": sum(receipt.resends for receipt in receipts),
        "recomputed_tokens": sum(receipt.recomputed_tokens for receipt in receipts),
    }


def _phases(good: Sequence[Outcome]) -> dict[str, float]:
    """The mean of each phase of the server's timelines, and what is left: the client, the network, the sending late.

    They sum to the mean E2EL of the requests that brought a timeline.
    """
    timed = [(outcome, outcome.timeline) for outcome in good if outcome.timeline is not None]
    sums: dict[str, float] = {}
    for _, timeline in timed:
        for name, seconds in timeline.phases_s.items():
            sums[name] = sums.get(name, 0.0) + seconds
    if timed:
        sums["outside"] = sum(outcome.e2e_s - sum(timeline.phases_s.values()) for outcome, timeline in timed)
    return {name: 1000.0 * total / len(timed) for name, total in sums.items()}
