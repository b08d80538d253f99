"""Every plan for devices that are there is a spec that `kvrelay up` takes: of each kind, however it was asked."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.spec.load import parse_spec
from cluster.spec.resolve import resolve, workers_of
from decode_worker.options import DecodeOptions
from engine.options import EngineOptions
from kvrelay.plan.catalogs import catalogs
from kvrelay.plan.command import command_of
from kvrelay.plan.folder import cluster_spec
from kvrelay.plan.planning import asked
from kvrelay.plan.reading import build_request
from kvrelay.simulate.simulation import source_of
from placement.build.from_offers import assemble, guessing_ahead, offers_of
from placement.build.from_spec import sim_cluster
from placement.build.sources import RooflineWorkers
from placement.catalogs.base import Degrees, PlanError
from placement.catalogs.roofline import open_catalog
from placement.latency.base import decode_s
from placement.latency.hardware import load_hardware
from placement.latency.model_files import load_shape
from placement.named_files import CONFIGS
from placement.plan import Candidate
from placement.search.hybrids import hybrids_of
from placement.simulator.systems import LiveSystem
from tests.kvrelay.plan.plan_fixture import PLAN, apart, goodput, together
from worker.roles import kind_of

pytestmark = pytest.mark.unit

ASKED = {"model": "llama-3.1-8b", "hardware": "h100-sxm", "num_gpus": 4}
REQUESTS = {"random_input_len": 256, "random_output_len": 64}
ONE = Degrees(1)
PAIR, MIXED = apart((1, 1), (1, 3)), together(1, 4)
ANSWERS = {"two pools": PAIR, "mixed": MIXED, "readers beside mixed": hybrids_of(MIXED)[0]}
READERS, WRITERS = PAIR.pools
ANSWERS["ranks, and stages of ranks"] = replace(
    PAIR, pools=(replace(READERS, degrees=Degrees(2)), replace(WRITERS, degrees=Degrees(2, 2)))
)
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


@pytest.mark.parametrize("draft", ["prompt lookup", "llama-3.1-8b"])
@pytest.mark.parametrize("candidate", [PAIR, MIXED], ids=["two pools", "mixed"])
def test_an_answer_that_guesses_ahead_is_served_so(candidate: Candidate, draft: str) -> None:
    told = {"num_speculative_tokens": 4, "acceptance_rate": 0.7, "speculative_model": draft, "ttft": "300ms"}
    request = build_request(None, {**ASKED, **REQUESTS, **told})
    offer_of = offers_of(catalogs(request)[0])
    guessing = guessing_ahead(candidate, offer_of)
    assert guessing is not None
    chosen = goodput(guessing, 9.0)
    plan = replace(PLAN, chosen=chosen, tried=(chosen,), slo=request.slo, asked=asked(request))
    text, refusal, notes = cluster_spec(plan, request)
    assert (refusal, notes) == ("", ())
    spec, source = (
        parse_spec(yaml.safe_load(text)),
        RooflineWorkers(load_shape("llama-3.1-8b"), load_hardware("h100-sxm"), 0.7),
    )
    system = assemble(guessing, offer_of, within_node=True)
    assert isinstance(system, LiveSystem)
    served, simulated = (
        [(w.num_pages, w.policy.num_speculative_tokens) for w in each.workers if isinstance(w.policy, DecodeOptions)]
        for each in (sim_cluster(spec, source), system.cluster)
    )
    assert served == simulated
    staged = replace(candidate, pools=tuple(replace(pool, degrees=Degrees(1, 2)) for pool in candidate.pools))
    assert guessing_ahead(staged, offer_of) is None, "stages serve no guesses"
    models = {pool.policy.speculative_model for pool in spec.pools if pool.role != "prefill"}
    assert models == ({""} if draft == "prompt lookup" else {"meta-llama/Llama-3.1-8B"})


@pytest.mark.parametrize(
    ("model", "machine", "few"),
    [
        ("llama-3.1-8b", "h100-sxm", {"kv_dtype": "fp8_e4m3"}),
        ("qwen3-0.6b", "cpu-generic", {"kv_dtype": "int8"}),
        ("qwen3-0.6b", "cpu-generic", {"kv_dtype": "int8", "quantization": "int8"}),
    ],
)
def test_few_bits_are_planned_and_served_as_asked(model: str, machine: str, few: dict[str, str]) -> None:
    asked_of = {"model": model, "hardware": machine, "ttft": "300ms"}
    request = build_request(None, {**ASKED, **REQUESTS, **asked_of, **few})
    offer, whole = catalogs(request)[0].offer(ONE), open_catalog(model, machine).offer(ONE)
    assert not isinstance(offer, str)
    assert not isinstance(whole, str)
    assert offer.num_pages > 1.8 * whole.num_pages
    assert (decode_s(offer.latency, 1, 1000) < 0.9 * decode_s(whole.latency, 1, 1000)) == ("quantization" in few)
    assert decode_s(offer.latency, 64, 64_000) < decode_s(whole.latency, 64, 64_000)
    one = together(1, 1)
    chosen = goodput(replace(one, pools=(replace(one.pools[0], num_pages=offer.num_pages),)), 9.0)
    text, _, _ = cluster_spec(replace(PLAN, chosen=chosen, tried=(chosen,), asked=asked(request)), request)
    spec = parse_spec(yaml.safe_load(text))
    assert {key: value for key, value in few.items() if value in (spec.quantization, spec.pools[0].kv_dtype)} == few
    source = RooflineWorkers(load_shape(model), load_hardware(machine))
    [worker] = sim_cluster(spec, source).workers
    assert worker.num_pages == offer.num_pages
    assert command_of(request).count("--kv-dtype") == 1


@pytest.mark.parametrize(
    ("second", "wants", "told"),
    [
        ("NVIDIA A100 SXM 80 GB", [{"accelerator_type:H100": 0.001}, {"accelerator_type:A100": 0.001}], "."),
        ("NVIDIA H100 NVL 94 GB", [{}, {}], "; place it with resources."),  # Ray has one name of both
        ("NVIDIA H100 SXM 80 GB", [{}, {}], ""),
    ],
)
def test_pools_are_placed_by_their_kind_of_gpu(second: str, wants: list[dict[str, float]], told: str) -> None:
    one = together(1, 1).pools[0]
    pools = (replace(one, hardware="NVIDIA H100 SXM 80 GB"), replace(one, hardware=second))
    chosen = goodput(Candidate(pools=pools), 9.0)
    request = build_request(None, {**ASKED, **REQUESTS, "ttft": "300ms"})
    text, _, _ = cluster_spec(replace(PLAN, chosen=chosen, tried=(chosen,), asked=asked(request)), request)
    assert [pool.resources for pool in parse_spec(yaml.safe_load(text)).pools] == wants
    assert (f"# The pool mixed-1 stands on {second}{told}\n" in text) == bool(told)


@pytest.mark.parametrize(
    ("asks", "told"),
    [
        ({"kv_dtype": "int8"}, "kv_dtype is int8, which is for CPUs, and hardware is NVIDIA H100 SXM 80 GB; give fp8_"),
        ({"quantization": "int8"}, "quantization is int8, which is for CPUs, and hardware is NVIDIA H100 SXM 80 GB; t"),
        ({"kv_dtype": "fp8_e4m3", "hardware": "cpu-generic"}, "kv_dtype is fp8_e4m3, which is for GPUs, and hardware"),
    ],
)
def test_few_bits_that_a_device_has_not_are_refused(asks: dict[str, Any], told: str) -> None:
    with pytest.raises(PlanError, match=re.escape(told)):
        catalogs(build_request(None, {**ASKED, **REQUESTS, "ttft": "300ms", **asks}))


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("candidate", ANSWERS.values(), ids=ANSWERS.keys())
def test_an_answer_is_a_spec_that_up_takes(candidate: Candidate, targets: str) -> None:
    given, expected = TARGETS[targets]
    request = build_request(None, {**ASKED, **REQUESTS, **given})
    chosen = goodput(candidate, 9.0)
    plan = replace(PLAN, chosen=chosen, tried=(chosen,), slo=request.slo, asked=asked(request))
    text, refusal, notes = cluster_spec(plan, request)
    assert (refusal, notes) == ("", ())
    spec = parse_spec(yaml.safe_load(text))
    for worker in workers_of(resolve(spec, None)):
        EngineOptions(**worker.engine).validate()
    for pool in spec.pools:  # what the doctor holds workers against
        assert pool.assumed is not None
        assert pool.assumed.prompt_tokens == 512
        times = pool.assumed.prefill_s, pool.assumed.transfer_s, pool.assumed.decode_s
        phases = kind_of(pool.role).phases
        assert [time is not None for time in times] == ["prefill" in phases, "prefill" in phases, "decode" in phases]
    assert spec.targets_s == ({} if candidate.kind == "two pools" else pytest.approx(expected))


def test_of_clusters_of_one_pair_each_the_spec_of_one_is_written() -> None:
    request = build_request(None, {**ASKED, **REQUESTS, "ttft": "300ms"})
    chosen = replace(goodput(apart((1, 2), (1, 2)), 9.0), copies=2)
    plan = replace(PLAN, chosen=chosen, tried=(chosen,), slo=request.slo, asked=asked(request))
    text, *_ = cluster_spec(plan, request)
    assert {pool.role: pool.replicas for pool in parse_spec(yaml.safe_load(text)).pools} == {"prefill": 1, "decode": 1}
    told = " ".join(line.lstrip("# ") for line in text.splitlines())
    assert "This is one of 2 such clusters, each with its share of the requests" in told


def test_the_spec_has_the_pages_of_the_plan_where_ranks_share_a_kv_head(tmp_path: Path) -> None:
    """4 KV heads, as of Qwen3-30B-A3B: at TP 8 each is held twice."""
    config = json.loads((CONFIGS / "models" / "llama-3.1-8b.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 4}))
    request = build_request(None, {**ASKED, **REQUESTS, "model": str(tmp_path), "num_gpus": 8, "ttft": "300ms"})
    offer = catalogs(request)[0].offer(Degrees(8))
    assert not isinstance(offer, str)
    mixed = together(8, 1)
    chosen = goodput(replace(mixed, pools=(replace(mixed.pools[0], num_pages=offer.num_pages),)), 9.0)
    text, _, _ = cluster_spec(replace(PLAN, chosen=chosen, tried=(chosen,), asked=asked(request)), request)
    source = source_of(spec := parse_spec(yaml.safe_load(text)), hardware="h100-sxm", profile=None, model=str(tmp_path))
    assert [worker.num_pages for worker in sim_cluster(spec, source).workers] == [offer.num_pages]


@pytest.mark.parametrize(("model_type", "expected"), [("glm4", {1}), ("phi3", {1}), ("llama", {1, 2, 4, 8})])
def test_a_model_that_is_not_cut_has_specs_of_whole_workers(
    model_type: str, expected: set[int], tmp_path: Path
) -> None:
    """Of every degree that the catalog has."""
    config = json.loads((CONFIGS / "models" / "llama-3.1-8b.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
    request = build_request(None, {**ASKED, **REQUESTS, "model": str(tmp_path), "num_gpus": 8, "ttft": "300ms"})
    written = set()
    for degrees in catalogs(request)[0].degrees(8):
        chosen = goodput(together(degrees.tp, 1), 9.0)
        text, refusal, _ = cluster_spec(replace(PLAN, chosen=chosen, tried=(chosen,), asked=asked(request)), request)
        assert refusal == ""
        (worker,) = workers_of(resolve(parse_spec(yaml.safe_load(text)), None))
        options = EngineOptions(**worker.engine)
        options.validate()
        written.add(options.tensor_parallel)
    assert written == expected


def test_degrees_of_a_published_system_that_no_worker_loads_are_not_written() -> None:
    """DistServe's figures are of OPT, which it cuts."""
    asked_for = {"model": "opt-13b", "latency": "distserve", "num_gpus": 4, "ttft": "300ms"}
    request = build_request(None, {**asked_for, **REQUESTS})
    chosen, second = goodput(apart((2, 1), (2, 1)), 9.0), goodput(PAIR, 8.0)
    why = "opt-13b (opt) has no tensor-parallel plan in transformers that is known to be served, and TP is 2"
    text, _, notes = cluster_spec(replace(PLAN, chosen=chosen, tried=(chosen, second), asked=asked(request)), request)
    assert notes == (f"cluster.yaml has the best that kvrelay up starts, {PAIR.label}: {why}",)
    assert {pool.tensor_parallel for pool in parse_spec(yaml.safe_load(text)).pools} == {1}
    alone = cluster_spec(replace(PLAN, chosen=chosen, tried=(chosen,)), request)
    assert alone == ("", f"There is none: {why}.", (f"no cluster.yaml is written: {why}",))


def test_of_stages_over_several_nodes_the_best_that_is_started_is_written() -> None:
    request = build_request(None, {**ASKED, **REQUESTS, "ttft": "300ms"})
    chosen = goodput(replace(PAIR, pools=(READERS, replace(WRITERS, degrees=Degrees(8, 2)))), 9.0)
    second = goodput(PAIR, 8.0)
    text, _, notes = cluster_spec(replace(PLAN, chosen=chosen, tried=(chosen, second)), request)
    [note] = notes
    why = "a worker's processes are on one host, and decode workers of TP 8 x PP 2 want 16 GPUs, where a node has 8"
    assert note == f"cluster.yaml has the best that kvrelay up starts, {PAIR.label}: {why}"
    assert text.startswith(f"# Note: {note}\n")
    assert [pool.replicas for pool in parse_spec(yaml.safe_load(text)).pools] == [pool.replicas for pool in PAIR.pools]
    alone = cluster_spec(replace(PLAN, chosen=chosen, tried=(chosen,)), request)
    assert alone == ("", f"There is none: {why}.", (f"no cluster.yaml is written: {why}",))
