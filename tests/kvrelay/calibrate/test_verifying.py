"""A plan file says what to send and what is predicted; what was measured is read request by request."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvrelay.bench.metrics import Outcome
from kvrelay.bench.options import WorkloadOptions
from kvrelay.bench.workload import timed_shapes, timed_workload
from kvrelay.calibrate import verifying
from kvrelay.client.types import ClusterStatus, Timeline, WorkerState
from kvrelay.plan.catalogs import catalogs
from kvrelay.plan.folder import plan_object
from kvrelay.plan.planning import asked, machines_of
from kvrelay.plan.request import PlanRequest
from placement.catalogs.base import PlanError
from placement.checks.verification import Doubt, predict
from placement.latency.profile_file import write_profile
from placement.mixes.designs import Mix, all_designs
from placement.plan import Plan, Slo
from tests.kvrelay.plan.plan_fixture import COLOCATED, PLAN, apart, goodput, point, together
from tests.placement.latency.test_profile import profile
from tests.served import served_model

pytestmark = pytest.mark.unit

TRACE = Path(__file__).parents[3] / "configs" / "workloads" / "azure-conv-2023.csv"
WORKLOAD: dict[str, Any] = {"trace": TRACE, "trace_scale": 0.25, "max_input_len": 500, "ttft": "500ms", "tpot": "50ms"}


def plan_file(folder: Path, plan: Plan, request: PlanRequest) -> Path:
    path = folder / "plan.json"
    path.write_text(json.dumps(plan_object(replace(plan, asked=asked(request)))))
    return path


def one_to_two() -> Plan:
    """One prefill and two decode workers, asked for 2 requests/s."""
    chosen = goodput(apart((1, 1), (1, 2)), 2.5)
    return replace(PLAN, chosen=chosen, at_rate=point(2.0, 2.5), slo=Slo(ttft_s=0.5, tpot_s=0.05))


def test_a_plan_made_from_a_profile_is_verified_by_it(tmp_path: Path) -> None:
    write_profile(profile(client_s=0.003), tmp_path / "profile.json")
    request = PlanRequest(profile=(tmp_path / "profile.json",), num_gpus=3, **{"seed": 7, **WORKLOAD})
    claim = verifying.of_plan(plan_file(tmp_path, one_to_two(), request), {"num_prompts": 30})
    assert [worker.name for worker in claim.cluster.workers] == ["prefill-0", "decode-0", "decode-1"]
    assert claim.slo == Slo(ttft_s=0.5, tpot_s=0.05)
    assert (claim.doubt, claim.source) == (Doubt(prefill=0.02, decode=0.05, client_s=0.003), "plan.json")
    options = claim.workload
    assert (options.request_rate, options.num_prompts, options.seed) == (2.0, 30, 7)
    workload = timed_workload(options)
    assert len(workload) == 30
    assert workload.prompt_len.max() <= 500


def test_of_clusters_of_one_pair_each_one_is_verified_at_its_share_of_the_rate(tmp_path: Path) -> None:
    request = PlanRequest(model="llama-3.1-8b", hardware=("h100-sxm",), num_gpus=4, **WORKLOAD)
    chosen = replace(goodput(apart((1, 2), (1, 2)), 2.5), copies=2)
    claim = verifying.of_plan(plan_file(tmp_path, replace(one_to_two(), chosen=chosen), request), {})
    assert [worker.name for worker in claim.cluster.workers] == ["prefill-0", "decode-0"]
    assert claim.workload.request_rate == 1.0


def test_what_is_simulated_is_what_is_sent() -> None:
    """Lengths and times, whatever the prompts' tokens are."""
    options = WorkloadOptions(num_prompts=40, request_rate=3.0, trace=TRACE, trace_scale=0.25, seed=3)
    workload = timed_workload(options)
    sent = timed_shapes(options)
    assert workload.arrival_s.tolist() == [at_s for _, at_s in sent]
    assert workload.prompt_len.tolist() == [shape.input_len for shape, _ in sent]
    assert workload.output_len.tolist() == [shape.output_len for shape, _ in sent]


def test_a_plan_made_from_first_principles_is_verified_by_them(tmp_path: Path) -> None:
    request = PlanRequest(model="llama-3.1-8b", hardware=("h200-sxm",), num_gpus=3, **WORKLOAD)
    claim = verifying.of_plan(plan_file(tmp_path, one_to_two(), request), {})
    assert [worker.role for worker in claim.cluster.workers] == ["prefill", "decode", "decode"]
    assert claim.cluster.workers[0].latency.source.startswith("roofline")


def test_a_plan_of_workers_that_do_both_is_verified(tmp_path: Path) -> None:
    request = PlanRequest(model="llama-3.1-8b", hardware=("h200-sxm",), num_gpus=8, **WORKLOAD)
    claim = verifying.of_plan(plan_file(tmp_path, COLOCATED, request), {})
    assert {worker.role for worker in claim.cluster.workers} == {"mixed"}


def test_a_plan_that_kvrelay_does_not_serve_is_refused(tmp_path: Path) -> None:
    request = PlanRequest(model="llama-3.1-8b", hardware=("h200-sxm",), num_gpus=8, **WORKLOAD)
    theirs = replace(COLOCATED.chosen, candidate=together(2, 4, "colocated"))
    with pytest.raises(PlanError, match="chose a published system's machines"):
        verifying.of_plan(plan_file(tmp_path, replace(COLOCATED, chosen=theirs), request), {})


def test_a_plan_of_two_kinds_of_machines_is_verified_on_each_pools_own(tmp_path: Path) -> None:
    asked_for = {"hardware": ("a100-80g-sxm", "h100-sxm"), "rate": 2.0, **WORKLOAD}
    request = PlanRequest(model="llama-2-70b", **asked_for)
    machines = machines_of(request, catalogs(request))
    (design,) = all_designs(machines, ["HA"])
    candidate = Mix(design=design, num_prompt=1, num_token=2).candidate("mixed")
    plan = replace(one_to_two(), chosen=goodput(candidate, 2.5))
    cluster = verifying.of_plan(plan_file(tmp_path, plan, request), {}).cluster
    sources = [worker.latency.source for worker in cluster.workers]
    assert [("H100" in source, "A100" in source) for source in sources] == [(True, False), (False, True), (False, True)]


def test_a_plan_with_classes_is_verified_by_targets_that_are_given(tmp_path: Path) -> None:
    """Its own are its classes', and its SLO infinite: every request would meet that."""
    own: dict[str, Any] = {key: value for key, value in WORKLOAD.items() if key not in ("ttft", "tpot")}
    own["classes"] = [{"name": "chat", "ttft": "500ms"}, {"name": "jobs", "ttft": "5s"}]
    request = PlanRequest(model="llama-3.1-8b", hardware=("h200-sxm",), num_gpus=3, **own)
    path = plan_file(tmp_path, replace(one_to_two(), slo=Slo()), request)
    with pytest.raises(PlanError, match=r"has classes \(chat, jobs\), .*; give --ttft, --tpot or both"):
        verifying.of_plan(path, {})
    assert verifying.of_plan(path, {}, {"ttft_s": 0.5}).slo == Slo(ttft_s=0.5)


def test_another_cluster_than_the_plan_s_is_refused(tmp_path: Path) -> None:
    write_profile(profile(), tmp_path / "profile.json")
    request = PlanRequest(profile=(tmp_path / "profile.json",), num_gpus=3, **WORKLOAD)
    claim = verifying.of_plan(plan_file(tmp_path, one_to_two(), request), {})
    verifying.check_alike(claim, status("prefill", "decode", "decode"), served_model(name="b-model", fingerprint="f1"))
    with pytest.raises(PlanError, match="is for 2 decode workers, and 1 are ready"):
        verifying.check_alike(claim, status("prefill", "decode"), served_model(name="b-model", fingerprint="f1"))


def test_another_model_than_the_profile_s_is_refused(tmp_path: Path) -> None:
    """Or the margin of one would be kept for the other."""
    write_profile(profile(model={"name": "a-model", "fingerprint": "f1"}), tmp_path / "profile.json")
    request = PlanRequest(profile=(tmp_path / "profile.json",), num_gpus=3, **WORKLOAD)
    of_pairs = verifying.of_plan(plan_file(tmp_path, one_to_two(), request), {})
    both = plan_file(tmp_path, replace(one_to_two(), chosen=goodput(together(1, 2), 2.5)), request)
    of_mixed = verifying.of_plan(both, {})
    for claim, roles in ((of_pairs, ("prefill", "decode", "decode")), (of_mixed, ("mixed", "mixed"))):
        verifying.check_alike(claim, status(*roles), served_model(name="b-model", fingerprint="f1"))
        with pytest.raises(PlanError, match=r"profile\.json is of a-model \(f1\), and this cluster serves b-model"):
            verifying.check_alike(claim, status(*roles), served_model(name="b-model", fingerprint="f2"))


def status(*roles: str) -> ClusterStatus:
    workers = tuple(
        WorkerState(
            name=f"{role}-{i}",
            role=role,
            address="",
            state="ready",
            num_waiting=0,
            num_running=0,
            waiting_tokens=0,
            available_pages=0,
            cached_pages=0,
            total_pages=0,
            leased_pages=0,
            report_age_s=0.0,
            losses=0,
            reason="",
        )
        for i, role in enumerate(roles)
    )
    return ClusterStatus(router_id="r", model="m", uptime_s=1.0, num_queued=0, num_in_flight=0, workers=workers)


def test_what_was_measured_stands_in_the_order_of_the_requests() -> None:
    timeline = Timeline(
        phases_s={"route": 0.1, "prefill": 0.3},
        ttft_s=0.4,
        tpot_s=0.1,
        e2e_s=0.6,
        prefill_worker="p",
        decode_worker="d",
        attempts=1,
    )
    good = Outcome(index=0, due_s=1.0, input_len=5, token_times_s=[1.5, 1.7], output_len=2, timeline=timeline)
    late = Outcome(index=1, due_s=2.0, input_len=5, code="UNAVAILABLE", message="gone")
    seen = verifying.measured_of([good, late])
    np.testing.assert_allclose(seen.ttft_s, [0.5, math.nan])
    np.testing.assert_allclose(seen.tpot_s, [0.2, math.nan])
    np.testing.assert_allclose(seen.e2e_s, [0.7, math.nan])
    assert seen.phases_s == {"route": 0.1, "prefill": 0.3}
    assert seen.failed == 1


def test_a_run_for_the_margin_says_how_far_off_the_p90s_were() -> None:
    options = WorkloadOptions(num_prompts=60, request_rate=2.0, random_input_len=100, random_output_len=10)
    claim = verifying.of_profile_values(profile(), options, Slo(ttft_s=1.0), "p.json")
    prediction = verifying.foretell(claim)
    expected = prediction.expected
    measured = replace(expected, ttft_s=expected.ttft_s * 1.2, tpot_s=expected.tpot_s * 0.9)
    run = verifying.margin_run(claim, verifying.judge(claim, prediction, measured))
    assert (run.ttft, run.tpot) == pytest.approx((0.2, -0.1), abs=0.01)
    assert (run.source, run.num_requests, run.counts) == ("p.json", 60, True)
    assert predict(claim.cluster, timed_workload(options), Doubt()).error == 0.02
