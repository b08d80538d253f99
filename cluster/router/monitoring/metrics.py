"""RouterMetrics counts what the router did. Plain integers always, for GetStatus; Prometheus only when it is exposed.

Names follow vLLM's, with the prefix `kvrelay:`, so that dashboards made for it need one replacement. Histograms are
observed when something happens; all else is what the router's event loop says of itself at the moment of a scrape
(cluster/router/monitoring/families.py).
"""

from __future__ import annotations

from collections import Counter

from cluster.router.live.requests import LiveRequest
from cluster.router.monitoring.chronicle import Chronicle
from cluster.router.monitoring.histograms import Histogram
from cluster.router.monitoring.load import Load
from cluster.router.monitoring.receipts import Receipts

LATENCY_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
QUEUES = 2  # of PHASES, the first
HISTOGRAMS = {
    "time_to_first_token_seconds": ("Arrival at the router to first token.", LATENCY_BUCKETS),
    "inter_token_latency_seconds": ("Gap between two tokens of a request.", TOKEN_BUCKETS),
    "request_time_per_output_token_seconds": ("(E2E - TTFT) / (tokens - 1) of a request.", TOKEN_BUCKETS),
    "e2e_request_latency_seconds": ("Arrival at the router to last token.", LATENCY_BUCKETS),
    "request_queue_time_seconds": ("Waiting in the router and before prefill.", LATENCY_BUCKETS),
}
COUNTERS = {
    "requests": "Requests that the router took in.",
    "finished": "Requests answered to their end.",
    "cancelled": "Requests cancelled by the client or past their deadline.",
    "rejected": "Requests refused because queues were full.",
    "failed": "Requests that ended without an answer otherwise.",
    "retries": "Times a request was sent to prefill again.",
    "preempted": "Times a worker took a request's pages for others, or had its KV computed anew.",
    "reassigned": "Times a request was moved to a decode worker with free pages.",
    "moved": "Times a running request moved to another decode worker.",
    "moves_failed": "Times one could not, and went on where it was.",
    "workers_lost": "Times a worker was lost.",
    "circuits_opened": "Times a worker or a pair was avoided because its steps or handoffs failed.",
    "stale_tokens": "Tokens dropped because their request had ended or was sent again.",
    "recomputed_tokens": "Tokens whose KV was computed again.",
    "prompt_tokens": "Prompt tokens of requests that finished.",
    "cached_tokens": "Of those, found in a prefix cache.",
    "generation_tokens": "Tokens delivered to clients.",
    "slo_choices": "Choices that finished and had a target, their own or the router's.",
    "slo_ttft_missed": "Of those, with a first token later than that.",
    "slo_tpot_missed": "Of those, with later ones further apart.",
}


class RouterMetrics:
    def __init__(self, load: Load | None = None, chronicle: Chronicle | None = None) -> None:
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self.load = load if load is not None else Load()
        self.receipts = Receipts()
        self.chronicle = chronicle if chronicle is not None else Chronicle()
        self.codes: Counter[str] = Counter()  # how calls of Generate's ended, by gRPC's code
        self.histograms = {name: Histogram(*made) for name, made in HISTOGRAMS.items()}
        self._gaps = self.histograms["inter_token_latency_seconds"]

    def on_tokens(self, count: int, gap_s: float | None) -> None:
        """`count` tokens of a request were delivered at once, `gap_s` after those before; None: its first ones."""
        self.counts["generation_tokens"] += count
        if gap_s is not None:
            self._gaps.observe(gap_s / count, count)
        elif count > 1:
            self._gaps.observe(0.0, count - 1)

    def on_first_token(self, ttft_s: float) -> None:
        """It is on its way to the client, whatever becomes of the request later."""
        self.histograms["time_to_first_token_seconds"].observe(ttft_s)

    def on_finished(self, live: LiveRequest, targets_s: tuple[float, float] = (0.0, 0.0)) -> None:
        """`targets_s`: TTFT and TPOT of a request that has none of its own; 0: none."""
        self.load.note(live)
        timeline, num_tokens = live.timeline, len(live.output_ids)
        tpot_s = timeline.tpot_s(num_tokens)
        ttft_target_s, tpot_target_s = live.slo[0] or targets_s[0], live.slo[1] or targets_s[1]
        if ttft_target_s or tpot_target_s:
            self.counts["slo_choices"] += 1
            self.counts["slo_ttft_missed"] += 0 < ttft_target_s < timeline.ttft_s
            self.counts["slo_tpot_missed"] += 0 < tpot_target_s < tpot_s
        before, after = timeline.halves()
        self.histograms["e2e_request_latency_seconds"].observe(timeline.e2e_s)
        self.histograms["request_queue_time_seconds"].observe(sum(before[:QUEUES]) + sum(after[:QUEUES]))
        if num_tokens > 1:
            self.histograms["request_time_per_output_token_seconds"].observe(tpot_s)

    def on_cancelled(self, live: LiveRequest, targets_s: tuple[float, float] = (0.0, 0.0)) -> None:
        """Its client left. Where its first token was late by then, it has missed its target; else nobody knows (as
        placement/simulator/outcome.py judges)."""
        timeline, ttft_target_s = live.timeline, live.slo[0] or targets_s[0]
        if 0 < ttft_target_s < (timeline.e2e_s if timeline.first_token_s is None else timeline.ttft_s):
            self.load.note(live, failed=True)

    def on_ended(self, code: str) -> None:
        """A call of Generate's is over, as its client was told or would have been; or one of any was not let in."""
        self.codes[code] += 1
