"""What Prometheus reads, made of what a router says of itself: its status, how calls ended, what clients hold.

It reads a copy, taken in the event loop, and nothing that lives. Names are vLLM's where it has one, with `kvrelay:`
before them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.router.monitoring.histograms import Histogram
from kvrelay.v1 import cluster_pb2

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

PREFIX = "kvrelay:"
PAIR_COUNTERS = {
    "pair_receipts": ("good", "Handoffs from a worker to its peer that came about."),
    "pair_receipts_bad": ("bad", "Handoffs that did not."),
    "pair_bytes": ("bytes", "Bytes of KV that moved."),
    "pair_transfer_seconds": ("transfer_s", "Seconds in which they moved, summed over the parts."),
    "pair_exposed_seconds": ("exposed_s", "Of those, what prefill did not hide."),
    "pair_resends": ("resends", "Times that bytes were sent again because a checksum disagreed."),
}
CIRCUITS = {"": 0.0, "closed": 0.0, "half_open": 0.5, "open": 1.0}
ROUTER_GAUGES = {
    "num_requests_queued": ("num_queued", "Requests that wait in the router."),
    "num_requests_in_flight": ("num_in_flight", "Requests that workers have."),
}
CODES = (  # that a call may end with; the last two only by a defect
    *("OK", "CANCELLED", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED"),
    *("RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "UNAVAILABLE", "UNAUTHENTICATED", "INTERNAL", "UNKNOWN"),
)
WORKER_FAILURES = (  # of their counters: each is there before it counts, else nobody sees that it grows
    *("checksum_mismatches", "chunks_failed", "handoffs_failed", "handoffs_stalled", "leases_expired"),
    *("leases_quarantined", "moves_failed", "peers_killed", "receipts_bad", "resends"),
)
WORKER_GAUGES = {
    "num_requests_running": ("num_running", "Requests that run on a worker."),
    "num_requests_waiting": ("num_waiting", "Requests that wait there."),
    "num_tokens_waiting": ("waiting_tokens", "Tokens of prompts that wait there."),
    "kv_pages": ("total_pages", "Pages of KV that it has."),
    "kv_pages_available": ("available_pages", "Of those, free or cached."),
    "kv_pages_leased": ("leased_pages", "Of those, promised to handoffs on their way."),
    "kv_pages_fenced": ("fenced_pages", "Of those, waiting for a sender that may still write them."),
    "kv_pages_quarantined": ("quarantined_pages", "Of those, given up: a sender that hangs may still write them."),
    "worker_step_age_seconds": ("step_age_s", "How long its step has been running."),
    "worker_tasks": ("num_tasks", "Tasks of its event loop."),
    "worker_loop_lag_seconds": ("loop_lag_s", "By how much its event loop was late, the worst of a second."),
    "worker_report_age_seconds": ("report_age_s", "How long ago it was heard of."),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrape:
    model: str
    status: cluster_pb2.GetStatusResponse
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    codes: Mapping[str, int] = field(default_factory=dict)
    front: Mapping[str, tuple[float, str]] = field(default_factory=dict)  # gauges: value and meaning


def families(scrape: Scrape, counters: Mapping[str, str]) -> Iterator[Metric]:
    yield from _of_router(scrape, scrape.model, counters)
    yield from _of_workers(scrape.status.workers, scrape.model)
    yield from _of_pairs(scrape.status.workers, scrape.model)


def _of_router(scrape: Scrape, model: str, counters: Mapping[str, str]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    for name, text in counters.items():
        counter = CounterMetricFamily(PREFIX + name, text, labels=("model_name",))
        counter.add_metric((model,), scrape.status.counters[name])
        yield counter
    labels = ("model_name", "code")
    ended = CounterMetricFamily(PREFIX + "calls_ended", "Calls of Generate's by their code.", labels=labels)
    for code in dict.fromkeys((*CODES, *scrape.codes)):
        ended.add_metric((model, code), scrape.codes.get(code, 0))
    yield ended
    gauges = {name: (getattr(scrape.status, key), text) for name, (key, text) in ROUTER_GAUGES.items()}
    for name, (value, text) in (gauges | dict(scrape.front)).items():
        gauge = GaugeMetricFamily(PREFIX + name, text, labels=("model_name",))
        gauge.add_metric((model,), value)
        yield gauge


def _of_workers(workers: Iterable[cluster_pb2.WorkerStatus], model: str) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    labels = ("model_name", "worker_type", "worker")
    found = {name: GaugeMetricFamily(PREFIX + name, text, labels=labels) for name, (_, text) in WORKER_GAUGES.items()}
    usage = GaugeMetricFamily(PREFIX + "kv_cache_usage_perc", "Share of its pages in use, 0 to 1.", labels=labels)
    ready = GaugeMetricFamily(PREFIX + "worker_ready", "1 if the router can use it.", labels=labels)
    state = GaugeMetricFamily(PREFIX + "worker_state", "1 for the state that it is in.", labels=(*labels, "state"))
    is_open = "1: its steps fail, it is asked where there is no other; 0.5: one tries it."
    circuit = GaugeMetricFamily(PREFIX + "worker_circuit_open", is_open, labels=labels)
    takes = "What its steps take, in seconds for each; and their spread, as a share."
    costs = GaugeMetricFamily(PREFIX + "worker_step_costs", takes, labels=(*labels, "cost"))
    losses = CounterMetricFamily(PREFIX + "worker_losses", "Times it was lost.", labels=labels)
    events = CounterMetricFamily(PREFIX + "worker_events", "Its own counters.", labels=(*labels, "counter"))
    for worker in workers:
        key = (model, worker.role, worker.name)
        for name, (source, _) in WORKER_GAUGES.items():
            found[name].add_metric(key, getattr(worker, source))
        held = worker.total_pages - worker.available_pages
        usage.add_metric(key, held / worker.total_pages if worker.total_pages else 0.0)
        ready.add_metric(key, float(worker.state == "ready"))
        state.add_metric((*key, worker.state), 1.0)
        circuit.add_metric(key, CIRCUITS.get(worker.circuit, 0.0))
        losses.add_metric(key, worker.losses)
        for cost, value in worker.step_costs.items():
            costs.add_metric((*key, cost), value)
        if worker.counters:  # one that is not heard has none, and a 0 would be taken for a beginning
            for counter in dict.fromkeys((*WORKER_FAILURES, *worker.counters)):
                events.add_metric((*key, counter), worker.counters.get(counter, 0))
    yield from (*found.values(), usage, ready, state, circuit, costs, losses, events)


def _of_pairs(workers: Iterable[cluster_pb2.WorkerStatus], model: str) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    labels = ("model_name", "worker", "peer")
    counted = {
        name: CounterMetricFamily(PREFIX + name, text, labels=labels) for name, (_, text) in PAIR_COUNTERS.items()
    }
    failing = GaugeMetricFamily(
        PREFIX + "pair_failures", "Handoffs of a pair that failed one after another.", labels=labels
    )
    for worker in workers:
        for pair in worker.pairs:
            failing.add_metric((model, worker.name, pair.peer), pair.failures)
        for receipts in worker.receipts:
            for name, (source, _) in PAIR_COUNTERS.items():
                counted[name].add_metric((model, worker.name, receipts.peer), getattr(receipts, source))
    yield from (failing, *counted.values())
