"""What an operator sees of a router: the answer to GetStatus, and the gauges that are scraped. It only reads."""

from __future__ import annotations

from dataclasses import fields

from cluster.router.driver import Router
from cluster.router.monitoring.metrics import WorkerGauges
from cluster.router.worker_link import LinkState, WorkerLink
from kvrelay.v1 import cluster_pb2
from kvrelay.v1 import worker_pb2 as pb

REPORTED = (
    *("num_waiting", "num_running", "waiting_tokens", "available_pages", "cached_pages", "total_pages"),
    "leased_pages",
)


def status_of(router: Router) -> cluster_pb2.GetStatusResponse:
    return cluster_pb2.GetStatusResponse(
        router_id=router.router_id,
        model=router.model.name if router.model is not None else "",
        uptime_s=router.uptime_s,
        num_queued=router.policy.num_queued,
        num_in_flight=router.num_in_flight,
        workers=[_worker_status(link, report, age_s) for link, report, age_s in router.workers()],
        counters=router.metrics.counts,
        limits={f.name: str(getattr(router.policy.options, f.name)) for f in fields(router.policy.options)},
    )


def _worker_status(link: WorkerLink, report: pb.WorkerReport | None, age_s: float) -> cluster_pb2.WorkerStatus:
    status = cluster_pb2.WorkerStatus(
        name=link.name,
        role=link.worker.role,
        address=link.worker.address,
        state=link.state.value,
        losses=link.losses,
        reason=link.reason,
    )
    if link.hello is not None:
        status.page_size = link.hello.page_size
        status.limits.update(link.hello.limits)
    if report is None:
        return status
    if report.draining and link.state is LinkState.READY:
        status.state = "draining"
    status.report_age_s = age_s
    for key in REPORTED:
        setattr(status, key, getattr(report, key))
    status.counters.update(report.counters)
    return status


def gauges_of(router: Router) -> list[WorkerGauges]:
    return [_gauges(link, report or pb.WorkerReport()) for link, report, _ in router.workers()]


def _gauges(link: WorkerLink, report: pb.WorkerReport) -> WorkerGauges:
    held = report.total_pages - report.available_pages
    return WorkerGauges(
        name=link.name,
        role=link.worker.role,
        num_running=report.num_running,
        num_waiting=report.num_waiting,
        kv_usage=held / report.total_pages if report.total_pages else 0.0,
        is_ready=link.state is LinkState.READY,
    )
