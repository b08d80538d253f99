"""Probes send a real request through each pair of workers: its prompt is read by the one, its KV handed over, and a few
tokens are written by the other. So one request tells a prefill step, a link and a decode step. Nothing is judged here.

They go one after another, behind all other requests, each pair once and then again while there is time: the first one
opens what is opened at first use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvrelay.calibrate.probes import LEAST_STEPS, ProbeError, Prober
from kvrelay.client.types import KvrelayError, ServedModel, WorkerState
from worker.roles import ROLES

Pair = tuple[str, str]  # prefill, decode: names
STEPS = 8  # of decode
ROUNDS = 3  # after the first
WAIT_S = 30.0  # for one probe
LEAST_PROMPT = 16  # tokens
SHARE_OF_PAGES = 4  # a probe takes at most one in so many of a worker's tokens
NOT_OURS = ("PERMISSION_DENIED", "UNAUTHENTICATED")
NO_ROOM = ("RESOURCE_EXHAUSTED",)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSample:
    """`decode_s`: None where guesses that came true left too few steps. `error`: why there is nothing else."""

    pair: Pair
    prefill_s: float = 0.0
    decode_s: float | None = None
    transport: str = ""
    bytes: int = 0
    transfer_s: float = 0.0
    exposed_s: float = 0.0
    resends: int = 0
    error: str = ""
    has_no_room: bool = False


def pairs_of(workers: Sequence[WorkerState]) -> list[Pair]:
    """Every pair of ready workers, all of one model; in an order in which all come early, for there may not be time for
    each pair."""
    ready = [worker for worker in workers if worker.state == "ready" and worker.role in ROLES]
    reads, writes = (
        [worker.name for worker in ready if phase in ROLES[worker.role].phases] for phase in ("prefill", "decode")
    )
    return [(p, writes[(i + by) % len(writes)]) for by in range(len(writes)) for i, p in enumerate(reads)]


def prompt_tokens(model: ServedModel, workers: Sequence[WorkerState], wanted: int) -> int:
    """As many as wanted, or as every worker reads in one step and has room for."""
    steps = [int(worker.limits["max_batch_tokens"]) for worker in workers if "max_batch_tokens" in worker.limits]
    rooms = [worker.total_pages * worker.page_size // SHARE_OF_PAGES for worker in workers if worker.total_pages]
    return max(LEAST_PROMPT, min([wanted, model.max_model_len - STEPS - 4, *steps, *rooms]))


async def probe(
    prober: Prober,
    pairs: Sequence[Pair],
    tokens: int,
    at_most_s: float,
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> list[PairSample]:
    """Samples in the order in which they came: one of a pair that failed, else the first only where it stayed alone.
    Raises KvrelayError when we may not ask."""
    until_s = time.monotonic() + at_most_s
    asked = [pair for _ in range(ROUNDS + 1) for pair in pairs]
    samples: dict[Pair, list[PairSample]] = {}
    for number, pair in enumerate(asked):
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            break
        on_progress("probes", number, len(asked))
        had = samples.setdefault(pair, [])
        if not any(sample.error for sample in had):
            had.append(await _through(prober, pair, tokens, min(WAIT_S, max(1.0, left_s))))
    on_progress("probes", len(asked), len(asked))
    return [sample for had in samples.values() for sample in (had[1:] or had)]


async def _through(prober: Prober, pair: Pair, tokens: int, wait_s: float) -> PairSample:
    try:
        outcome = await prober.through(pair, prober.prompt(tokens), STEPS, wait_s)
    except (KvrelayError, ProbeError) as error:
        code = error.code if isinstance(error, KvrelayError) else ""
        if code in NOT_OURS:
            raise
        why = error.message if isinstance(error, KvrelayError) else str(error)
        return PairSample(pair=pair, error=why, has_no_room=code in NO_ROOM)
    timeline, receipt = outcome.timeline, outcome.receipt
    assert timeline is not None
    if (timeline.prefill_worker, timeline.decode_worker) != pair or timeline.moves:
        went = f"{timeline.prefill_worker} and {timeline.decode_worker}"
        return PairSample(pair=pair, error=f"it was served by {went}", has_no_room=True)
    steps = outcome.output_len - 1 - timeline.accepted_tokens
    return PairSample(
        pair=pair,
        prefill_s=timeline.phases_s.get("prefill", 0.0),
        decode_s=timeline.phases_s.get("decode", 0.0) / steps if steps >= LEAST_STEPS else None,
        transport=receipt.transport if receipt is not None else "",
        bytes=receipt.bytes if receipt is not None else 0,
        transfer_s=receipt.transfer_s if receipt is not None else 0.0,
        exposed_s=receipt.exposed_s if receipt is not None else 0.0,
        resends=receipt.resends if receipt is not None else 0,
    )
