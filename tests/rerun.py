"""rerun simulates what a recorded live run was asked, with step times as it had them, and compares what comes out.

A replay (placement/checks/replay.py) tells policies what they were told, and must agree exactly. Here only the arrivals
and the time of steps are taken from the recording; when a report, a token or a handoff comes is the simulator's own. So
it shows how well the machines, links and reports are simulated: which workers each request got, its TTFT and its end.
Clients that left are left out; a worker that was lost is lost at its time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cluster.router.decisions import Assigned
from cluster.router.options import RouterOptions
from placement.build.worker import WorkerModel, sim_worker
from placement.checks.replay import Recording, RecordingError
from placement.latency.base import DecodeLine
from placement.simulator.cluster import Loss, SimCluster, SimWorker
from placement.simulator.simulate import Simulation
from placement.workload.requests import Workload
from worker.options import report_gap_s
from worker.roles import kind_of
from worker.steps.costs import StepCosts
from worker.steps.times import StepTimes

Held = tuple[int, int, int]  # tokens of prompts, requests that decode, their context


@dataclass(frozen=True, slots=True)
class RecordedSteps:
    """A LatencyModel of one worker, fitted to its recorded steps: passes of all `stages`, which take an even share."""

    costs: StepCosts
    source: str = "fitted to recorded steps"
    stages: int = 1

    def prefill_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        return self.costs.step_s(sum(tokens for tokens, _ in chunks), 0, 0, both=0) / self.stages

    def decode_line(self, batch_size: int, context_tokens: int) -> DecodeLine:
        step_s = self.costs.step_s(0, batch_size, context_tokens, both=0)
        return DecodeLine(step_s / self.stages, self.costs.context_token_s / self.stages)

    def mixed_s(self, chunks: Sequence[tuple[int, int]], batch_size: int, context_tokens: int) -> float:
        tokens = sum(tokens for tokens, _ in chunks)
        return self.costs.step_s(tokens, batch_size, context_tokens, both=1) / self.stages

    def transfer_s(self, num_tokens: int) -> float:
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What became of a request; times from its arrival, nan where it did not come so far in its first attempt."""

    prefill: str
    decode: str
    ttft_s: float = math.nan
    e2e_s: float = math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """Live and simulated, request by request."""

    live: Sequence[Course]
    simulated: Sequence[Course]

    def same(self, role: str) -> float:
        """Share of requests that got the same worker of the role."""
        pairs = zip(self.live, self.simulated, strict=True)
        return float(np.mean([getattr(a, role) == getattr(b, role) for a, b in pairs]))

    def ratio(self, what: str) -> float:
        """Simulated over live, of the mean ttft_s or e2e_s of the requests that have both."""
        pairs = [(getattr(a, what), getattr(b, what)) for a, b in zip(self.live, self.simulated, strict=True)]
        both = np.array([pair for pair in pairs if not any(map(math.isnan, pair))])
        return float(both[:, 1].mean() / both[:, 0].mean()) if len(both) else math.nan


def rerun(router: Recording, workers: Sequence[Recording], *, message_s: float = 0.0005) -> Rerun:
    """Raises RecordingError when there is nothing to compare."""
    asked = _asked(router)
    if not asked:
        raise RecordingError(f"{router.name} was asked nothing; give the recording of a run with requests")
    shapes = [shape for _, shape in asked.values()]
    known: dict[str, int] = {}
    begun_s = next(iter(asked.values()))[0]
    workload = Workload(
        arrival_s=np.array([at_s - begun_s for at_s, _ in asked.values()]),
        prompt_len=np.array([shape["prompt_len"] for shape in shapes]),
        output_len=np.array([shape["max_tokens"] for shape in shapes]),
        blocks=[
            tuple(known.setdefault(page["bytes"], len(known)) for page in shape["page_hashes"]) for shape in shapes
        ],
        block_len=workers[0].page_size,
        priority=np.array([shape.get("priority", 0) for shape in shapes], dtype=np.int64),
        slo_ttft_s=np.array([shape.get("slo_ttft_s", 0.0) for shape in shapes]),
        slo_tpot_s=np.array([shape.get("slo_tpot_s", 0.0) for shape in shapes]),
    )
    cluster = SimCluster(
        workers=tuple(_worker(recording) for recording in workers),
        router=RouterOptions(**router.limits),
        message_s=message_s,
        report_gap_s=report_gap_s(len(workers)),
        losses=tuple(_losses(router, begun_s)),
    )
    return Rerun(live=_live(router, asked), simulated=_simulated(cluster, workload))


def _asked(router: Recording) -> dict[str, tuple[float, Mapping[str, Any]]]:
    """First attempts of those that no client left: when, and the request's shape."""
    left = {call.args[0] for call in router.calls if call.method == "on_cancelled"}
    firsts = [c for c in router.calls if c.method == "assign" and not c.more.get("is_resent") and c.result is not None]
    shapes = [(call.args[1], call.args[0]["RequestShape"]) for call in firsts]
    return {shape["id"]: (at_s, shape) for at_s, shape in shapes if shape["id"] not in left}


def _losses(router: Recording, begun_s: float) -> list[Loss]:
    """on_worker_lost has no time of its own; the recorder's clock is the router's."""
    lost = [call for call in router.calls if call.method == "on_worker_lost" and call.result]
    return [Loss(worker=call.args[0], at_s=max(0.0, call.at_s - begun_s)) for call in lost]


def _live(router: Recording, asked: Mapping[str, tuple[float, Mapping[str, Any]]]) -> list[Course]:
    assigned: dict[str, Mapping[str, Any]] = {}
    first_s: dict[str, float] = {}
    end_s: dict[str, float] = {}
    for call in router.calls:
        if isinstance(call.result, dict) and "Assigned" in call.result:
            assigned.setdefault(call.result["Assigned"]["request_id"], call.result["Assigned"])
        elif call.method == "on_first_token":
            first_s.setdefault(call.args[0], call.args[1])
        elif call.method == "on_finished":
            end_s[call.args[0]] = call.at_s
    courses = []
    for request_id, (at_s, _) in asked.items():
        names = assigned.get(request_id, {"prefill": "", "decode": ""})
        courses.append(
            Course(
                prefill=names["prefill"],
                decode=names["decode"],
                ttft_s=first_s.get(request_id, math.nan) - at_s,
                e2e_s=end_s.get(request_id, math.nan) - at_s,
            )
        )
    return courses


def _simulated(cluster: SimCluster, workload: Workload) -> list[Course]:
    first: dict[int, Assigned] = {}  # by the request's index
    outcome = Simulation(cluster, workload, first.setdefault).play()
    courses = []
    for index in range(len(workload)):
        names = first.get(index)
        courses.append(
            Course(
                prefill=names.prefill if names else "",
                decode=names.decode if names else "",
                ttft_s=float(outcome.ttft_s[index]),
                e2e_s=float(outcome.e2e_s[index]),
            )
        )
    return courses


def _worker(recording: Recording) -> SimWorker:
    model = WorkerModel(latency=fitted(recording), num_pages=recording.num_pages, page_size=recording.page_size)
    role = recording.policy.removesuffix("Policy").lower()
    return sim_worker(recording.name, role, model, kind_of(role).load_options()(**recording.limits))


def fitted(recording: Recording) -> RecordedSteps:
    """The times between next_batch and on_batch_done, by what the batches held. One that was made while another ran
    begins when that ends, but where each pipeline stage has its own."""
    times, ended_s = StepTimes(), 0.0
    for held, made_s, end_s in _steps(recording):
        times.note(*held, end_s - (made_s if recording.num_stages > 1 else max(made_s, ended_s)))
        ended_s = end_s
    costs = times.costs(enough=1)
    if costs is None:
        raise RecordingError(f"{recording.name} ran no step; give the recording of a run in which it worked")
    return RecordedSteps(costs, stages=recording.num_stages)


def _steps(recording: Recording) -> Iterator[tuple[Held, float, float]]:
    """What each held, when it was made and when it was done. A mixed worker's two batches of one step are one."""
    beside = _beside(recording)
    decode: tuple[int, Held, float, float] | None = None  # the call that made it, and what is told of it
    for call in recording.calls:
        if not call.method.endswith("on_batch_done"):
            continue
        at = call.args[0]["result"]
        made = recording.calls[at]
        held = _held(made.result)
        if decode is not None and beside.get(at) == decode[0]:
            yield (held[0], *decode[1][1:]), decode[2], call.at_s
            decode = None
            continue
        if decode is not None:
            yield decode[1:]
        decode = (at, held, made.at_s, call.at_s) if "DecodeBatch" in made.result else None
        if decode is None:
            yield held, made.at_s, call.at_s
    if decode is not None:
        yield decode[1:]


def _beside(recording: Recording) -> dict[int, int]:
    """By the call that made a mixed worker's prompts, the one that made what decodes in the same step: the last before
    it, if there is anything in it."""
    found: dict[int, int] = {}
    last = None
    for at, call in enumerate(recording.calls):
        if call.method == "decode.next_batch":
            last = at if call.result["DecodeBatch"]["entries"] else None
        elif call.method == "prefill.next_batch" and call.result is not None and last is not None:
            found[at] = last
    return found


def _held(batch: Mapping[str, Any]) -> Held:
    if "PrefillBatch" in batch:
        return sum(chunk["ChunkPlan"]["length"] for chunk in batch["PrefillBatch"]["chunks"]), 0, 0
    entries = batch["DecodeBatch"]["entries"]
    return 0, len(entries), sum(entry["DecodeEntry"]["position"] + 1 for entry in entries)
