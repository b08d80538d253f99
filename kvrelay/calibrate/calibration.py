"""calibrate measures a running cluster by its ordinary API and makes a profile of it.

    check -> Measuring (what to ask, in rounds) -> Prober (sends and reads) -> Samples -> profile_of (medians, errors)
          -> serve_load (all workers at work, for minutes) -> fit_under_load (interference, swing, noise)

It assumes that nobody else uses the cluster meanwhile. What is measured is a prefill and a decode pool, or one mixed
worker, which is both: of several the router would choose by what it predicts, and not by what a probe means.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

from kvrelay.calibrate.contention import fit_under_load
from kvrelay.calibrate.effort import USUAL, Effort
from kvrelay.calibrate.loading import serve_load
from kvrelay.calibrate.measuring import Measuring, OnProgress
from kvrelay.calibrate.points import degree_of, profile_of, threads_of
from kvrelay.calibrate.probes import Prober
from kvrelay.calibrate.served_steps import Tables
from kvrelay.client.client import AsyncClient
from kvrelay.client.types import ClusterStatus, ServedModel, WorkerState
from placement.latency.profile import Profile, SlowdownPoint
from placement.latency.profile_latency import ProfileLatency

LEAST_LEN = 128  # tokens that a sequence may have: a prompt and the steps of a window


class CalibrationError(Exception):
    """A cluster that cannot be measured: one sentence with the mend."""


async def calibrate(
    client: AsyncClient,
    *,
    effort: Effort = USUAL,
    seed: int = 0,
    machine: dict[str, Any] | None = None,
    commit: str = "",
    on_progress: OnProgress = lambda what, done, total: None,
) -> Profile:
    """Raises KvrelayError if the cluster cannot be asked, CalibrationError if it cannot be measured."""
    model, status = await client.model_info(), await client.status()
    if len(status.models) > 1:
        several = " and ".join(status.models)
        raise CalibrationError(
            f"this cluster serves {several}, and a profile is of one model; give one that serves one"
        )
    ready = [worker for worker in status.workers if worker.state == "ready"]
    mixed = [worker for worker in ready if worker.role == "mixed"]
    pools = {role: mixed or [worker for worker in ready if worker.role == role] for role in ("prefill", "decode")}
    if mixed:
        _check_mixed(ready)
    _check(model, pools, status)
    measuring = Measuring(Prober(client, model, seed, 1 if mixed else 2), pools, effort, seed, on_progress)
    await measuring.measure()
    if mixed and not measuring.samples.mixed:
        raise CalibrationError("no prompt was read in a step that decodes; give the cluster a longer max_model_len")
    profile = profile_of(measuring, model, status, machine or {}, commit)
    if mixed or not effort.minutes:
        return profile
    if measuring.shares_host:  # whether or not any probe of it said something
        profile = replace(profile, slowdown=profile.slowdown or (SlowdownPoint(batch_size=1, prefill=1.0, decode=1.0),))
    runs = await serve_load(client, model, profile, effort.minutes, seed, on_progress)
    return replace(profile, load=fit_under_load(runs, tables_of(profile)))


def tables_of(profile: Profile) -> Tables:
    """What it says without a load."""
    slowdown = profile.slowdown
    return Tables(
        latency=ProfileLatency(replace(profile, load=None)),
        overhead_s=profile.prefill_overhead_s,
        message_s=profile.message_s,
        max_batch_tokens=int(profile.prefill_pool.options.get("max_batch_tokens", 512)),
        prefill_beside=statistics.median(point.prefill for point in slowdown) if slowdown else 1.0,
        decode_beside=statistics.median(point.decode for point in slowdown) if slowdown else 1.0,
    )


def _check_mixed(ready: list[WorkerState]) -> None:
    if len(ready) > 1:
        names = ", ".join(worker.name for worker in ready)
        raise CalibrationError(
            f"the workers are {names}; give one mixed worker, or a prefill and a decode pool: plans of several mixed "
            "ones, and of hybrids, are made from such profiles"
        )
    if ready[0].limits.get("chunk_tokens") == "0":
        raise CalibrationError(f"chunk_tokens of {ready[0].name} is 0, so no step is of both; give it 1 or more")


def _check(model: ServedModel, pools: dict[str, list[WorkerState]], status: ClusterStatus) -> None:
    for role, workers in pools.items():
        if not workers:
            raise CalibrationError(f"no {role} worker is ready; see kvrelay status")
        kinds = {(w.page_size, w.total_pages, tuple(sorted(w.limits.items()))) for w in workers}
        if len(kinds) > 1:
            names = ", ".join(w.name for w in workers)
            raise CalibrationError(f"the {role} workers {names} differ in memory or limits; give all the same")
    for key, of in (("tensor_parallel", degree_of), ("threads", threads_of)):
        degrees = {role: of(workers[0]) for role, workers in pools.items()}
        if len(set(degrees.values())) > 1:
            each = " and ".join(f"{degree} in the {role} pool" for role, degree in degrees.items())
            raise CalibrationError(f"{key} is {each}; a profile is of one degree, so give both the same")
    for role, workers in pools.items():
        if (stages := workers[0].limits.get("pipeline_parallel", "1")) != "1":
            raise CalibrationError(
                f"pipeline_parallel is {stages} in the {role} pool; a profile is of workers in one stage, so give 1"
            )
    if not pools["prefill"][0].page_size:
        raise CalibrationError("the router does not say its workers' page size; it runs another version of kvrelay")
    if model.max_model_len < LEAST_LEN:
        raise CalibrationError(
            f"max_model_len is {model.max_model_len}; give the cluster {LEAST_LEN} or more to be measured"
        )
    if busy := status.num_in_flight + status.num_queued:
        raise CalibrationError(f"{busy} requests are being served; calibrate a cluster that nobody else uses")
