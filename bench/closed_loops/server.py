"""simulated plays one measured case on the colocated simulator: one mixed worker, as the engine that served ran it.

The engine packs whole prompts into steps that decode (in-flight batching without chunked context), admits a request
when pages for its whole length are free (GUARANTEED_NO_EVICT), and has no router before it. Times come from the model's
config and the hardware file by the planner's ordinary catalogue; Overheads are what a server spends besides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from bench.closed_loops.measured import Case
from decode_worker.run import DecodeRun
from mixed_worker.options import MixedOptions
from placement.build.from_offers import SIZED_FOR_BURSTS
from placement.build.worker import sim_worker
from placement.catalogs.base import Degrees, Offer
from placement.catalogs.roofline import RooflineCatalog
from placement.latency.base import DecodeLine, LatencyModel
from placement.latency.hardware import Hardware, load_hardware
from placement.latency.model_files import load_shape
from placement.latency.model_shape import ModelShape
from placement.simulator.clock import VirtualClock
from placement.simulator.cluster import SimCluster, SimWorker
from placement.simulator.machines.mixed import MixedMachine
from placement.simulator.machines.steps import DecodeSteps
from placement.simulator.outcome import Outcome, percentiles
from placement.simulator.simulate import Simulation
from placement.workload.closed_loop import ClosedLoop
from placement.workload.requests import Workload

STEP_TOKENS = 32_768  # of prompts in a step: TTFTs of 10 to 50 clients come in such strides, whatever the lengths
MAX_BATCH_SIZE = 256
ASKED_EACH = 24  # times, by a client, at most
OUTPUT_TOKENS = 600_000  # of a run, at most: how long each lasted is not published, and so many fits those with a queue


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """Seconds that a server spends and an engine's kernels do not. `step_s`: between two steps. `token_s`: for each
    token that a step makes, to sample, detokenise and stream it, while the next step waits. `request_s`: for each
    request, to parse and tokenise it, one after another, while steps go on. `prefill`, `attention`: no overheads, but
    by what the latency model is wrong: factors of what a step's prompts take, and of what reading KV takes."""

    step_s: float = 0.0
    token_s: float = 0.0
    request_s: float = 0.0
    prefill: float = 1.0
    attention: float = 1.0


NONE = Overheads()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedLatency:
    """A latency model with a server's overheads."""

    model: LatencyModel
    more: Overheads

    @property
    def source(self) -> str:
        return f"{self.model.source}, served with {self.more}"

    @property
    def stages(self) -> int:
        return self.model.stages

    def prefill_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        return self.model.prefill_s(chunks) * self.more.prefill + self.more.token_s * len(chunks)

    def decode_line(self, batch_size: int, context_tokens: int) -> DecodeLine:
        line, more = self.model.decode_line(batch_size, context_tokens), self.more
        added_s = more.token_s * batch_size + (more.attention - 1) * line.per_token_s * context_tokens
        return DecodeLine(line.step_s + added_s, line.per_token_s * more.attention, line.until_tokens)

    def mixed_s(self, chunks: Sequence[tuple[int, int]], batch_size: int, context_tokens: int) -> float:
        decode_s = self.decode_line(batch_size, context_tokens).step_s if batch_size else 0.0
        alone_s = self.model.decode_line(batch_size, context_tokens).step_s if batch_size else 0.0
        more_s = self.model.mixed_s(chunks, batch_size, context_tokens) - alone_s
        return decode_s + more_s * self.more.prefill + self.more.token_s * len(chunks)

    def transfer_s(self, num_tokens: int) -> float:
        return self.model.transfer_s(num_tokens)


@cache
def offer_of(model: str, hardware: str, precision: str, tp: int) -> Offer:
    """fp8: of weights and arithmetic, as an fp8 model has it; and memory holds the KV of twice as many tokens, which
    are not read any faster: by these runs a token of KV takes 74 ns in fp8 and 77 ns in fp16 (8B on one H100)."""
    shape, machine = load_shape(model), load_hardware(hardware)
    if precision == "fp16":
        return _offer(shape, machine, tp)
    shape = replace(shape, weight_bits=8.0, quantisation="fp8", compute_dtype="float8")
    held = _offer(replace(shape, kv_dtype="float8"), machine, tp)
    return replace(_offer(shape, machine, tp), num_pages=held.num_pages)


def _offer(shape: ModelShape, machine: Hardware, tp: int) -> Offer:
    catalog = RooflineCatalog(shape, machine, max_batch_tokens=STEP_TOKENS, max_batch_size=MAX_BATCH_SIZE)
    offer = catalog.offer(Degrees(tp))
    assert isinstance(offer, Offer), offer
    return offer


def holds(case: Case) -> bool:
    """Whether memory holds all clients' requests at once."""
    return case.kv_tokens <= offer_of(*case.setting).kv_tokens


def cluster_of(case: Case, overheads: Overheads) -> SimCluster:
    offer = offer_of(*case.setting)
    offer = replace(
        offer,
        latency=ServedLatency(model=offer.latency, more=overheads),
        step_overhead_s=overheads.step_s,
    )
    options = MixedOptions(
        max_batch_tokens=STEP_TOKENS,
        chunk_tokens=STEP_TOKENS,
        max_prefill_requests=MAX_BATCH_SIZE,
        pack_tokens=None,
        max_batch_size=MAX_BATCH_SIZE,
        admission="worst_case",
    )
    worker: SimWorker = sim_worker("server", "mixed", offer, options)
    return SimCluster(workers=(worker,), router=SIZED_FOR_BURSTS, message_s=0.0)


class WatchedSteps(DecodeSteps):
    """Keeps how long each step took, and for how many it made a token."""

    def __init__(self, clock: VirtualClock, run: DecodeRun, on_end: Callable[[], None]) -> None:
        super().__init__(clock, run, on_end)
        self.gaps: list[tuple[float, int]] = []

    def end(self) -> None:
        growth_s = self._line.per_token_s * self.count
        self.gaps += [(self._line.step_s + growth_s * step, self.count) for step in range(self.planned)]
        super().end()


class ServedSimulation(Simulation):
    """Requests pass the server's front, one after another, before its engine knows of them."""

    def __init__(self, cluster: SimCluster, workload: Workload, request_s: float) -> None:
        super().__init__(cluster, workload)
        self._request_s = request_s
        self._front_free_s = 0.0

    def _send(self, index: int) -> None:
        now = self.clock.now
        self.ledger.on_sent(index, now)
        self._front_free_s = max(now, self._front_free_s) + self._request_s
        self.clock.at(self._front_free_s, self._enter, index)

    def _enter(self, index: int) -> None:
        self.router.arrive(index, 0.0)


def simulated(case: Case, overheads: Overheads = NONE, *, asked_each: int = ASKED_EACH) -> dict[str, float]:
    """By the names in measured.WANTED."""
    simulation = ServedSimulation(cluster_of(case, overheads), workload_of(case, asked_each), overheads.request_s)
    machine = simulation.machines["server"]
    assert isinstance(machine, MixedMachine)
    machine.steps = steps = WatchedSteps(simulation.clock, DecodeRun(machine.policy), machine._on_end)
    outcome = simulation.play()
    return values_of(outcome, steps.gaps)


def workload_of(case: Case, asked_each: int) -> Workload:
    count = max(case.concurrency, min(asked_each * case.concurrency, OUTPUT_TOKENS // case.output_len))
    return Workload(
        arrival_s=np.zeros(count),
        prompt_len=np.full(count, case.input_len),
        output_len=np.full(count, case.output_len),
        loop=ClosedLoop(max_concurrency=case.concurrency),
    )


def values_of(outcome: Outcome, gaps: Sequence[tuple[float, int]]) -> dict[str, float]:
    assert outcome.served == len(outcome)
    gap_s, count = np.array(gaps).T
    order = np.argsort(gap_s)
    at = np.searchsorted(np.cumsum(count[order]), 0.95 * count.sum())
    return {
        "ttft_mean": float(outcome.ttft_s.mean()),
        "ttft_p95": percentiles(outcome.ttft_s, (95,))[0],
        "itl_mean": float(outcome.tpot_s.mean()),
        "itl_p95": float(gap_s[order][at]),
        "throughput": float(outcome.workload.output_len.sum() / outcome.finish_s.max()),
    }
