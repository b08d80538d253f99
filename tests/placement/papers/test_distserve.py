"""The distserve variant gives what DistServe's own simulator gave on the same requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from placement.catalogs.base import Degrees
from placement.papers.distserve.coefficients import DistServeCatalog, distserve_latency
from placement.papers.distserve.rules import DECODE_CAP_TOKENS, DistServeCluster, simulate
from placement.simulator.outcome import Outcome, percentiles
from placement.workload.requests import Workload, from_rows, read_request_list
from placement.workload.traces import WorkloadError

DATA = Path(__file__).parent / "data"
CASES: list[dict[str, Any]] = json.loads((DATA / "distserve-cases.json").read_text())["cases"]
RUNS = [case for case in CASES if case["kind"] == "simdistserve run"]
SEARCHES = [case for case in CASES if case["kind"] == "simdistserve placement search"]
PRINTED = 0.006  # the cases are printed to two digits of a millisecond


def cluster(model: str, degrees: list[int], backend: str = "distserve") -> DistServeCluster:
    tp, pp, decode_tp, decode_pp = degrees
    if backend == "vllm":
        return DistServeCluster(prefill=distserve_latency(model, tp, pp, "vllm"), decode=None)
    return DistServeCluster(
        prefill=distserve_latency(model, tp, pp), decode=distserve_latency(model, decode_tp, decode_pp)
    )


def requests(trace: str) -> Workload:
    return read_request_list(DATA / Path(trace).name)


@pytest.mark.parametrize("case", RUNS, ids=[case["id"] for case in RUNS])
def test_its_runs_to_all_printed_digits(case: dict[str, Any]) -> None:
    workload = requests(case["trace"]).faster(case["rate_req_s"])
    outcome = simulate(cluster(case["model"], case["tp_pp_prefill_tp_pp_decode"], case["backend"]), workload)
    ttft_s, tpot_s = (slo / 1e3 for slo in case["slo_ms"])
    assert 100 * outcome.attainment(ttft_s=ttft_s) == pytest.approx(case["attainment_pct"]["prefill"])
    assert 100 * outcome.attainment(tpot_s=tpot_s) == pytest.approx(case["attainment_pct"]["decode"])
    assert 100 * outcome.attainment(ttft_s, tpot_s) == pytest.approx(case["attainment_pct"]["both"])
    assert [1e3 * p for p in percentiles(outcome.ttft_s)] == pytest.approx(case["p50_p90_p99_ttft_ms"], abs=PRINTED)
    assert [1e3 * p for p in percentiles(outcome.tpot_s)] == pytest.approx(case["p50_p90_p99_tpot_ms"], abs=PRINTED)


def meets(outcome: Outcome, slo_ms: list[float]) -> bool:
    """Its search's criterion: P90 of TTFT and of TPOT apart."""
    return all(
        1e3 * percentiles(values, (90,))[0] < limit
        for values, limit in zip((outcome.ttft_s, outcome.tpot_s), slo_ms, strict=True)
    )


def best_rate(
    model: str, degrees: list[int], workload: Workload, slo_ms: list[float], most: float, eps: float
) -> float:
    """Its search: halve [0, most] while it is wider than eps."""
    placed, gpus = cluster(model, degrees), degrees[0] * degrees[1] + degrees[2] * degrees[3]
    low, high = 0.0, most
    while high - low > eps:
        rate = (low + high) / 2
        if meets(simulate(placed, workload.faster(rate * gpus)), slo_ms):
            low = rate
        else:
            high = rate
    return low


@pytest.mark.parametrize("case", SEARCHES, ids=[case["id"] for case in SEARCHES])
def test_every_configuration_of_its_placement_searches(case: dict[str, Any]) -> None:
    workload = requests(case["trace"])
    for name, rate in case["all"].items():
        cross, tp, pp, decode_tp, decode_pp = json.loads(name.replace("(", "[").replace(")", "]"))
        degrees = [tp, pp * cross, decode_tp, decode_pp * cross]
        found = best_rate(
            case["model"], degrees, workload, case["attainment"][:2], case["max_per_gpu_rate"], case["esp"]
        )
        assert found == rate, name


def test_goodput_of_a_burst_falls_with_the_number_of_requests() -> None:
    """At 1,000 requests the best rate is far below that at 300: the case's own figures, by its own search."""
    rows = next(case for case in CASES if case["id"] == "n_sensitivity")["rows"]["('facebook/opt-13b', (4, 1, 1, 2))"]
    of_300, of_1000 = (
        best_rate("opt_13b", [4, 1, 1, 2], requests(f"sharegpt_synth_N{n}.json"), [250, 100], 6, 0.05)
        for n in (300, 1000)
    )
    expected = dict(rows)
    assert of_300 == pytest.approx(expected[300], abs=0.06)
    assert of_1000 == pytest.approx(expected[1000], abs=0.06)


def test_two_pipelines_share_the_work() -> None:
    workload = requests("sharegpt_synth_N300.json").faster(6)
    one = cluster("opt_13b", [1, 1, 1, 1])
    two = DistServeCluster(prefill=one.prefill, decode=one.decode, num_prefill=2, num_decode=2)
    assert percentiles(simulate(two, workload).ttft_s)[1] < 0.6 * percentiles(simulate(one, workload).ttft_s)[1]


def test_passing_over_steps_changes_nothing_but_the_cost() -> None:
    """Against the same rules walked step by step, with a cap that binds: every request ends at the same time."""
    rng = np.random.default_rng(4)
    rows = [
        [t, p, o]
        for t, p, o in zip(
            np.cumsum(rng.exponential(0.12, 150)), rng.integers(300, 2000, 150), rng.integers(2, 400, 150), strict=True
        )
    ]
    workload = from_rows(rows)
    placed = cluster("opt_13b", [1, 1, 1, 1])
    outcome = simulate(placed, workload)
    assert placed.decode is not None
    stepped = step_by_step(placed, workload, outcome.first_token_s)
    assert outcome.finish_s == pytest.approx(stepped, rel=1e-9)


def step_by_step(placed: DistServeCluster, workload: Workload, ready_s: Any) -> list[float]:
    """One decode worker on one stage, a step at a time, from when each request's prefill was done."""
    assert placed.decode is not None
    coming = sorted(range(len(workload)), key=lambda i: (ready_s[i], i))
    context = workload.prompt_len.tolist()
    left = workload.output_len.tolist()
    finish = [0.0] * len(workload)
    queue: list[int] = []
    now, capped = 0.0, 0
    while coming or queue:
        if not queue:
            now = max(now, float(ready_s[coming[0]]))
        while coming and ready_s[coming[0]] <= now:
            queue.append(coming.pop(0))
        batch: list[int] = []
        while queue and sum(context[i] + 1 for i in batch) + context[queue[0]] + 1 <= DECODE_CAP_TOKENS:
            batch.append(queue.pop(0))
        capped += bool(queue)
        tokens = sum(context[i] + 1 for i in batch)
        now += placed.decode.decode_line(len(batch), tokens).step_s + 2e-3 + 1e-7 * (tokens - len(batch))
        while coming and ready_s[coming[0]] < now:
            queue.append(coming.pop(0))
        for i in batch:
            context[i] += 1
            left[i] -= 1
            if left[i]:
                queue.append(i)
            else:
                finish[i] = now
    assert capped > 10, "the cap must bind for this to show anything"
    return finish


def test_prompts_that_leave_a_pipeline_together_decode_together() -> None:
    """Its processes sleep until the one that woke them waits, so that none takes the first of a batch alone."""
    outcome = simulate(cluster("opt_13b", [2, 2, 0, 0], "vllm"), from_rows([[0, 300, 20]] * 4))
    later = outcome.finish_s[1:]  # the first had arrived alone
    assert later == pytest.approx([later[0]] * 3)


STAGED = [  # model, degrees, requests/s, P50, P90, P99 of TTFT and of TPOT in ms, by its rules written again on SimPy
    ("opt_13b", [2, 2, 0, 0], 4, [126.66, 222.23, 337.86], [61.48, 68.51, 77.20]),
    ("opt_66b", [4, 2, 0, 0], 2, [286.95, 581.85, 914.61], [123.68, 141.47, 164.21]),
    ("opt_13b", [1, 4, 0, 0], 4, [170.20, 300.35, 404.93], [86.32, 93.56, 105.45]),
]


@pytest.mark.parametrize(("model", "degrees", "rate", "ttft_ms", "tpot_ms"), STAGED)
def test_pipelines_that_do_both_phases(
    model: str, degrees: list[int], rate: float, ttft_ms: list[float], tpot_ms: list[float]
) -> None:
    outcome = simulate(cluster(model, degrees, "vllm"), requests("sharegpt_synth_N1000.json").faster(rate))
    assert [1e3 * p for p in percentiles(outcome.ttft_s)] == pytest.approx(ttft_ms, abs=PRINTED)
    assert [1e3 * p for p in percentiles(outcome.tpot_s)] == pytest.approx(tpot_ms, abs=PRINTED)


def test_a_prompt_that_no_step_takes_is_refused() -> None:
    with pytest.raises(WorkloadError, match="takes 66144"):
        simulate(cluster("opt_13b", [1, 1, 1, 1]), from_rows([[0, 70_000, 5]]))


OTHERS = [  # model, degrees, engine, dataset, replicas of each
    ("opt_13b", [1, 8, 2, 4], "distserve", "humaneval", (1, 1)),
    ("opt_66b", [2, 4, 4, 8], "distserve", "longbench", (1, 1)),
    ("opt_66b", [4, 1, 2, 2], "distserve", "longbench", (3, 2)),
    ("opt_66b", [8, 2, 3, 1], "distserve", "humaneval", (2, 3)),
    ("opt_13b", [2, 4, 0, 0], "vllm", "longbench", (2, 1)),
    ("opt_66b", [4, 2, 0, 0], "vllm", "sharegpt", (3, 1)),
]


@pytest.mark.parametrize(("model", "degrees", "engine", "dataset", "replicas"), OTHERS)
def test_other_configurations_serve_everybody_from_idle_to_overload(
    model: str, degrees: list[int], engine: str, dataset: str, replicas: tuple[int, int]
) -> None:
    one = cluster(model, degrees, engine)
    placed = DistServeCluster(prefill=one.prefill, decode=one.decode, num_prefill=replicas[0], num_decode=replicas[1])
    workload = requests(f"{dataset}_synth_N300.json").first(40)
    p90s = []
    for rate in (0.02, 2.0, 1000.0):
        outcome = simulate(placed, workload.faster(rate))
        assert outcome.served == 40
        assert (outcome.ttft_s > 0).all()
        assert (outcome.finish_s > outcome.first_token_s).all()
        p90s.append(percentiles(outcome.ttft_s)[1])
    assert p90s[0] <= p90s[-1]
    idle = simulate(placed, workload.faster(0.0001))
    alone = [one.prefill.prefill_s([(length, 0)]) * one.prefill.stages for length in workload.prompt_len.tolist()]
    overhead = 2e-3 + 1e-7 * workload.prompt_len
    assert idle.ttft_s == pytest.approx(alone + overhead)


def test_its_catalogue_offers_what_was_published_and_says_what_was_not() -> None:
    catalog = DistServeCatalog(name="opt_66b")
    assert Degrees(1, 2) not in catalog.degrees(8)
    assert {Degrees(4, 1), Degrees(2, 2)} <= set(catalog.degrees(8))
    assert "at TP 2, 3, 4, 8 only" in str(catalog.offer(Degrees(6, 1)))
    near, far = catalog.offer(Degrees(4, 1)), catalog.offer(Degrees(4, 1), within_node=False)
    assert not isinstance(near, str)
    assert not isinstance(far, str)
    assert near.kv_tokens == 78_496
    assert near.latency.transfer_s(1000) == pytest.approx(2.359296 / 300)
    assert far.latency.transfer_s(1000) == pytest.approx(2.359296 / 3.125)
