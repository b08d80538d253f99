"""Requests that move between simulated decode workers: when they do, what a move takes, and that nothing is lost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cluster.router.accounts import Report
from cluster.router.options import RouterOptions
from placement.simulator.cluster import Drain, Loss, SetupError, SimCluster
from placement.simulator.machines.attempt import Move
from placement.simulator.machines.decode import DecodeMachine
from placement.simulator.machines.moves import Moves
from placement.simulator.outcome import Outcome
from placement.workload.requests import Workload
from tests.placement.simulator.test_mixed import lone
from tests.placement.simulator.test_simulate import Plain, cluster, play, requests, workers

pytestmark = pytest.mark.unit

TARGETS = RouterOptions(slo_ttft_ms=1000, slo_tpot_ms=50)


def drained(worker: str = "decode-0", at_s: float = 5.0, **given: object) -> SimCluster:
    options: dict[str, object] = {"router": TARGETS, **given}
    return cluster(workers("prefill"), workers("decode", 2), drains=(Drain(worker=worker, at_s=at_s),), **options)


def moves_of(outcome: Outcome) -> tuple[int, int]:
    return outcome.counters.get("moved", 0), outcome.counters.get("moves_failed", 0)


def test_what_runs_on_a_worker_that_drains_goes_on_elsewhere() -> None:
    simulation, outcome = play(drained(), requests())
    assert outcome.served == 200
    assert moves_of(outcome)[0] > 2
    assert {"retries", "preempted", "recomputed_tokens"}.isdisjoint(outcome.counters)
    calm = play(cluster(workers("prefill"), workers("decode", 2), router=TARGETS), requests())[1]
    assert moves_of(calm) == (0, 0)
    assert outcome.finish_s[:10] == pytest.approx(calm.finish_s[:10])  # what was over by then
    assert simulation.machines["decode-0"].is_draining


def test_a_move_takes_what_is_sent_after_the_last_step() -> None:
    """One request; while its KV is copied it is computed on, then the rest follows: handoff, links, a message."""
    wire_s = 1e-5
    setup = replace(
        drained(at_s=5.5, message_s=0.001, handoff_s=0.05, report_gap_s=0.05),
        workers=(
            *workers("prefill", latency=Plain(wire_s_per_token=wire_s)),
            *workers("decode", 2, latency=Plain(wire_s_per_token=wire_s)),
        ),
    )
    still = replace(setup, drains=())
    workload = lone(100, 100)
    (_, moved), (_, stayed) = play(setup, workload), play(still, workload)
    assert moves_of(moved) == (1, 0)
    gap_s = moved.e2e_s[0] - stayed.e2e_s[0]
    assert 0.051 < gap_s < 0.051 + 2 * wire_s  # of at most two tokens that came meanwhile
    assert moved.phases["decode"][0] - stayed.phases["decode"][0] == pytest.approx(gap_s)


def test_what_comes_during_a_long_copy_ends_at_its_room() -> None:
    """It takes longer than the 64 steps for which pages were leased: the request stands still until it is over."""
    slow = [*workers("prefill"), *workers("decode", 2, latency=Plain(wire_s_per_token=0.02))]
    _, outcome = play(replace(drained(at_s=5.1), workers=tuple(slow)), lone(100, 200))
    assert moves_of(outcome) == (1, 0)
    steps_s = sum(0.01 + 1e-4 + 1e-6 * (100 + i) for i in range(1, 200))
    copies_s = 0.02 * (100 + 64)
    assert outcome.e2e_s[0] == pytest.approx(steps_s - 64 * 0.0102 + copies_s, abs=0.3)


def test_without_pages_elsewhere_it_goes_on_where_it_is() -> None:
    """The report by which it was to move is old."""
    small = [*workers("prefill"), *workers("decode", 2, num_pages=25)]
    _, outcome = play(replace(drained(at_s=3, report_gap_s=0.5), workers=tuple(small)), requests(rate=10))
    assert outcome.served == 200
    assert moves_of(outcome)[1] > 0


@pytest.mark.parametrize("router", [RouterOptions(), TARGETS], ids=["without targets", "with targets"])
def test_who_has_far_more_than_another_sheds_some(router: RouterOptions) -> None:
    """All but four small ones come before the second worker does."""
    losses = (Loss(worker="decode-1", at_s=0.0, back_s=6.0),)
    setup = cluster(workers("prefill"), workers("decode", 2, num_pages=2000), losses=losses)
    many, few = requests(14, rate=20), (np.array([6.5, 7.0, 7.5, 8.0]), np.full(4, 10), np.full(4, 2))
    arrival_s, prompt_len = (np.concatenate(pair) for pair in zip((many.arrival_s, many.prompt_len), few, strict=False))
    output_len = np.concatenate((np.full(14, 800), few[2]))
    workload = Workload(arrival_s=arrival_s, prompt_len=prompt_len, output_len=output_len)
    _, outcome = play(replace(setup, router=router), workload)
    assert moves_of(outcome)[0] > 1
    for options in (RouterOptions(placement="splitwise"), RouterOptions(slo_tpot_ms=5)):  # no worker keeps these
        _, never = play(replace(setup, router=options), workload)
        assert moves_of(never) == (0, 0)
        assert outcome.finish_s.max() < never.finish_s.max()


@pytest.mark.parametrize("role", ["decode", "mixed"])
def test_passing_over_steps_changes_nothing_while_requests_move(role: str) -> None:
    many, single = (
        play(
            cluster(
                *(workers(kind, 2, latency=latency) for kind in ("prefill", role)),
                drains=(Drain(worker=f"{role}-0", at_s=5.0),),
                report_gap_s=1e-5,
                router=TARGETS,
            ),
            requests(rate=15),
        )[1]
        for latency in (Plain(), Plain(single_steps=True))
    )
    assert moves_of(many)[0] > 2
    assert many.served == 200
    assert many.finish_s == pytest.approx(single.finish_s, rel=1e-9)
    assert many.counters == single.counters


def test_a_report_of_before_a_request_left_lists_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it is drawn up afterwards."""
    told: list[tuple[str, Report]] = []
    left: list[tuple[str, str, float]] = []
    report, on_receipt = DecodeMachine.report, Moves.on_receipt

    def reporting(machine: DecodeMachine, made_s: float, router: int) -> Report:
        told.append((machine.name, report(machine, made_s, router)))
        return told[-1][1]

    def receiving(moves: Moves, move: Move) -> None:
        left.append((moves.policy.name, move.attempt.id, moves.router.clock.now))
        on_receipt(moves, move)

    monkeypatch.setattr(DecodeMachine, "report", reporting)
    monkeypatch.setattr(Moves, "on_receipt", receiving)
    play(drained(report_gap_s=0.02, message_s=0.015), requests(400, rate=60))
    seen = 0
    for name, request_id, left_s in left:
        for teller, each in told:
            if teller == name and left_s - 0.02 < each.made_s < left_s:
                assert request_id in each.request_ids
                seen += 1
    assert seen > 2


@pytest.mark.parametrize("seed", range(40))
def test_every_token_is_made_once_where_pages_are_short(seed: int) -> None:
    """Who moves is not preempted, so that others must wait; who was to run next may move, too, and come to stand still.
    A machine asserts the length of each request that ends."""
    slow = Plain(wire_s_per_token=5e-4)
    small = [*workers("prefill", 2), *workers("decode", 3, latency=slow, num_pages=(26, 40, 80)[seed % 3])]
    drains = (Drain(worker="decode-0", at_s=1.0 + seed / 10),)
    losses = (Loss(worker="decode-1", at_s=2.0 + seed / 10, back_s=7.0),)
    setup = cluster(small, drains=drains, losses=losses, report_gap_s=(0.005, 0.2)[seed % 2])
    _, outcome = play(setup, requests(80, rate=15, seed=seed))
    assert outcome.served + outcome.counters.get("rejected", 0) == 80


@pytest.mark.parametrize("lost", ["decode-0", "decode-1", "prefill-0"])
def test_nothing_is_lost_where_a_worker_dies_during_moves(lost: str) -> None:
    """At every moment of a copy that takes long."""
    slow = (*workers("prefill", 2), *workers("decode", 3, latency=Plain(wire_s_per_token=2e-4)))
    for i in range(60):
        losses = (Loss(worker=lost, at_s=5.0 + i * 0.011, back_s=7.0),)
        setup = replace(drained(losses=losses, noticed_s=0.01 + 0.02 * (i % 7)), workers=slow)
        _, outcome = play(setup, requests(60, rate=10))
        assert outcome.served == 60, losses
    for at_s in (4.888125, 5.028125):  # the order to move has come, and its step not ended
        losses = (Loss(worker="decode-1", at_s=at_s, back_s=7.0),)
        setup = cluster(workers("prefill", 2), workers("decode", 2), losses=losses)
        drains = (Drain(worker="decode-0", at_s=5.0),)
        assert play(replace(setup, drains=drains), requests(60, rate=10))[1].served == 60
    with pytest.raises(SetupError, match="a drain names decode-9; the workers are"):
        drained("decode-9")
