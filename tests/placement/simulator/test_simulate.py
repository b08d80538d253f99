"""The live policies on a virtual clock: what is promised of time, memory, failures and cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from cluster.router.options import RouterOptions
from decode_worker.options import DecodeOptions
from mixed_worker.options import MixedOptions
from placement.latency.base import DecodeLine, LatencyModel
from placement.simulator.cluster import Drain, Loss, SetupError, SimCluster, SimWorker
from placement.simulator.machines.decode import DecodeMachine
from placement.simulator.machines.mixed import MixedMachine
from placement.simulator.machines.pipelined import PipelinedMixedMachine
from placement.simulator.machines.prefill import PrefillMachine
from placement.simulator.outcome import Outcome, percentiles
from placement.simulator.simulate import Simulation, simulate
from placement.workload.requests import Workload
from prefill_worker.options import PrefillOptions

pytestmark = pytest.mark.unit


@dataclass(frozen=True)
class Plain:
    """Round figures: 10 ms + 0.1 ms a prompt token; 10 ms + 0.1 ms a request + 1 us a token of context."""

    source: str = "round figures"
    stages: int = 1
    wire_s_per_token: float = 1e-6
    single_steps: bool = False

    def prefill_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        return 0.01 + 1e-4 * sum(length for length, _ in chunks)

    def decode_line(self, batch_size: int, context_tokens: int) -> DecodeLine:
        line = DecodeLine(0.01 + 1e-4 * batch_size + 1e-6 * context_tokens, 1e-6)
        return replace(line, until_tokens=context_tokens) if self.single_steps else line

    def mixed_s(self, chunks: Sequence[tuple[int, int]], batch_size: int, context_tokens: int) -> float:
        return self.prefill_s(chunks) + self.decode_line(batch_size, context_tokens).step_s

    def transfer_s(self, num_tokens: int) -> float:
        return self.wire_s_per_token * num_tokens


def workers(role: Any, count: int = 1, latency: LatencyModel | None = None, **given: Any) -> list[SimWorker]:
    policies = {
        "prefill": PrefillOptions(max_batch_tokens=256, pack_tokens=None),
        "decode": DecodeOptions(max_batch_size=16),
        "mixed": MixedOptions(max_batch_tokens=256, max_batch_size=16, chunk_tokens=64),
    }
    options = {"num_pages": 400, "policy": policies[role], **given}
    return [SimWorker(name=f"{role}-{i}", role=role, latency=latency or Plain(), **options) for i in range(count)]


def cluster(*groups: list[SimWorker], **given: Any) -> SimCluster:
    return SimCluster(workers=tuple(worker for group in groups for worker in group), **given)


def requests(count: int = 200, rate: float = 8.0, seed: int = 0, most: int = 300) -> Workload:
    rng = np.random.default_rng(seed)
    return Workload(
        arrival_s=np.cumsum(rng.exponential(1 / rate, count)),
        prompt_len=rng.integers(1, most, count),
        output_len=rng.integers(1, 120, count),
    )


def play(setup: SimCluster, workload: Workload) -> tuple[Simulation, Outcome]:
    """Also sees that nothing is left behind: no request, no page, no lease."""
    simulation = Simulation(setup, workload)
    outcome = simulation.play()
    for router in simulation.routers:
        router.policy.check_invariants()
        assert not router._attempts
    for machine in simulation.machines.values():
        if not machine.is_dead:
            sides: list[PrefillMachine | DecodeMachine] = [machine]
            sides += [machine.prompts] if isinstance(machine, MixedMachine | PipelinedMixedMachine) else []
            for side in sides:
                side.policy.check_invariants()
                assert not side.policy.request_ids, side.name
                assert not side._attempts, side.name
            if isinstance(machine, DecodeMachine):
                assert not machine._coming, machine.name
                assert not machine._paused, machine.name
                assert machine.moves.is_idle, machine.name
            assert machine.policy.pool.available == machine.worker.num_pages, machine.name
    return simulation, outcome


def same(one: Outcome, other: Outcome) -> bool:
    return bool(np.array_equal(one.first_token_s, other.first_token_s) and np.array_equal(one.finish_s, other.finish_s))


def test_a_lone_request_takes_the_sum_of_its_parts() -> None:
    workload = Workload(arrival_s=np.array([5.0]), prompt_len=np.array([100]), output_len=np.array([3]))
    _, outcome = play(cluster(workers("prefill"), workers("decode"), message_s=0.001, layer_groups=4), workload)
    prefill_s = 0.01 + 0.01
    assert outcome.ttft_s[0] == pytest.approx(0.001 + prefill_s + 0.001)
    last_group_s = 100e-6 / 4
    steps_s = sum(0.01 + 1e-4 + 1e-6 * context for context in (101, 102))
    ready_s = 0.001 + prefill_s + last_group_s + 0.001
    assert outcome.e2e_s[0] == pytest.approx(ready_s + steps_s + 0.001)
    assert outcome.phases["decode"][0] == pytest.approx(steps_s + 0.001)


def test_all_are_served_and_the_phases_sum_to_the_whole() -> None:
    _, outcome = play(cluster(workers("prefill", 2), workers("decode", 2)), requests())
    assert outcome.served == 200
    assert sum(outcome.phases.values()) == pytest.approx(outcome.e2e_s)
    assert np.all(outcome.ttft_s > 0)
    assert np.all(outcome.finish_s >= outcome.first_token_s)


def test_one_workload_has_one_outcome() -> None:
    setup = cluster(
        workers("prefill", 2), workers("decode", 3, num_pages=60), losses=(Loss(worker="decode-1", at_s=3),)
    )
    assert same(simulate(setup, requests()), simulate(setup, requests()))


@pytest.mark.parametrize("num_pages", [400, 60])
def test_passing_over_steps_changes_nothing(num_pages: int) -> None:
    """Against a latency model that ends every run after one step; also where pages are short. Reports so dense that
    none is left out."""
    many, single = (
        simulate(
            cluster(
                workers("prefill"),
                workers("decode", latency=Plain(single_steps=one_by_one), num_pages=num_pages),
                report_gap_s=1e-5,
            ),
            requests(rate=15),
        )
        for one_by_one in (False, True)
    )
    assert many.finish_s == pytest.approx(single.finish_s, rel=1e-9)
    assert many.counters == single.counters
    assert (many.counters.get("preempted", 0) > 0) == (num_pages == 60)


def test_the_cost_is_of_requests_and_not_of_tokens() -> None:
    few, many = (replace(requests(100, rate=1.0), output_len=np.full(100, tokens)) for tokens in (50, 5000))
    setup = cluster(workers("prefill"), workers("decode", num_pages=4000))
    (short, _), (long, _) = (play(setup, workload) for workload in (few, many.faster(0.01)))
    assert long.clock._next < 1.3 * short.clock._next


def test_counted_pages_decide_as_numbered_ones() -> None:
    """Prompts with blocks that nobody shares are given real pages; without, pages are only counted."""
    plain = requests(rate=15)
    unshared = replace(plain, blocks=[(i,) for i in range(len(plain))])
    setup = cluster(workers("prefill", num_pages=80), workers("decode", num_pages=80))
    assert same(simulate(setup, plain), simulate(setup, replace(unshared, blocks=[()] * len(plain))))
    assert percentiles(simulate(setup, unshared).ttft_s) == pytest.approx(
        percentiles(simulate(setup, plain).ttft_s), rel=0.3
    )


def test_shared_prefixes_are_computed_and_sent_once() -> None:
    plain = replace(requests(100, rate=4), prompt_len=np.full(100, 256))
    shared = replace(plain, blocks=[(7,)] * 100, block_len=240)
    setup = cluster(workers("prefill"), workers("decode"))
    cold, warm = (simulate(setup, workload) for workload in (plain, shared))
    assert warm.counters["prefix_hit_tokens"] > 90 * 240
    assert percentiles(warm.ttft_s)[0] < 0.7 * percentiles(cold.ttft_s)[0]


def test_memory_that_is_short_makes_requests_wait_leave_and_come_back() -> None:
    _, outcome = play(cluster(workers("prefill"), workers("decode", num_pages=40)), requests(rate=20))
    assert outcome.served == 200
    assert outcome.counters["preempted"] > 0
    assert outcome.counters["stalled"] > 0
    assert outcome.counters["recomputed_tokens"] > 0


@pytest.mark.parametrize("seed", range(5))
def test_who_waits_for_the_last_report_gets_it(seed: int) -> None:
    """Nothing else happens any more when it comes."""
    _, outcome = play(cluster(workers("prefill"), workers("decode", num_pages=25)), requests(rate=10, seed=seed))
    assert outcome.served + outcome.counters.get("rejected", 0) == 200  # whose output could never fit


def test_workers_that_wait_for_each_others_pages_give_way_in_the_end() -> None:
    """Each has computed a prompt that shall be decoded at the other, and holds its pages."""
    setup = cluster(workers("mixed", 2, num_pages=26), router=RouterOptions(slo_ttft_ms=500, slo_tpot_ms=30))
    for seed in range(20):
        _, outcome = play(replace(setup, queued_reservation_s=5.0), requests(80, rate=15, seed=seed))
        assert outcome.served + sum(outcome.counters.get(key, 0) for key in ("rejected", "failed")) == 80


def test_stalled_handoffs_are_not_sent_around() -> None:
    """Decode workers that are all full draw no handoff from one another: each request moves a few times at most."""
    setup = cluster(workers("prefill", 4), workers("decode", 5, num_pages=30))
    _, outcome = play(setup, requests(400, rate=200))
    assert outcome.served == 400
    assert outcome.counters["stalled"] > 100
    assert outcome.counters.get("reassigned", 0) < 400


def test_worst_case_admission_never_preempts() -> None:
    limits = DecodeOptions(max_batch_size=16, admission="worst_case")
    _, outcome = play(cluster(workers("prefill"), workers("decode", num_pages=40, policy=limits)), requests(rate=20))
    assert outcome.served == 200
    assert "preempted" not in outcome.counters


def test_a_full_router_rejects_and_the_rejected_count_as_missed() -> None:
    options = RouterOptions(max_queued_requests=2, max_backlog_tokens=300)
    outcome = simulate(cluster(workers("prefill"), workers("decode"), router=options), requests(rate=200))
    assert outcome.served + outcome.counters["rejected"] == 200
    assert outcome.counters["rejected"] > 0
    assert outcome.attainment(1e9, 1e9) == outcome.served / 200


@pytest.mark.parametrize("lost", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("is_back", [True, False])
def test_a_lost_worker_costs_time_and_no_request(lost: str, is_back: bool) -> None:
    calm = cluster(workers("prefill", 2), workers("decode", 2))
    back_s = 9.0 if is_back else None
    stormy = replace(calm, losses=(Loss(worker=lost, at_s=6.0, back_s=back_s), Loss(worker=lost, at_s=12.0)))
    _, without = play(calm, requests())
    _, outcome = play(stormy, requests())
    assert outcome.served == 200
    assert outcome.counters["workers_lost"] == 1 + is_back
    assert outcome.counters["retries"] > 0
    assert outcome.e2e_s.sum() > without.e2e_s.sum()


def test_without_any_decode_worker_requests_wait_for_one() -> None:
    losses = (Loss(worker="decode-0", at_s=2.0, back_s=20.0),)
    _, outcome = play(cluster(workers("prefill"), workers("decode"), losses=losses), requests(60))
    assert outcome.served == 60
    assert np.all(outcome.finish_s[outcome.workload.arrival_s > 2.2] > 20.0)


def test_kv_leaves_while_the_prompt_is_computed() -> None:
    """A wire as fast as the prefill costs next to nothing with layers on the way, and a prefill's time without."""
    latency = Plain(wire_s_per_token=1e-4)
    workload = replace(requests(20, rate=0.5), prompt_len=np.full(20, 250), output_len=np.full(20, 5))
    at_once, by_layer = (
        play(cluster(workers("prefill", latency=latency), workers("decode"), layer_groups=groups), workload)[1]
        for groups in (1, 32)
    )
    assert by_layer.phases["handoff"].mean() < 0.25 * at_once.phases["handoff"].mean()
    assert at_once.phases["handoff"].mean() > 0.025


def test_handoffs_share_the_link() -> None:
    """Four prefill workers into one decode worker, over a link that one of them nearly fills."""
    latency = Plain(wire_s_per_token=1e-4)
    workload = replace(requests(100, rate=30), prompt_len=np.full(100, 250), output_len=np.full(100, 2))
    narrow = simulate(cluster(workers("prefill", 4, latency=latency), workers("decode")), workload)
    wide = simulate(cluster(workers("prefill", 4, latency=latency), workers("decode", 4)), workload)
    assert narrow.phases["handoff"].mean() > 3 * wide.phases["handoff"].mean()


def test_pipeline_stages_overlap_in_prefill() -> None:
    """Two stages of half the time each: a prompt alone is no faster, a queue is served nearly twice as fast."""

    @dataclass(frozen=True)
    class Staged(Plain):
        stages: int = 2

        def prefill_s(self, chunks: Sequence[tuple[int, int]]) -> float:
            return super().prefill_s(chunks) / 2

    workload = replace(requests(100, rate=1000), prompt_len=np.full(100, 200), output_len=np.full(100, 1))
    one, two = (
        simulate(cluster(workers("prefill", latency=latency), workers("decode")), workload)
        for latency in (Plain(), Staged())
    )
    assert two.finish_s.max() == pytest.approx(one.finish_s.max() / 2, rel=0.1)


@dataclass(frozen=True)
class StagedDecode(Plain):
    """Two stages of half the time each."""

    stages: int = 2

    def decode_line(self, batch_size: int, context_tokens: int) -> DecodeLine:
        line = super().decode_line(batch_size, context_tokens)
        return DecodeLine(line.step_s / 2, line.per_token_s / 2, line.until_tokens)


def test_pipeline_stages_have_a_batch_each_in_decode() -> None:
    """One answer is no faster than without them; of two each is in a batch of its own, and waits for nothing."""
    alone = Workload(arrival_s=np.zeros(1), prompt_len=np.array([100]), output_len=np.array([50]))
    pair = Workload(arrival_s=np.zeros(2), prompt_len=np.array([100, 100]), output_len=np.array([50, 50]))
    found = {
        (stages, count): play(cluster(workers("prefill"), workers("decode", latency=latency)), workload)[1]
        for stages, latency in ((1, Plain()), (2, StagedDecode()))
        for count, workload in ((1, alone), (2, pair))
    }
    assert found[2, 1].finish_s[0] == pytest.approx(found[1, 1].finish_s[0])
    tpot_s = (found[2, 2].finish_s - found[2, 2].first_token_s) / 49
    assert tpot_s == pytest.approx(0.01 + 1e-4 + 1e-6 * 125, rel=0.05), "of a batch of one"
    together_s = (found[1, 2].finish_s - found[1, 2].first_token_s).max() / 49
    assert tpot_s.max() < 0.99 * together_s


@pytest.mark.parametrize(("num_pages", "counted"), [(40, "preempted"), (400, "moved")])
def test_with_stages_all_are_served_while_workers_are_lost_and_drained(num_pages: int, counted: str) -> None:
    setup = cluster(
        workers("prefill", 2, latency=StagedDecode()),
        workers("decode", 3, latency=StagedDecode(), num_pages=num_pages),
        losses=(Loss(worker="decode-1", at_s=4.0, back_s=8.0),),
        drains=(Drain(worker="decode-2", at_s=6.0),),
    )
    simulation, outcome = play(setup, requests(200, rate=10))
    assert outcome.served == 200
    assert simulation.ledger.counters[counted] > 0


def test_impossible_clusters_are_refused_with_a_sentence() -> None:
    with pytest.raises(SetupError, match="no worker has the role decode"):
        cluster(workers("prefill"))
    with pytest.raises(SetupError, match="two workers are named prefill-0"):
        cluster(workers("prefill"), workers("prefill"), workers("decode"))
    with pytest.raises(SetupError, match="page_size"):
        simulate(cluster(workers("prefill", page_size=8), workers("decode")), requests(2))
    with pytest.raises(SetupError, match="a loss names decode-9"):
        cluster(workers("prefill"), workers("decode"), losses=(Loss(worker="decode-9", at_s=1),))


@pytest.mark.parametrize("num_routers", [1, 2])
def test_what_is_longer_than_the_model_takes_is_refused_at_once(num_routers: int) -> None:
    sent = requests()
    lengths = sent.prompt_len + sent.output_len
    limit = int(np.quantile(lengths, 0.9))
    given = {"max_len": limit, "num_routers": num_routers}
    outcome = simulate(cluster(workers("prefill"), workers("decode"), **given), sent)
    assert outcome.counters["rejected"] == (lengths > limit).sum() > 0
    assert (np.isnan(outcome.finish_s) == (lengths > limit)).all()
