"""What was measured, as a profile: the median of each point, and the error at the points held out of the tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from kvrelay.calibrate.measuring import Measuring, Samples
from kvrelay.client.types import ClusterStatus, ServedModel, WorkerState
from placement.latency.profile import (
    DecodePoint,
    Fault,
    MixedPoint,
    PoolFacts,
    PrefillPoint,
    Profile,
    SlowdownPoint,
    TransferPoint,
)
from placement.latency.profile_latency import ProfileLatency

ERROR_SHARE = 0.9


def degree_of(worker: WorkerState) -> int:
    return int(worker.limits.get("tensor_parallel", 1))


def threads_of(worker: WorkerState) -> int:
    """Of each of its processes; 0: on a GPU, or of another version."""
    return int(worker.limits.get("threads", 0))


def profile_of(
    measuring: Measuring,
    model: ServedModel,
    status: ClusterStatus,
    machine: dict[str, Any],
    commit: str,
) -> Profile:
    """The median of each point that was measured, of a cluster whose `status` has been checked."""
    prefill, decode = measuring.pools["prefill"], measuring.pools["decode"]
    samples = measuring.samples
    lone = [sample for sample in samples.lone if sample.prompt_len <= measuring.pack]
    overhead_s = _overhead_s(samples, measuring.pack)
    message_s = max(1e-5, statistics.median((sample.queue_s + sample.answer_s) / 2 for sample in lone))
    exposed_s = [sample.exposed_s for group in samples.handoffs.values() for sample in group]
    profile = Profile(
        model={
            name: getattr(model, name)
            for name in ("name", "architecture", "dtype", "fingerprint", "num_params", "max_model_len")
        },
        machine=machine,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=commit,
        page_size=prefill[0].page_size,
        tp=degree_of(prefill[0]),
        threads=threads_of(prefill[0]),
        prefill_pool=_pool(prefill),
        decode_pool=_pool(decode),
        prefill=_prefill_points(measuring, overhead_s),
        decode=_decode_points(samples),
        transfer=_transfer_points(samples),
        mixed=_mixed_points(samples),
        prefill_overhead_s=overhead_s,
        message_s=message_s,
        handoff_s=max(0.0, statistics.median(exposed_s) - message_s) if exposed_s else 0.0,
        client_s=max(0.0, statistics.median(sample.outside_s + sample.route_s for sample in samples.lone)),
        slowdown=tuple(_slowdown_point(size, pairs) for size, pairs in sorted(samples.slowdown.items())),
        router=_limits(status.limits),
        notes={"repeats": measuring.effort.repeats, "steps": measuring.effort.steps},
    )
    return replace(profile, error=errors(profile))


def _overhead_s(samples: Samples, tokens: int) -> float:
    """By how much steps that follow one another take longer than the same step alone: the driver, and what the last
    handoff still computes."""
    alone = samples.prefill.get(((tokens, 0),), ())
    return max(0.0, statistics.median(samples.gaps_s) - statistics.median(alone)) if samples.gaps_s and alone else 0.0


def _pool(workers: Sequence[WorkerState]) -> PoolFacts:
    return PoolFacts(count=len(workers), num_pages=workers[0].total_pages, options=_limits(workers[0].limits))


def _limits(limits: Mapping[str, str]) -> dict[str, Any]:
    return {name: _value(text) for name, text in sorted(limits.items())}


def _value(text: str) -> int | float | str | bool:
    if text in ("True", "False"):
        return text == "True"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _prefill_points(measuring: Measuring, overhead_s: float) -> tuple[PrefillPoint, ...]:
    samples = measuring.samples
    points = [
        PrefillPoint(
            chunks=chunks, seconds=statistics.median(times), repeats=len(times), held_out=chunks in samples.held_out
        )
        for chunks, times in sorted(samples.prefill.items())
    ]
    whole_s = next((p.seconds for p in points if p.chunks == ((measuring.max_chunk, 0),)), 0.0)
    is_cached = any(start for point in points for _, start in point.chunks)
    for length, times in samples.long.items():  # its second step, by what the first takes
        left_s = statistics.median(times) - whole_s - overhead_s
        if left_s > 0 and length <= 2 * measuring.max_chunk:
            chunk = (length - measuring.max_chunk, measuring.max_chunk)
            points.append(PrefillPoint(chunks=(chunk,), seconds=left_s, repeats=len(times), held_out=is_cached))
    return tuple(points)


def _decode_points(samples: Samples) -> tuple[DecodePoint, ...]:
    return tuple(
        DecodePoint(
            batch_size=size,
            context_tokens=round(statistics.median(sample.context_tokens for sample in group)),
            seconds=statistics.median(sample.seconds for sample in group),
            repeats=len(group),
            held_out=held_out,
        )
        for (size, _, held_out), group in sorted(samples.decode.items())
    )


def _mixed_points(samples: Samples) -> tuple[MixedPoint, ...]:
    return tuple(
        MixedPoint(
            chunks=((length, 0),),
            batch_size=size,
            context_tokens=round(statistics.median(context for _, context in group)),
            seconds=statistics.median(seconds for seconds, _ in group),
            repeats=len(group),
            held_out=held_out,
        )
        for (size, length, held_out), group in sorted(samples.mixed.items())
        if group
    )


def _transfer_points(samples: Samples) -> tuple[TransferPoint, ...]:
    points = [
        TransferPoint(
            tokens=length,
            bytes=round(statistics.median(sample.bytes for sample in group)),
            seconds=statistics.median(sample.seconds for sample in group),
            exposed_s=statistics.median(sample.exposed_s for sample in group),
            repeats=len(group),
        )
        for length, group in sorted(samples.handoffs.items())
    ]
    return tuple(replace(point, held_out=i % 3 == 2) for i, point in enumerate(points))


def _slowdown_point(size: int, pairs: Sequence[tuple[float, float]]) -> SlowdownPoint:
    return SlowdownPoint(
        batch_size=size,
        prefill=max(1.0, statistics.median(prefill for prefill, _ in pairs)),
        decode=max(1.0, statistics.median(decode for _, decode in pairs)),
    )


def errors(profile: Profile) -> Fault:
    """Nine times in ten, at the points held out."""
    latency = ProfileLatency(profile)
    between_s = profile.prefill_overhead_s
    prefill = [(latency.prefill_s(p.chunks) - between_s, p.seconds) for p in profile.prefill if p.held_out]
    prefill += [
        (latency.mixed_s(p.chunks, p.batch_size, p.context_tokens) - between_s, p.seconds)
        for p in profile.mixed
        if p.held_out
    ]
    decode = [
        (latency.decode_line(point.batch_size, point.context_tokens).step_s, point.seconds)
        for point in profile.decode
        if point.held_out
    ]
    transfer = [(latency.transfer_s(p.tokens), p.seconds) for p in profile.transfer if p.held_out and p.seconds]
    return Fault(prefill=_wrong(prefill), decode=_wrong(decode), transfer=_wrong(transfer))


def _wrong(pairs: Iterable[tuple[float, float]]) -> float:
    shares = sorted(abs(predicted / actual - 1) for predicted, actual in pairs)
    return shares[math.ceil(ERROR_SHARE * len(shares)) - 1] if shares else 0.0
