"""A running cluster as it is played again: by what its workers have measured, in this arrangement and in others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cluster.router.options import RouterOptions
from engine.knobs import as_text
from placement.plan import Slo
from placement.replan.arrangements import Arrangement, SetRole, nearby
from placement.replan.play import Bounds, corrected, play, weigh
from placement.replan.policy import Terms, decide
from placement.replan.seen import GAP_S, MOST_PLAYED, SPANS, Row, Seen, SeenWorker, workload_of
from worker.roles import kind_of
from worker.steps.costs import StepCosts

pytestmark = pytest.mark.unit

READS = StepCosts(fixed_s=0.004, prompt_token_s=0.00075, request_s=0.0, context_token_s=0.0)
WRITES = StepCosts(fixed_s=0.006, prompt_token_s=0.0, request_s=0.0005, context_token_s=1e-7)
SLO = Slo(ttft_s=0.5, tpot_s=0.02)


def worker(name: str, costs: StepCosts | None = None, **limits: str) -> SeenWorker:
    role = name.partition("-")[0]
    knobs = as_text(kind_of(role).load_options()())
    own = READS if role == "prefill" else WRITES
    return SeenWorker(name=name, role=role, num_pages=2000, page_size=16, limits=knobs | limits, costs=costs or own)


def seen(*workers: SeenWorker, prompt: int, output: int, rate: float, count: int = 300) -> Seen:
    gaps = np.random.default_rng(1).exponential(1 / rate, count).cumsum()
    return Seen(
        workers=workers,
        router=RouterOptions(),
        workload=workload_of([Row(float(at_s) - 1000.0, prompt, output) for at_s in gaps]),
        ttft_s=np.full(count, 0.1),
        tpot_s=np.full(count, 0.1),
        handoff_s=0.002,
        cached_share=1 / 3,
        rate=rate,
        seen_s=count / rate,
    )


def test_each_part_of_a_step_is_taken_from_those_that_do_it() -> None:
    cluster = seen(worker("prefill-0"), worker("decode-0"), prompt=100, output=10, rate=1.0)
    latency = cluster.latency()
    assert latency.prompt_fixed_s == 0.004
    assert latency.prompt_token_s == pytest.approx(0.00075 * 2 / 3), "what is cached is not computed"
    assert latency.answers == StepCosts(
        fixed_s=0.006, prompt_token_s=0.0, request_s=0.0005, context_token_s=1e-7, both_s=0.0
    )
    assert latency.mixed_s([(10, 0)], 2, 100) == pytest.approx(0.006 + 0.005 + 0.001 + 1e-5)
    assert cluster.missing_costs == ""
    assert cluster.attainment(0.2, 0.05) == 0.0
    assert list(cluster.workload.prompt_len[:2]) == [100, 100]
    assert cluster.workload.arrival_s[0] == 0.0


def test_a_worker_in_another_role_has_the_knobs_of_those_that_have_it() -> None:
    cluster = seen(
        worker("prefill-0", max_batch_tokens="77"), worker("decode-0", max_batch_size="5"), prompt=9, output=9, rate=1.0
    )
    cluster = replace(cluster, cached_share=0.0)
    both = {
        each.name: each
        for each in cluster.cluster(Arrangement(roles={"prefill-0": "decode", "decode-0": "prefill"})).workers
    }
    assert as_text(both["prefill-0"].policy)["max_batch_size"] == "5"
    assert as_text(both["decode-0"].policy)["max_batch_tokens"] == "77"


def test_of_a_long_time_spans_are_played_as_they_came() -> None:
    """Two loads that took turns are both among them, each with its own arrivals."""
    turns = [(100, 10.0), (900, 2.0)] * 6
    rows, at_s = list[Row](), 5.0
    for prompt, rate in turns:
        for _ in range(1000):
            rows.append(Row(at_s, prompt, 7))
            at_s += 1 / rate
    played = workload_of(rows)
    assert len(played) == MOST_PLAYED
    assert set(played.prompt_len) == {100, 900}
    gaps = np.diff(played.arrival_s)
    assert (gaps > 0).all()
    assert sum(gaps > GAP_S - 1) == SPANS - 1
    assert played.arrival_s[0] == 0.0
    assert workload_of(rows[:50]).duration_s == pytest.approx(4.9)


def test_steps_are_taken_for_as_long_as_answers_show() -> None:
    cluster = seen(worker("prefill-0"), worker("decode-0"), prompt=100, output=50, rate=1.0)
    plain = play(cluster, Arrangement(roles=cluster.roles), SLO)
    slow = replace(cluster, tpot_s=np.full(300, 1.5 * plain.tpot_s))
    same, present = corrected(slow, SLO)
    assert same.slower == pytest.approx(1.5)
    assert present.tpot_s == pytest.approx(1.5 * plain.tpot_s, rel=0.1)
    fast = replace(cluster, tpot_s=np.full(300, 0.5 * plain.tpot_s))
    assert corrected(fast, SLO)[0].slower == 1.0, "there was less beside it"


def test_each_request_is_judged_by_its_own_targets_where_it_has_them() -> None:
    """As it was measured, and as it is played."""
    cluster = seen(worker("prefill-0"), worker("decode-0"), prompt=100, output=10, rate=1.0)
    roles = Arrangement(roles=cluster.roles)
    assert (cluster.attainment(0.2, 0.2), play(cluster, roles, SLO).attainment) == (1.0, 1.0)
    own = replace(cluster, slo_ttft_s=np.tile([0.05, 0.0, 0.0], 100), slo_tpot_s=np.tile([0.0, 0.05, 0.3], 100))
    assert own.attainment(0.2, 0.2) == pytest.approx(1 / 3)
    assert own.attainment(0.2, 0.01) == 1 / 3, "a target of its own may be looser, too"
    hurried = [Row(float(at_s), 100, 10, slo_ttft_s=1e-3 * (at_s % 2)) for at_s in range(100)]
    assert play(replace(cluster, workload=workload_of(hurried)), roles, SLO).attainment == 0.5


@pytest.mark.parametrize(("prompt", "output", "rate", "wanted"), [(800, 10, 3.5, "prefill"), (20, 400, 7.0, "decode")])
def test_the_phase_that_has_too_few_gets_another(prompt: int, output: int, rate: float, wanted: str) -> None:
    """Prompts of 0.4 s at 3.5 a second want two readers; answers of 400 tokens two writers."""
    few = "decode" if wanted == "prefill" else "prefill"
    names = [f"{wanted}-0", f"{few}-0", f"{few}-1"]
    cluster = seen(*(worker(name) for name in names), prompt=prompt, output=output, rate=rate)
    slo = SLO if wanted == "prefill" else Slo(ttft_s=2.0, tpot_s=0.03)
    present = play(cluster, Arrangement(roles=cluster.roles), slo)
    others = [play(cluster, near, slo) for near in nearby(cluster.roles, 1)]
    decision = decide(present, others, Terms(wanted=0.9, seen_s=600.0, measured=present.attainment))
    (move,) = decision.moves
    assert isinstance(move, SetRole), decision.reason
    assert (move.worker, move.role in (wanted, "mixed")) == (f"{few}-1", True), decision.reason


@pytest.mark.parametrize(
    ("has", "prompt", "output", "rate", "slo", "wanted"),
    [(16, 200, 100, 7.0, Slo(ttft_s=0.5), 64), (512, 1500, 20, 2.0, Slo(tpot_s=0.05), 128)],
)
def test_chunks_follow_what_is_missed(has: int, prompt: int, output: int, rate: float, slo: Slo, wanted: int) -> None:
    """Small ones read prompts too slowly, large ones hold answers up; no worker need change its role for it."""
    both = worker("mixed-0", replace(WRITES, prompt_token_s=0.0003), chunk_tokens=str(has))
    cluster = replace(seen(both, prompt=prompt, output=output, rate=rate), tpot_s=np.full(300, 1e-3))
    weighed = weigh(
        cluster, slo, Bounds(most_changes=2), Terms(wanted=slo.attainment, measured=0.1, seen_s=cluster.seen_s)
    )
    assert weighed.decision.moves == (SetRole(worker="mixed-0", role="mixed", chunk_tokens=wanted),)


def test_what_is_cached_takes_no_part_of_a_step() -> None:
    """Of 4,000 tokens of which 200 are computed a step of 512 has all, and two chunks of 128: what reads a fresh prompt
    of 200 tokens in time reads this one, too."""
    mixed = worker("mixed-0", replace(WRITES, prompt_token_s=0.0003), max_batch_tokens="512", chunk_tokens="128")
    for workers in ((worker("prefill-0"), worker("decode-0")), (mixed, replace(mixed, name="mixed-1"))):
        fresh = replace(seen(*workers, prompt=200, output=30, rate=3.0), cached_share=0.0)
        cached = replace(seen(*workers, prompt=4000, output=30, rate=3.0), cached_share=0.95)
        roles, slo = Arrangement(roles=fresh.roles), Slo(ttft_s=0.3)
        assert play(cached, roles, slo).attainment == pytest.approx(play(fresh, roles, slo).attainment, abs=0.05)
        assert play(fresh, roles, slo).attainment > 0.7
        assert cached.chunks_and_steps(roles) == fresh.chunks_and_steps(roles), "those that it has are named"


def test_where_no_answer_has_a_second_token_readers_are_found_without_a_step_of_a_writer() -> None:
    writers = [replace(worker(f"decode-{i}"), costs=None) for i in range(2)]
    cluster = seen(worker("prefill-0"), *writers, prompt=800, output=1, rate=3.5)
    assert cluster.missing_costs == ""
    weighed = weigh(cluster, SLO, Bounds(most_changes=1), Terms(wanted=0.9, measured=0.1, seen_s=cluster.seen_s))
    (move,) = weighed.decision.moves
    assert isinstance(move, SetRole)
    assert (move.worker, move.role in ("prefill", "mixed")) == ("decode-1", True), weighed.decision.reason
    assert replace(cluster, workload=workload_of([Row(0.0, 800, 2)])).missing_costs == "decode"


def test_a_worker_in_stages_has_a_pass_in_each() -> None:
    """It is as many GPUs as its ranks, and its steps as measured are passes of all stages: prompts that one alone reads
    too slowly are read in time where four are under way."""
    staged = worker("prefill-0", pipeline_parallel="4", tensor_parallel="2", max_batch_tokens="800")
    cluster = seen(staged, worker("decode-0"), prompt=800, output=5, rate=3.5)
    assert cluster.devices == {"prefill-0": 8, "decode-0": 1}
    roles = Arrangement(roles=cluster.roles)
    whole = replace(cluster, workers=(worker("prefill-0", max_batch_tokens="800"), cluster.workers[1]))
    assert play(whole, roles, Slo(ttft_s=0.8)).attainment < 0.3
    assert play(cluster, roles, Slo(ttft_s=0.8)).attainment > 0.95
