"""serve_load has a cluster serve requests at several rates, over and over for some minutes, and tells what became of
each: what kvrelay/calibrate/contention.py fits.

The rates are those at which prefill computes so large a share of the time; the first is guessed from the tables, the
others follow what was seen. Prompts and answers are of all lengths; by turns prompts are twice as long as answers,
answers twice as long as prompts, and prompts ten times as long as answers, so that it shows what each of them costs
cores, router and clients: a few long prompts leave them more than many short ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvrelay.bench.load import play
from kvrelay.bench.metrics import Outcome
from kvrelay.bench.options import PlayOptions, WorkloadOptions
from kvrelay.bench.run import drawn
from kvrelay.bench.workload import timed_shapes
from kvrelay.calibrate.contention import ServedRun
from kvrelay.calibrate.probes import failure_of
from kvrelay.calibrate.served_steps import busy_s, courses_of, span_s
from kvrelay.client.client import AsyncClient
from kvrelay.client.types import ServedModel
from placement.latency.profile import Profile
from placement.latency.profile_latency import ProfileLatency

BUSY = (0.25, 0.5, 0.75)  # of the time that prefill computes; with all lengths KINDS of runs
SHORTER = ((8, 16), (16, 8), (3, 32))  # than the longest sequence: so many times, prompts and answers
RUN_S = 15.0  # of arrivals, at most
LEAST_REQUESTS, MOST_REQUESTS = 12, 400
WAIT_S = 120.0  # for an answer
RAISED = 3.0  # a rate from the one before, at most
DECODE_SHARE = 0.7  # of what the decode workers could do by the tables


async def serve_load(
    client: AsyncClient,
    model: ServedModel,
    profile: Profile,
    minutes: float,
    seed: int,
    on_progress: Callable[[str, int, int], None],
) -> list[ServedRun]:
    """Raises KvrelayError if a request fails."""
    rates, runs = [Rates(profile, lengths) for lengths in _lengths(profile)], list[ServedRun]()
    begun_s, whole_s = time.monotonic(), 60 * minutes
    rounds = max(1, round(whole_s / (len(BUSY) * RUN_S)))
    seconds = whole_s / (len(BUSY) * rounds)
    turns = turns_of(rounds * len(BUSY))
    for number, (lengths, busy) in enumerate(turns):
        on_progress("all at work", number, len(turns))
        asked = rates[lengths]
        options = _workload(asked, busy, seconds, seed + number)
        runs.append(await _run(client, model, options, time.monotonic() - begun_s))
        asked.note(runs[-1])
    on_progress("all at work", 1, 1)
    return runs


def turns_of(count: int) -> list[tuple[int, float]]:
    """Which lengths, and how busy, run by run: what disturbs the machine for a minute meets all of them alike."""
    return [(i % len(SHORTER), BUSY[(i + i // len(SHORTER)) % len(BUSY)]) for i in range(count)]


class Rates:
    """Which rate keeps prefill at work for a share of the time, with prompts and answers of these lengths."""

    def __init__(self, profile: Profile, lengths: tuple[int, int]) -> None:
        self.lengths = prompt, output = lengths
        latency = ProfileLatency(profile)
        self._workers = profile.prefill_pool.count
        self._top = DECODE_SHARE * profile.decode_pool.count * _tokens_per_s(profile, latency, prompt + output // 2)
        self._top /= output
        self._rate = self._workers / latency.prefill_s([(prompt, 0)])  # for all of the time
        self._is_seen = False

    def for_busy(self, share: float) -> float:
        return min(self._top, share * self._rate)

    def note(self, run: ServedRun) -> None:
        seen = busy_share(run) / self._workers
        if seen > 0:
            rate = run.rate / seen
            self._rate = min(rate, RAISED * self._rate) if not self._is_seen else (self._rate + rate) / 2
            self._is_seen = True


def busy_share(run: ServedRun) -> float:
    """Of the time from the first request to the last, that prefill workers computed, all added up."""
    return busy_s(run.courses) / span_s(run.courses) if run.courses else 0.0


def _tokens_per_s(profile: Profile, latency: ProfileLatency, context: int) -> float:
    sizes = {point.batch_size for point in profile.decode}
    return max(size / latency.decode_line(size, size * context).step_s for size in sizes)


def _lengths(profile: Profile) -> list[tuple[int, int]]:
    """Of prompts and answers, on average: each has its turn to be the longer, and prompts one to be all there is."""
    longest = int(profile.model["max_model_len"])
    return [(max(8, longest // prompt), max(8, longest // output)) for prompt, output in SHORTER]


def _workload(rates: Rates, busy: float, seconds: float, seed: int) -> WorkloadOptions:
    prompt, output = rates.lengths
    rate = rates.for_busy(busy)
    count = min(MOST_REQUESTS, max(LEAST_REQUESTS, round(rate * seconds)))
    return WorkloadOptions(
        num_prompts=count,
        request_rate=rate,
        random_input_len=prompt,
        random_output_len=output,
        random_range_ratio=0.9,
        seed=seed,
    )


async def _run(client: AsyncClient, model: ServedModel, options: WorkloadOptions, at_s: float) -> ServedRun:
    _, planned = drawn(options, PlayOptions(), model, timed_shapes(options))
    begun_s = time.monotonic()
    outcomes, _ = await play(client, planned, timeout_s=WAIT_S)
    failed = next((outcome for outcome in outcomes if not outcome.succeeded), None)
    if failed is not None:
        raise failure_of(failed, WAIT_S)
    load = await client.load(time.monotonic() - begun_s)
    return ServedRun(
        at_s=at_s,
        rate=options.request_rate,
        courses=courses_of(load.requests),
        first_token_s=[_since_prefill_s(outcome) for outcome in outcomes],
        rest_s=[_rest_s(outcome) for outcome in outcomes],
        exposed_s=[outcome.receipt.exposed_s for outcome in outcomes if outcome.receipt is not None],
    )


def _since_prefill_s(outcome: Outcome) -> float:
    """What the client waited for the first token beside the server's routing, queue and prefill."""
    phases = outcome.timeline.phases_s if outcome.timeline else {}
    return outcome.ttft_s - sum(phases.get(name, 0.0) for name in ("route", "prefill_queue", "prefill"))


def _rest_s(outcome: Outcome) -> float:
    """Between its first token and its last, beside what the server says."""
    timeline = outcome.timeline
    return outcome.e2e_s - outcome.ttft_s - (timeline.e2e_s - timeline.ttft_s) if timeline else 0.0
