"""A small machine: profiles of workers of one thread and of two are weighed by its cores, and the pick is served."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from cluster.spec.load import parse_spec
from cluster.spec.resolve import Machine, resolve, workers_of
from kvrelay.calibrate import verifying
from kvrelay.plan.catalogs import catalogs
from kvrelay.plan.command import command_of
from kvrelay.plan.folder import cluster_spec, plan_object
from kvrelay.plan.planning import asked
from kvrelay.plan.reading import build_request
from kvrelay.plan.request import PlanRequest
from kvrelay.plan.words import answer
from kvrelay.simulate.simulation import source_of
from placement.build.from_offers import mixed_of, offers_of, pair_of
from placement.catalogs.base import Degrees, PlanError
from placement.catalogs.profile import ProfileCatalog
from placement.latency.hardware import load_hardware
from placement.latency.model_files import load_shape
from placement.latency.profile_file import read_profile, write_profile
from placement.plan import Candidate, Plan, Slo
from placement.search.hybrids import hybrids_of
from placement.search.planner import plan
from placement.search.question import PlanQuestion
from placement.workload.requests import from_rows
from tests.kvrelay.plan.plan_fixture import PLAN, goodput, point
from tests.placement.latency.test_profile import two_cores

pytestmark = pytest.mark.unit

CORES = Machine(cores=(0, 1), memory_bytes=8 << 30)
MODEL = "kvrelay-demo-125m"


def request(folder: Path) -> PlanRequest:
    files = tuple(folder / profile.name for profile in two_cores())
    for profile, path in zip(two_cores(), files, strict=True):
        named = replace(profile, model={**profile.model, "dtype": "bfloat16"})
        write_profile(named, path)
    keys = {"random_input_len": 64, "random_output_len": 16, "ttft": "500ms", "tpot": "50ms"}
    return build_request(None, {"profile": [str(path) for path in files], "model": MODEL, "num_gpus": 2, **keys})


def arrangements() -> dict[str, Candidate]:
    catalog = ProfileCatalog(*two_cores())
    one, two = (offers_of(catalog)(Degrees(threads=threads), True) for threads in (1, 2))
    pair, halves = pair_of((one, 1), (one, 1), "a-cpu"), mixed_of(one, 2, "a-cpu", 128)
    return {
        "a pair": pair,
        "one mixed": mixed_of(two, 1, "a-cpu", 128),
        "two mixed": halves,
        "a hybrid": hybrids_of(halves)[0],
        "two kinds of mixed": hybrids_of(pair)[0],
    }


def planned(candidate: Candidate, asked_for: PlanRequest) -> Plan:
    chosen = goodput(candidate, 2.5)
    return replace(
        PLAN, chosen=chosen, tried=(chosen,), at_rate=point(2.0, 2.5), slo=Slo(ttft_s=0.5, tpot_s=0.05),
        asked=asked(asked_for),
    )  # fmt: skip


def test_pairs_mixed_workers_and_hybrids_are_weighed_on_the_cores_there_are() -> None:
    workload = from_rows([[i / 10, 64, 16] for i in range(200)])
    question = PlanQuestion(slo=Slo(ttft_s=0.5, tpot_s=0.05), num_gpus=2, processes=0, thoroughness=0.02)
    found = plan(question, ProfileCatalog(*two_cores()), workload)
    assert all(each.candidate.gpus == 2 for each in found.tried)
    kinds = {tuple((p.role, p.replicas, p.degrees.threads) for p in each.candidate.pools) for each in found.tried}
    assert kinds >= {
        (("prefill", 1, 1), ("decode", 1, 1)),
        (("mixed", 1, 2),),
        (("mixed", 2, 1),),
        (("prefill", 1, 1), ("mixed", 1, 1)),
    }
    assert answer(found)[0].endswith("on two cores of a-cpu.")
    assert answer(found)[1].endswith("per core.")


@pytest.mark.parametrize("name", arrangements())
def test_each_is_written_as_a_spec_that_pins_as_many_cores(name: str, tmp_path: Path) -> None:
    candidate, asked_for = arrangements()[name], request(tmp_path)
    text, refusal, notes = cluster_spec(planned(candidate, asked_for), asked_for)
    assert (refusal, notes) == ("", ())
    spec = parse_spec(yaml.safe_load(text))
    assert spec.dtype == "bfloat16"
    workers = workers_of(resolve(spec, CORES))
    assert sorted(core for worker in workers for core in worker.cpus) == [0, 1]
    assert [worker.engine["threads"] for worker in workers] == [len(worker.cpus) for worker in workers]


def test_a_directory_that_a_profile_has_no_path_of_is_asked_for(tmp_path: Path) -> None:
    asked_for = request(tmp_path).model_copy(update={"model": None})
    text, _, notes = cluster_spec(planned(arrangements()["a pair"], asked_for), asked_for)
    assert notes == (
        "cluster.yaml has model a-model, as pair.json calls it, which kvrelay up may not find; give --model its "
        "directory, or write that there",
    )
    assert text.startswith(f"# Note: {notes[0]}\n")
    for path in asked_for.profile:
        known = read_profile(path)
        write_profile(replace(known, model={**known.model, "name": "somebody/a-model"}), path)
    assert cluster_spec(planned(arrangements()["a pair"], asked_for), asked_for)[2] == ()


def test_what_was_measured_with_few_bits_is_written_so(tmp_path: Path) -> None:
    asked_for, narrow = request(tmp_path), {"quantization": "int8", "kv_dtype": "int8"}
    found = planned(arrangements()["a pair"], asked_for)
    wide = parse_spec(yaml.safe_load(cluster_spec(found, asked_for)[0]))
    for path in asked_for.profile:
        known = read_profile(path)
        options = {**known.prefill_pool.options, **narrow}
        write_profile(replace(known, prefill_pool=replace(known.prefill_pool, options=options)), path)
    spec = parse_spec(yaml.safe_load(cluster_spec(found, asked_for)[0]))
    assert (spec.quantization, [pool.kv_dtype for pool in spec.pools]) == ("int8", ["int8", "int8"])
    narrow_bytes, wide_bytes = ([pool.kv_memory for pool in each.pools] for each in (spec, wide))
    assert all(0 < int(few) < 0.6 * int(many) for few, many in zip(narrow_bytes, wide_bytes, strict=True)), (
        "as many pages as were measured, of half the bytes and their scales"
    )
    one, other = (read_profile(path) for path in asked_for.profile)
    other = replace(other, prefill_pool=replace(other.prefill_pool, options={}))
    with pytest.raises(PlanError, match=r"quantization is not given in both.json and int8 in pair.json"):
        ProfileCatalog(one, other)


def test_cores_of_a_hardware_file_are_cores_and_no_gpus() -> None:
    keys = {"random_input_len": 64, "random_output_len": 16, "ttft": "500ms", "tpot": "50ms", "rate": 1}
    asked_for = build_request(None, {"model": MODEL, "hardware": "cpu-generic", **keys})
    catalog = catalogs(asked_for)[0]
    worker = offers_of(catalog)(catalog.degrees(1)[0], True)
    found = planned(pair_of((worker, 1), (worker, 1), catalog.hardware), asked_for)
    text, refusal, notes = cluster_spec(found, asked_for)
    assert (refusal, notes) == ("", ())
    pools = parse_spec(yaml.safe_load(text)).pools
    assert [(pool.threads, pool.num_gpus) for pool in pools] == [(1, 0)] * 2
    assert "on two cores of a Zen 5 server CPU" in answer(found)[0]


@pytest.mark.parametrize("name", arrangements())
def test_each_is_verified_as_it_was_planned(name: str, tmp_path: Path) -> None:
    candidate, asked_for = arrangements()[name], request(tmp_path)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_object(planned(candidate, asked_for))))
    claim = verifying.of_plan(path, {"num_prompts": 5})
    roles = [pool.role for pool in candidate.pools for _ in range(pool.replicas)]
    assert [worker.role for worker in claim.cluster.workers] == roles
    assert claim.doubt.client_s == read_profile(asked_for.profile[0]).client_s


def test_a_profile_is_of_one_model(tmp_path: Path) -> None:
    """Of the demo's, in whatever dtype; a tower for images is in what was measured, not in what a config counts."""
    asked_for = request(tmp_path)
    counted = load_shape(MODEL).num_params
    for num_params in (counted, int(1.1 * counted), None):
        for path in asked_for.profile:
            known = read_profile(path)
            write_profile(replace(known, model={**known.model, "num_params": num_params}), path)
        assert catalogs(asked_for)
        pair = parse_spec({"model": MODEL, "pools": [{"role": "prefill"}, {"role": "decode"}]})
        assert source_of(pair, hardware=None, profile=asked_for.profile[0], model=None).shape
    for path in asked_for.profile:
        known = read_profile(path)
        write_profile(replace(known, model={**known.model, "num_params": 5_048_576}), path)
    says = (
        r"^model is kvrelay-demo-125m, of 124,668,672 parameters, and pair.json was measured of a-model, of 5,048,576; "
    )
    with pytest.raises(PlanError, match=says):
        catalogs(asked_for)
    with pytest.raises(PlanError, match=says):
        source_of(pair, hardware=None, profile=asked_for.profile[0], model=None)
    assert catalogs(asked_for.model_copy(update={"model": None}))
    assert catalogs(asked_for.model_copy(update={"model": "somebody/a-model"})), "no config tells of it"


def test_cores_have_no_price_of_gpus(tmp_path: Path) -> None:
    asked_for = request(tmp_path)
    priced = catalogs(asked_for.model_copy(update={"hardware": ("cpu-generic",)}))[0]
    assert priced.cost == load_hardware("cpu-generic").cost()
    says = "^hardware is NVIDIA H100 SXM 80 GB, whose price is a GPU's, and pair.json is of workers on cores; give a"
    with pytest.raises(PlanError, match=says):
        catalogs(asked_for.model_copy(update={"hardware": ("h100-sxm",)}))


def test_profiles_are_named_by_a_flag_each_or_by_a_list_in_a_file(tmp_path: Path) -> None:
    by_flags = request(tmp_path)
    assert [path.name for path in by_flags.profile] == ["pair.json", "both.json"]
    lines = [line.strip(" \\") for line in command_of(by_flags).splitlines()]
    assert [line for line in lines if line.startswith("--profile")] == [
        f"--profile {path}" for path in by_flags.profile
    ]
    file = tmp_path / "plan.yaml"
    file.write_text(
        f"profile: [pair.json, both.json]\nmodel: {MODEL}\nnum_gpus: 2\nrandom_input_len: 64\nrandom_output_len: 16\n"
        "ttft: 500ms\ntpot: 50ms\n"
    )
    assert [path.samefile(tmp_path / path.name) for path in build_request(file, {}).profile] == [True, True]
    file.write_text(file.read_text().replace("[pair.json, both.json]", "pair.json"))
    assert [path.name for path in build_request(file, {}).profile] == ["pair.json"]
