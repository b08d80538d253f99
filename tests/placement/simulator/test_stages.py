"""A simulated mixed worker with pipeline stages: the live policy's batches, one in each, as in the live step loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from decode_worker.batches import DecodeRequest
from engine.pages.pool import PagePool
from mixed_worker.options import MixedOptions
from mixed_worker.policy import MixedPolicy
from placement.latency.base import DecodeLine
from placement.latency.speculation import Speculation
from placement.simulator.cluster import Drain, Loss, RoleChange, SimWorker
from placement.simulator.machines.pipelined import Pass, PipelinedMixedMachine
from placement.simulator.simulate import Simulation, simulate_together
from placement.workload.requests import Workload
from prefill_worker.policy import PrefillBatch
from tests.placement.simulator.test_simulate import StagedDecode, cluster, play, requests, same, workers
from worker.steps.costs import share_after

pytestmark = pytest.mark.unit


@dataclass(frozen=True)
class Staged(StagedDecode):
    """Two stages of half the time each, of prompts, too."""

    def prefill_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        return super().prefill_s(chunks) / 2


@dataclass(frozen=True)
class ByTheRow(Staged):
    """1 ms for each row in each stage, and for each 10 tokens of prompts."""

    def prefill_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        return 1e-4 * sum(length for length, _ in chunks)

    def decode_line(self, batch_size: int, context_tokens: int) -> DecodeLine:
        return DecodeLine(1e-3 * batch_size, 0.0)


def mixed(count: int = 1, latency: Staged | None = None, **given: Any) -> list[SimWorker]:
    return workers("mixed", count, latency=latency or Staged(), **given)


def at_once(*lengths: tuple[int, int]) -> Workload:
    prompts, outputs = zip(*lengths, strict=True)
    return Workload(
        arrival_s=np.zeros(len(lengths)), prompt_len=np.array(prompts), output_len=np.array(outputs), blocks=[]
    )


@dataclass(frozen=True)
class Seen:
    """A pass: who had a token, which chunks of prompts were in it, and from when to when it was under way."""

    rows: tuple[str, ...]
    chunks: tuple[tuple[str, int, int], ...]
    begun_s: float
    done_s: float


def seen(rows: Sequence[DecodeRequest], prompts: PrefillBatch | None, begun_s: float, done_s: float) -> Seen:
    chunks = tuple((c.request_id, c.start, c.length) for c in prompts.chunks) if prompts else ()
    return Seen(tuple(row.request_id for row in rows), chunks, begun_s, done_s)


def passes_of(workload: Workload, latency: Staged | None = None) -> tuple[list[Seen], PipelinedMixedMachine]:
    """Of a lone worker, in the order in which they began."""
    simulation = Simulation(cluster(mixed(latency=latency)), workload)
    machine = simulation.machines["mixed-0"]
    assert isinstance(machine, PipelinedMixedMachine)
    found: list[Seen] = []
    time_pass = machine._time_pass

    def watched(begun: Pass, joined: tuple[str, ...]) -> None:
        time_pass(begun, joined)
        found.append(seen(begun.requests, begun.prompts, simulation.clock.now, machine._last_done_s))

    machine._time_pass = watched  # type: ignore[method-assign]
    outcome = simulation.play()
    assert outcome.served == len(workload)
    return found, machine


def test_a_lone_answer_is_no_faster_and_passes_all_stages_for_each_token() -> None:
    _, outcome = play(cluster(mixed(), message_s=0.001), at_once((100, 51)))
    assert outcome.ttft_s[0] == pytest.approx(0.001 + 2 * 0.01 + 0.001)
    tokens_s = sum(2 * Staged().decode_line(1, context).step_s for context in range(101, 151))
    assert outcome.finish_s[0] - outcome.first_token_s[0] == pytest.approx(tokens_s)


def test_each_stage_has_an_even_share_of_the_answers() -> None:
    """16 of them, of which one batch would take 2 x 16 ms for a token of each: half of them pass in 2 x 8 ms, and the
    other half meanwhile."""
    _, outcome = play(cluster(mixed(latency=ByTheRow())), at_once(*[(10, 200)] * 16))
    tpot_s = (outcome.finish_s - outcome.first_token_s) / 199
    assert tpot_s == pytest.approx(2 * 8e-3, rel=0.05)


def test_chunks_of_a_prompt_follow_each_other_through_the_stages() -> None:
    """Two answers are written, one in each stage, while a prompt is read beside them: its next chunk begins before the
    last one has ended, and each pass ends one stage behind the one before it."""
    workload = replace(at_once((10, 200), (10, 200), (640, 1)), arrival_s=np.array([0.0, 0.0, 0.5]))
    passes, _ = passes_of(workload)
    reading = [each for each in passes if each.chunks and each.chunks[0][0] == "2"]
    assert [each.chunks for each in reading] == [(("2", start, 64),) for start in range(0, 640, 64)]
    for before, after in pairwise(reading):
        assert set(before.rows).isdisjoint(after.rows), "an answer is in two passes at once"
        assert len(before.rows) == len(after.rows) == 1
        assert after.begun_s < before.done_s
        stage_s = Staged().mixed_s([(64, 0)], 1, 60)
        assert after.done_s - before.done_s == pytest.approx(stage_s, rel=0.02)


def live_passes(lengths: Sequence[tuple[int, int]], options: MixedOptions, stages: int) -> list[Seen]:
    """What Worker._run_ahead begins, of a MixedRole whose first request comes before the others. Without times."""
    policy = MixedPolicy(PagePool(400, 16), options, num_stages=stages)
    begun: deque[tuple[list[DecodeRequest], PrefillBatch | None]] = deque()
    passes: list[Seen] = []
    left = {f"{i}": output for i, (_, output) in enumerate(lengths)}

    def submit(index: int) -> None:
        prompt, output = lengths[index]
        assert not policy.decode.expect(f"{index}", num_tokens=prompt, max_len=prompt + output - 1)
        policy.prefill.add(f"{index}", prompt, ())

    def begin() -> bool:
        rows = policy.decode.schedule().requests
        prompts = policy.prefill.next_batch(policy.prompt_tokens(len(rows)))
        if rows or prompts:
            begun.append((rows, prompts))
            passes.append(seen(rows, prompts, 0.0, 0.0))
        return bool(rows or prompts)

    def finish(rows: list[DecodeRequest], prompts: PrefillBatch | None) -> None:
        for row in rows:
            policy.decode.on_steps_done(row, 1)
            left[row.request_id] -= 1
            if not left[row.request_id]:
                policy.decode.on_finished(row.request_id)
        for chunk in prompts.chunks if prompts else ():
            if chunk.is_last:
                left[chunk.request_id] -= 1
                if left[chunk.request_id]:
                    policy.decode.adopt(chunk.request_id, policy.prefill.pages_of(chunk.request_id), ())
                policy.prefill.on_cancelled(chunk.request_id)
        if prompts:
            policy.prefill.on_batch_done(prompts)

    submit(0)
    begin()
    for index in range(1, len(lengths)):
        submit(index)
    while begun:
        finish(*begun.popleft())
        while len(begun) < stages and begin():
            pass
    assert not any(left.values())
    policy.check_invariants()
    return passes


def test_passes_hold_what_the_live_step_loop_begins() -> None:
    """Long prompts and short ones, one that ends with its first token, and more answers than stages."""
    lengths = [(100, 9), (700, 3), (30, 1), (300, 40), (20, 25), (500, 2), (64, 12), (10, 30)]
    passes, machine = passes_of(at_once(*lengths))
    options = machine.worker.policy
    assert isinstance(options, MixedOptions)
    live = live_passes(lengths, options, stages=2)
    assert [(each.rows, each.chunks) for each in passes] == [(each.rows, each.chunks) for each in live]
    assert any(each.rows and each.chunks for each in passes)
    share = 0.0
    for each in passes:
        if each.rows:
            share = share_after(share, sum(length for _, _, length in each.chunks))
    assert machine.report(machine.router.clock.now, 0).prompt_share == pytest.approx(share)


@pytest.mark.parametrize(("num_pages", "counted"), [(40, "preempted"), (400, "moved")])
@pytest.mark.parametrize("beside", [(), ("prefill",), ("decode",)], ids="+".join)
def test_all_are_served_while_workers_are_lost_and_drained(
    num_pages: int, counted: str, beside: tuple[str, ...]
) -> None:
    """In the middle of passes, with pages enough and with few."""
    setup = cluster(
        mixed(3, num_pages=num_pages),
        *(workers(role, latency=Staged(), num_pages=num_pages) for role in beside),
        losses=(Loss(worker="mixed-1", at_s=4.0, back_s=8.0),),
        drains=(Drain(worker="mixed-2", at_s=6.0),),
    )
    simulation, outcome = play(setup, requests(200, rate=10))
    assert outcome.served == 200
    assert simulation.ledger.counters[counted] > 0
    assert same(outcome, play(setup, requests(200, rate=10))[1])


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_it_takes_another_role_and_its_own_again(role: str) -> None:
    own, other = (workers(each)[0].policy for each in ("mixed", role))
    changes = [RoleChange(worker="mixed-1", at_s=5.0, role=role, policy=other)]
    changes += [RoleChange(worker="mixed-1", at_s=10.0, role="mixed", policy=own)]
    simulation, outcome = play(cluster(mixed(3), role_changes=tuple(changes)), requests(rate=12))
    assert outcome.served == 200
    assert outcome.counters["role_changes"] == 2
    assert isinstance(simulation.machines["mixed-1"], PipelinedMixedMachine)


def test_on_devices_that_it_shares_it_takes_twice_as_long() -> None:
    """Two of different models, at once: each pass while the other computes."""
    alone = play(cluster(mixed()), at_once((100, 51)))[1]
    setups = [cluster([replace(worker, name=name, device="gpu-0") for worker in mixed()]) for name in ("one", "other")]
    for outcome in simulate_together([(setup, at_once((100, 51))) for setup in setups]):
        assert outcome.e2e_s[0] == pytest.approx(2 * alone.e2e_s[0], rel=0.05)


def test_no_guesses_are_made_in_stages() -> None:
    policy = MixedOptions(max_batch_tokens=256, max_batch_size=16, chunk_tokens=64, num_speculative_tokens=4)
    guessing = mixed(policy=policy, speculation=Speculation(num_tokens=4, acceptance=0.9))
    assert same(play(cluster(guessing), requests())[1], play(cluster(mixed()), requests())[1])
