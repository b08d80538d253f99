"""Every plan for devices that are there is a spec that `kvrelay up` takes: of each kind, however it was asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import yaml

from cluster.spec.load import parse_spec
from cluster.spec.resolve import why_not_served
from kvrelay.plan.folder import cluster_spec
from kvrelay.plan.planning import asked
from kvrelay.plan.reading import build_request
from placement.plan import Candidate
from placement.search.clusters import hybrids_of
from tests.kvrelay.plan.plan_fixture import PLAN, apart, goodput, together
from worker.roles import kind_of

pytestmark = pytest.mark.unit

ASKED = {"model": "llama-3.1-8b", "hardware": "h100-sxm", "num_gpus": 4}
REQUESTS = {"random_input_len": 256, "random_output_len": 64}
PAIR, MIXED = apart((1, 1), (1, 3)), together(1, 4)
ANSWERS = {"two pools": PAIR, "mixed": MIXED, "readers beside mixed": hybrids_of(MIXED)[0]}
ANSWERS |= {f"a pair as {hybrid.label}": hybrid for hybrid in hybrids_of(PAIR)}
TARGETS: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "both": ({"ttft": "300ms", "tpot": "20ms"}, {"ttft_s": 0.3, "tpot_s": 0.02}),
    "ttft": ({"ttft": "300ms"}, {"ttft_s": 0.3}),
    "tpot": ({"tpot": "20ms"}, {"tpot_s": 0.02}),
    "classes": (
        {"classes": [{"name": "people", "ttft": "300ms", "tpot": "20ms"}, {"name": "jobs", "ttft": "5s"}]},
        {"ttft_s": 5.0},
    ),
    "classes that want nothing in common": (
        {"classes": [{"name": "people", "tpot": "20ms"}, {"name": "jobs", "ttft": "5s"}]},
        {},
    ),
}


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("candidate", ANSWERS.values(), ids=ANSWERS.keys())
def test_an_answer_is_a_spec_that_up_takes(candidate: Candidate, targets: str) -> None:
    given, expected = TARGETS[targets]
    request = build_request(None, {**ASKED, **REQUESTS, **given})
    chosen = goodput(candidate, 9.0)
    plan = replace(PLAN, chosen=chosen, tried=(chosen,), slo=request.slo, asked=asked(request))
    text, refusal, notes = cluster_spec(plan, request)
    assert (refusal, notes) == ("", [])
    spec = parse_spec(yaml.safe_load(text))
    assert why_not_served(spec) == ""
    for pool in spec.pools:  # what the doctor holds workers against
        assert pool.assumed is not None
        assert pool.assumed.prompt_tokens == 512
        times = pool.assumed.prefill_s, pool.assumed.transfer_s, pool.assumed.decode_s
        phases = kind_of(pool.role).phases
        assert [time is not None for time in times] == ["prefill" in phases, "prefill" in phases, "decode" in phases]
    assert spec.targets_s == ({} if candidate.kind == "two pools" else pytest.approx(expected))
