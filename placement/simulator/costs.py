"""costs_of says what a simulated worker would have measured of its steps: StepTimes' fit to its latency model.

A live worker's fit follows what it runs; here it is made once, over the batches that the worker's options allow.
"""

from __future__ import annotations

from itertools import product

from placement.latency.base import decode_s
from placement.simulator.cluster import SimWorker
from worker.steps.costs import StepCosts
from worker.steps.times import StepTimes

BATCHES = (8, 32, 64, 128)
CONTEXTS = (500, 1500)  # tokens of each request
ROUNDS = 4  # so that enough steps are seen


def costs_of(worker: SimWorker) -> StepCosts:
    options, latency = worker.policy, worker.latency
    step_tokens = getattr(options, "max_batch_tokens", 0)
    chunk_tokens = min(step_tokens, getattr(options, "chunk_tokens", 0))
    most = getattr(options, "max_batch_size", 0)
    alone = {step_tokens // 4, step_tokens // 2, step_tokens} - {0}
    batches = [size for size in BATCHES if size <= most] or [most] * (most > 0)
    times = StepTimes()
    for _, tokens, context in product(range(ROUNDS), alone, CONTEXTS):
        times.note(tokens, 0, 0, _whole(worker, latency.prefill_s([(tokens, context)])))
    for _, size, context in product(range(ROUNDS), batches, CONTEXTS):
        times.note(0, size, size * context, _whole(worker, decode_s(latency, size, size * context)))
        if chunk_tokens:
            step_s = latency.mixed_s([(chunk_tokens, context)], size, size * context)
            times.note(chunk_tokens, size, size * context, _whole(worker, step_s))
    costs = times.costs()
    assert costs is not None, "no step was seen"
    return costs


def _whole(worker: SimWorker, stage_s: float) -> float:
    return stage_s * worker.latency.stages + worker.step_overhead_s
