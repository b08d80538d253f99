"""Which part of a cluster's tail latency went where: shares of P50 and P99 of TTFT and TPOT, by phase and worker, of
what ended lately. Values only; what would bring it down is for what_if.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cluster.router.live.timeline import PHASES
from kvrelay.client.types import EndedRequest

LEAST = {0.5: 20, 0.99: 100}  # requests, for a quantile to say something
SHOWN = 3  # parts that are named
Part = tuple[str, str]  # what, and at which worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """A quantile of what was measured, and how the requests from it on spent that time, the largest share first: of P50
    all requests."""

    metric: str  # ttft or tpot
    quantile: float
    seconds: float
    requests: int  # of which it is the quantile
    shares: tuple[tuple[Part, float], ...]

    @property
    def name(self) -> str:
        return f"P{self.quantile * 100:g} {self.metric.upper()}"

    def words(self, window_s: float) -> str:
        named = ", ".join(f"{share:.0%} {_place(*part)}" for part, share in self.shares[:SHOWN] if share >= 0.01)
        of = f"your {self.name} of the last {_minutes(window_s)}"
        return f"{of} was {ms(self.seconds)}, of {self.requests} requests: {named}"


def tail_of(load: Sequence[EndedRequest], metric: str, quantile: float) -> Tail | str:
    """Or why there is none."""
    requests = [each for each in load if not each.failed and (metric == "ttft" or each.output_tokens > 1)]
    if len(requests) < LEAST[quantile]:
        name = f"P{quantile * 100:g} {metric.upper()}"
        return f"{len(requests)} requests have ended that count for {name}; {LEAST[quantile]} must"
    values = np.array([getattr(each, f"{metric}_s") for each in requests])
    cut = float(np.quantile(values, quantile))
    near = [each for each, value in zip(requests, values, strict=True) if value >= cut or quantile <= 0.5]
    spent: Counter[Part] = Counter()
    for each in near:
        for part, seconds in parts_of(each, metric):
            spent[part] += seconds  # type: ignore[assignment]
    whole = sum(spent.values()) or 1.0
    shares = tuple((part, seconds / whole) for part, seconds in spent.most_common())
    return Tail(metric=metric, quantile=quantile, seconds=cut, requests=len(requests), shares=shares)


def parts_of(ended: EndedRequest, metric: str) -> Iterator[tuple[Part, float]]:
    """Of its TTFT, or of the time of its other tokens."""
    prefill, decode = ended.prefill_worker, ended.decode_worker
    if metric == "ttft":
        where = {"route": ("route", ""), "prefill_queue": ("prefill_queue", prefill), "prefill": ("prefill", prefill)}
        rest, seconds = ("first_token", prefill), ended.before_first_s
    else:
        where = {phase: (phase, decode) for phase in ("decode_queue", "decode")} | {"handoff": ("handoff", prefill)}
        rest, seconds = ("retry", ""), ended.after_first_s
    for phase, took_s in zip(PHASES, seconds, strict=False):
        yield where.get(phase, rest), took_s


WORDS = {
    "route": "routing and the router's queue",
    "prefill_queue": "prefill queue",
    "first_token": "its first token's way to the client",
    "decode_queue": "decode queue",
    "retry": "being computed again",
}


def _place(what: str, worker: str) -> str:
    return f"{WORDS.get(what, what)}{f' at {worker}' if worker else ''}"


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.3g} minutes" if seconds >= 120 else f"{seconds:.0f} seconds"
