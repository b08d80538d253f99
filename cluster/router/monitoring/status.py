"""What an operator sees of a router: the answers to GetStatus, which is scraped, too, and GetLoad. It only reads."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import asdict, fields
from typing import Any

from cluster.router.driver import Router
from cluster.router.links.worker_link import LinkState, WorkerLink
from cluster.router.monitoring.load import Ended
from kvrelay.v1 import cluster_pb2
from kvrelay.v1 import worker_pb2 as pb
from worker.convert import step_costs_from_proto

REPORTED = (
    *("num_waiting", "num_running", "waiting_tokens", "available_pages", "cached_pages", "total_pages"),
    *("leased_pages", "fenced_pages", "quarantined_pages", "num_tasks"),
)

AT_ONCE = 100  # ended requests that are looked at before others have the loop
TOLD = (  # of an Ended
    *("prompt_tokens", "cached_tokens", "output_tokens", "ttft_s", "tpot_s", "handoff_s", "failed"),
    *("slo_ttft_s", "slo_tpot_s"),
)
PHASED = ("before_first_s", "after_first_s", "prefill_worker", "decode_worker")  # to planners, besides


def status_of(router: Router, *others: Router, models: Sequence[str] = ()) -> cluster_pb2.GetStatusResponse:
    """Of the routers of one process, each of which serves a model. `models`: those that may be asked for."""
    routers, options = (router, *others), router.policy.options
    return cluster_pb2.GetStatusResponse(
        router_id=router.router_id,
        model=router.model.name if router.model is not None else "",
        uptime_s=router.uptime_s,
        num_queued=sum(each.policy.num_queued for each in routers),
        num_in_flight=sum(each.num_in_flight for each in routers),
        workers=[_worker_status(each, *standing) for each in routers for standing in each.workers()],
        counters={name: sum(each.metrics.counts[name] for each in routers) for name in router.metrics.counts},
        limits={f.name: str(getattr(options, f.name)) for f in fields(options)},
        loop_lag_s=router.loop_clock.lag_s,
        num_tasks=router.loop_clock.num_tasks,
        cluster_id=router.cluster_id,
        models=models,
    )


def _worker_status(
    router: Router, link: WorkerLink, report: pb.WorkerReport | None, age_s: float
) -> cluster_pb2.WorkerStatus:
    status = cluster_pb2.WorkerStatus(
        name=link.name,
        role=link.role,
        address=link.worker.address,
        state=link.state.value,
        losses=link.losses,
        reason=link.reason,
        model=link.worker.model,
    )
    _note_health(status, router, link)
    for peer, counts in router.metrics.receipts.of(link.name):
        status.receipts.add(peer=peer, **asdict(counts))
    if link.worker.trouble:
        status.reason = "; ".join(filter(None, (status.reason, link.worker.trouble)))
    if link.hello is not None:
        status.page_size = link.hello.page_size
        status.limits.update(link.hello.limits)
    if report is None:
        return status
    if report.draining and link.state is LinkState.READY:
        status.state = "drained" if report.drained else "draining"
    status.report_age_s = age_s
    status.round_trip_s, status.clock_ahead_s = link.clock.round_trip_s, link.time_of_day.ahead_s
    status.step_age_s = report.step_age_ms / 1e3
    status.loop_lag_s = report.loop_lag_ms / 1e3
    for key in REPORTED:
        setattr(status, key, getattr(report, key))
    status.counters.update(report.counters)
    if report.HasField("step_costs"):
        status.step_costs.update(asdict(step_costs_from_proto(report.step_costs)))
    return status


def told_of(ended: Ended) -> dict[str, Any]:
    return {key: getattr(ended, key) for key in TOLD}


async def a_few_at_a_time(rows: Iterable[Ended]) -> AsyncIterator[Ended]:
    """The loop has others to serve."""
    for number, ended in enumerate(rows):
        yield ended
        if number % AT_ONCE == AT_ONCE - 1:
            await asyncio.sleep(0)


async def load_of(router: Router, window_s: float) -> cluster_pb2.GetLoadResponse:
    """`window_s` 0: of all that is kept."""
    now, load = router.now, router.metrics.load
    window_s = window_s or math.inf
    whole_s = min(window_s, now - load.whole_since_s, router.uptime_s)
    answer = cluster_pb2.GetLoadResponse(whole_s=whole_s)
    async for ended in a_few_at_a_time(load):
        if now - ended.arrived_s < window_s:
            where = {key: getattr(ended, key) for key in PHASED}
            answer.requests.add(age_s=now - ended.arrived_s, **told_of(ended), **where)
    return answer


def _note_health(status: cluster_pb2.WorkerStatus, router: Router, link: WorkerLink) -> None:
    """What stands against sending requests to it, as the router sees it."""
    health, now = router.policy.health, router.now
    status.circuit = health.circuit(link.name, now)
    for pair in health.pairs(link.name):
        age_s = now - pair.failed_s
        status.pairs.add(peer=pair.name, failures=pair.failures, reason=pair.reason, age_s=age_s)
    if link.state is not LinkState.READY:
        return
    if why := health.doubt(link.name):
        status.state, status.reason = "suspect", why
    elif (circuit := health.steps.get(link.name)) is not None:
        status.reason = f"failures in a row: {circuit.failures}, the last: {circuit.reason}"
