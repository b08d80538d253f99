"""From a spec to the simulator: every key that the live system gives its policies arrives there, none is made up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.router.options import RouterOptions
from cluster.spec.load import load_spec, parse_spec
from cluster.spec.model import ClusterSpec
from cluster.spec.resolve import Machine, resolve, workers_of
from engine.knobs import knobs_of
from mixed_worker.options import MixedOptions
from placement.build import from_spec
from placement.build.from_spec import mixed_spec, sim_cluster
from placement.build.sources import ProfileWorkers, RooflineWorkers, shape_in
from placement.catalogs.base import PlanError
from placement.catalogs.guesses import guesses_by
from placement.latency.base import decode_s
from placement.latency.hardware import load_hardware
from placement.latency.model_files import load_shape
from placement.latency.model_shape import ModelShape
from placement.latency.profile import DecodePoint, Fault, MixedPoint, PoolFacts, PrefillPoint, Profile, TransferPoint
from placement.latency.speculation import Speculation
from placement.simulator.simulate import simulate
from placement.workload.requests import from_rows
from worker.options import REPORT_GAP_S, report_gap_s

unit = pytest.mark.unit
CONFIGS = Path(__file__).resolve().parents[3] / "configs"
ODD: dict[str, Any] = {  # no value is a default
    "model": "llama-3.1-8b",
    "page_size": 32,
    "router": {
        "max_queued_requests": 11,
        "max_queued_tokens": 2222,
        "max_backlog_tokens": 3333,
        "overcommit": 0.5,
        "max_passes": 3,
        "dead_after_s": 3.0,
        "lost_after_s": 33.0,
        "slow_step_s": 3.5,
        "placement": "splitwise",
        "max_attempts": 7,
        "unavailable_grace_s": 1.5,
        "slo_ttft_ms": 444.0,
        "slo_tpot_ms": 55.0,
        "kv_window_tokens": 256,
        "kv_sink_tokens": 16,
        "kv_heavy_tokens": 64,
        "refuse_late": True,
    },
    "pools": [
        {
            "role": "prefill",
            "replicas": 2,
            "max_batch_tokens": 1000,
            "max_prefill_requests": 7,
            "pack_tokens": 99,
            "short_prompt_tokens": 55,
            "short_share": 0.25,
            "prefix_cache": False,
        },
        {
            "role": "mixed",
            "max_batch_tokens": 900,
            "max_prefill_requests": 6,
            "pack_tokens": 98,
            "short_prompt_tokens": 54,
            "short_share": 0.3,
            "max_batch_size": 8,
            "admission": "worst_case",
            "watermark": 0.2,
            "num_speculative_tokens": 3,
            "speculative_model": "small",
            "prompt_lookup_min": 3,
            "prompt_lookup_max": 6,
            "chunk_tokens": 77,
        },
        {"role": "decode", "name": "tokens", "max_batch_size": 9, "admission": "worst_case", "watermark": 0.1}
        | {"num_speculative_tokens": 2, "speculative_model": "small", "prompt_lookup_min": 1, "prompt_lookup_max": 5},
    ],
}
WORKLOAD = from_rows([[0.1 * i, 300 + i, 20] for i in range(40)])


def roofline(hardware: str = "h200-sxm", model: str = "llama-3.1-8b") -> RooflineWorkers:
    return RooflineWorkers(load_shape(model), load_hardware(hardware))


def profile(**changes: Any) -> Profile:
    chunks = ((128, 0), (512, 0), (512, 512))
    options: dict[str, Any] = {
        "model": {"name": "demo"},
        "machine": {"cpu": "a CPU"},
        "date": "2026-11-21",
        "commit": "none",
        "page_size": 16,
        "prefill_pool": PoolFacts(count=1, num_pages=500),
        "decode_pool": PoolFacts(count=1, num_pages=700),
        "prefill": tuple(PrefillPoint(chunks=(c,), seconds=c[0] * 3e-4 + c[1] * 1e-5) for c in chunks),
        "decode": tuple(
            DecodePoint(batch_size=b, context_tokens=b * c, seconds=0.01 + b * 1e-3 + c * 1e-6)
            for b in (1, 8)
            for c in (100, 900)
        ),
        "transfer": (TransferPoint(tokens=100, bytes=1000, seconds=0.001, exposed_s=0.001),),
        "prefill_overhead_s": 0.002,
        "message_s": 0.0007,
        "error": Fault(prefill=0.05, decode=0.08),
    }
    return Profile(**(options | changes))


def spec(**changes: Any) -> ClusterSpec:
    return parse_spec({"model": "llama-3.1-8b", "pools": [{"role": "prefill"}, {"role": "decode"}]} | changes)


def test_every_limit_is_what_the_live_worker_and_router_make_of_the_same_spec() -> None:
    odd = parse_spec(ODD)
    resolved = resolve(odd, Machine(cores=(0, 1), memory_bytes=8 << 30))
    cluster = sim_cluster(odd, roofline())
    live = {plan.options.name: plan.options for plan in workers_of(resolved)}
    assert {worker.name for worker in cluster.workers} == set(live)
    for worker in cluster.workers:
        options = live[worker.name]
        assert (worker.role, worker.prefix_cache) == (options.role, options.prefix_cache)
        assert worker.policy == options.policy
    assert cluster.router == odd.router.options(RouterOptions)


@unit
def test_no_limit_of_a_policy_is_left_at_its_default() -> None:
    """A knob that is added to a policy must be added here, too."""
    cluster = sim_cluster(parse_spec(ODD), roofline())
    prefill, _, mixed, decode = cluster.workers
    for options in (cluster.router, prefill.policy, mixed.policy, decode.policy):
        for name, knob in knobs_of(type(options)).items():
            assert getattr(options, name) != knob.default, name
    assert (prefill.page_size, prefill.prefix_cache) == (32, False)
    assert [worker.name for worker in cluster.workers] == ["prefill-0", "prefill-1", "mixed-0", "tokens-0"]


def test_reports_come_as_often_as_live_workers_send_them() -> None:
    assert sim_cluster(spec(), roofline()).report_gap_s == REPORT_GAP_S
    many = report_gap_s(2000)
    pools = [{"role": "prefill", "replicas": 1000}, {"role": "decode", "replicas": 1000}]
    assert sim_cluster(spec(pools=pools), roofline()).report_gap_s == many > 10 * REPORT_GAP_S


@unit
def test_layer_groups_are_those_that_a_handoff_is_cut_into() -> None:
    assert sim_cluster(spec(), roofline()).layer_groups == 8
    cut = spec(transfer={"layers_per_group": 5})
    assert sim_cluster(cut, roofline()).layer_groups == 7
    small = sim_cluster(spec(), roofline("cpu-generic", "kvrelay-demo-tiny"))
    assert 1 <= small.layer_groups <= 4


@unit
def test_pages_are_of_the_memory_that_is_given_or_left() -> None:
    given = sim_cluster(spec(pools=[{"role": "prefill", "kv_memory": "1GiB"}, {"role": "decode"}]), roofline())
    assert given.workers[0].num_pages == 2**30 // (16 * 131_072)
    assert given.workers[1].num_pages > 50_000
    too_much = spec(pools=[{"role": "prefill", "kv_memory": "200GB"}, {"role": "decode"}])
    with pytest.raises(PlanError, match=r"pools\[0\].kv_memory is 200000000000; beside the weights .* so give that"):
        sim_cluster(too_much, roofline())
    too_little = spec(pools=[{"role": "prefill"}, {"role": "decode", "kv_memory": 1000}])
    with pytest.raises(PlanError, match=r"pools\[1\].kv_memory is 1000, less than one page; give at least 2097152"):
        sim_cluster(too_little, roofline())


@unit
def test_what_is_kept_in_fewer_bits_takes_and_reads_less() -> None:
    def workers(**changes: Any) -> tuple[int, float, float]:
        """Pages in 1 GiB, seconds of a decode step alone, and of one behind much KV."""
        narrow = {"kv_dtype": changes.pop("kv_dtype", "auto")}
        pools = [{"role": "prefill", **narrow}, {"role": "decode", "kv_memory": "1GiB", **narrow}]
        worker = sim_cluster(spec(pools=pools, **changes), roofline()).workers[1]
        return worker.num_pages, decode_s(worker.latency, 8, 128), decode_s(worker.latency, 8, 8 * 4096)

    pages, alone_s, behind_s = workers()
    half = workers(kv_dtype="int8")  # 64 KiB of numbers and 2 KiB of scales for a token
    assert half[0] == 2**30 // (16 * 67_584)
    assert workers(kv_dtype="fp8_e4m3")[0] == 2 * pages
    assert half[2] - half[1] < 0.6 * (behind_s - alone_s)
    weights = workers(quantization="int8")
    assert weights[0] == pages
    assert weights[1] < 0.75 * alone_s


@unit
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_quantised_checkpoint_is_simulated_as_it_is_served(quantization: str) -> None:
    def served(shape: ModelShape) -> ModelShape:
        made = spec(quantization=quantization)
        return shape_in(made.pools[1], made, shape)

    shape = load_shape("llama-3.1-8b")
    assert served(replace(shape, weight_bits=4.25, quantisation="mxfp4")) == served(shape)
    assert served(shape).weight_bits == {"none": 16, "int8": 8}[quantization]


@unit
def test_a_worker_that_cannot_be_names_its_pool() -> None:
    with pytest.raises(PlanError, match=r"pools\[0\] \(prefill\): llama-3.1-70b, 141 GB of weights, does not fit"):
        sim_cluster(spec(), roofline("h100-sxm", "llama-3.1-70b"))


@unit
def test_pools_beyond_one_node_send_their_kv_between_nodes() -> None:
    near = sim_cluster(spec(), roofline()).workers[0].latency
    wide = spec(pools=[{"role": "prefill", "replicas": 8}, {"role": "decode"}])
    far = sim_cluster(wide, roofline()).workers[0].latency
    assert far.transfer_s(1000) == pytest.approx(9 * near.transfer_s(1000))


@unit
def test_a_profile_gives_its_pages_its_overheads_and_its_error() -> None:
    source = ProfileWorkers(profile())
    cluster = sim_cluster(spec(), source)
    assert [worker.num_pages for worker in cluster.workers] == [500, 700]
    assert [worker.step_overhead_s for worker in cluster.workers] == [0.0, 0.0]
    assert cluster.workers[0].latency.prefill_s([(128, 0)]) == pytest.approx(128 * 3e-4 + 0.002)
    assert cluster.message_s == 0.0007
    assert from_spec.latency_error(spec(), source) == 0.08
    shaped = ProfileWorkers(profile(), load_shape("kvrelay-demo-125m"))
    sized = spec(pools=[{"role": "prefill", "kv_memory": "64MiB"}, {"role": "decode"}])
    assert sim_cluster(sized, shaped).workers[0].num_pages == 2**26 // (16 * 12 * 2 * 4 * 64 * 2)


def guessing(model: str = "", **keys: Any) -> ClusterSpec:
    ahead = {"num_speculative_tokens": 4} | ({"speculative_model": model} if model else {})
    return spec(pools=[{"role": "prefill"}, {"role": "decode", **ahead, **keys}])


@unit
def test_a_draft_model_takes_its_share_of_memory_and_has_times_of_its_own() -> None:
    """It is loaded whole beside the model, and has as many pages (engine/loading/load.py). Here both are alike."""
    shape, hardware = load_shape("llama-3.1-8b"), load_hardware("h200-sxm")
    source = RooflineWorkers(shape, hardware, 0.7)
    plain, looked_up, drafted = (
        sim_cluster(made, source).workers[1] for made in (spec(), guessing(), guessing("llama-3.1-8b"))
    )
    assert plain.speculation is None
    assert looked_up.speculation == Speculation(num_tokens=4, acceptance=0.7)
    assert looked_up.num_pages == plain.num_pages
    assert drafted.speculation is not None
    assert drafted.speculation.draft is not None
    assert decode_s(drafted.speculation.draft, 1, 500) == decode_s(drafted.latency, 1, 500)
    weights = shape.weight_bytes / (2 * shape.kv_bytes_per_token * 16)
    assert drafted.num_pages == pytest.approx(plain.num_pages / 2 - weights, abs=2)
    asked = sim_cluster(guessing("llama-3.1-8b", kv_memory="8GiB"), source).workers[1]
    assert asked.num_pages == 2**33 // (2 * 16 * shape.kv_bytes_per_token)


@unit
def test_a_quantised_draft_is_served_in_full_width(tmp_path: Path) -> None:
    config = json.loads((CONFIGS / "models" / "llama-3.1-8b.json").read_text())
    packed = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
    (tmp_path / "config.json").write_text(json.dumps(config | packed))
    shape = load_shape("llama-3.1-8b")
    assert guesses_by(str(tmp_path), 4, 0.7, shape).weight_bytes(shape) == shape.weight_bytes


@unit
def test_of_a_profile_a_draft_is_faster_by_as_much_as_it_is_smaller() -> None:
    shape = load_shape("llama-3.1-70b")
    source = ProfileWorkers(profile(), shape, 0.5)
    worker = sim_cluster(guessing("llama-3.1-8b"), source).workers[1]
    assert worker.speculation is not None
    assert worker.speculation.draft is not None
    assert decode_s(worker.speculation.draft, 1, 100) / decode_s(worker.latency, 1, 100) == pytest.approx(
        0.11, abs=0.01
    )
    assert worker.num_pages == int(700 * 80 / (80 + 32))  # layers, of as many heads


@unit
def test_heads_take_memory_and_no_page(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 3, "medusa_num_layers": 1}')
    worker = sim_cluster(guessing(str(tmp_path)), ProfileWorkers(profile(), load_shape("llama-3.1-8b"), 0.5)).workers[1]
    assert worker.speculation is not None
    assert (worker.speculation.num_tokens, worker.speculation.reads, worker.num_pages) == (3, False, 700)
    with pytest.raises(PlanError, match="speculative_model has heads, which run on CPUs only, and not on NVIDIA H200"):
        sim_cluster(
            guessing(str(tmp_path)), RooflineWorkers(load_shape("llama-3.1-8b"), load_hardware("h200-sxm"), 0.5)
        )


@unit
@pytest.mark.parametrize(
    ("model", "acceptance", "told"),
    [
        (
            "qwen3-0.6b",
            0.5,
            "speculative_model is 'qwen3-0.6b', which has 151936 tokens; llama-3.1-8b has 128256: give",
        ),
        ("nobody", 0.5, "speculative_model is 'nobody', which is no directory and no config.json; "),
        ("", 1.5, "acceptance_rate is 1.5; give the chance of a guess to be right, from 0 to 1"),
        ("llama-3.1-70b", 0.5, r"pools\[1\].speculative_model leaves no room for KV on NVIDIA H200"),
    ],
)
def test_guesses_that_cannot_be_are_refused(model: str, acceptance: float, told: str) -> None:
    with pytest.raises(PlanError, match=f"^{told}"):
        sim_cluster(guessing(model), RooflineWorkers(load_shape("llama-3.1-8b"), load_hardware("h200-sxm"), acceptance))


@unit
def test_guesses_of_which_nothing_is_said_are_not_simulated_and_that_is_said() -> None:
    made = guessing("small")
    assert [worker.speculation for worker in sim_cluster(made, roofline()).workers] == [None, None]
    assert from_spec.not_simulated(made)[0].startswith("decode would guess tokens ahead, but how often they are right")
    assert from_spec.not_simulated(made, 0.5) == []


@unit
def test_a_profile_of_other_workers_is_refused() -> None:
    with pytest.raises(PlanError, match="page_size is 32, but profile was measured with 16; give 16"):
        sim_cluster(spec(page_size=32), ProfileWorkers(profile()))
    with pytest.raises(PlanError, match=r"has TP 1, but profile was measured at TP 2; calibrate"):
        sim_cluster(spec(), ProfileWorkers(profile(tp=2)))
    threads = [{"role": "prefill", "threads": 1}, {"role": "decode", "threads": 2}]
    with pytest.raises(
        PlanError, match=r"pools\[1\].threads is 2, but profile was measured with 1; calibrate a cluster"
    ):
        sim_cluster(spec(pools=threads), ProfileWorkers(profile(threads=1)))
    point = MixedPoint(chunks=((8, 0),), batch_size=1, context_tokens=9, seconds=0.1)
    with pytest.raises(
        PlanError, match=r"pools\[0\] \(prefill\) hands KV over, which profile, of a mixed worker, did not"
    ):
        sim_cluster(spec(), ProfileWorkers(profile(mixed=(point,))))


@unit
@pytest.mark.parametrize("source", [roofline(), ProfileWorkers(profile())], ids=["roofline", "profile"])
@pytest.mark.parametrize("roles", [("prefill", "decode"), ("mixed",), ("prefill", "mixed")], ids="+".join)
def test_what_comes_out_serves_every_request(source: Any, roles: tuple[str, ...]) -> None:
    outcome = simulate(sim_cluster(spec(pools=[{"role": role} for role in roles]), source), WORKLOAD)
    assert outcome.served == len(WORKLOAD)


@unit
def test_mixed_workers_are_as_many_and_hold_what_a_decode_worker_holds() -> None:
    prefill = {"role": "prefill", "replicas": 2, "max_batch_tokens": 700}
    two = spec(pools=[prefill, {"role": "decode", "max_batch_size": 9, "name": "tokens"}])
    workers = sim_cluster(mixed_spec(two), roofline()).workers
    assert [worker.role for worker in workers] == ["mixed"] * 3
    assert isinstance(workers[0].policy, MixedOptions)
    assert (workers[0].policy.max_batch_tokens, workers[0].policy.max_batch_size) == (700, 9)
    alone = sim_cluster(two, roofline()).workers[-1].num_pages
    assert 0.99 * alone < workers[0].num_pages < alone, "its steps hold prompts, too"


@unit
def test_what_is_left_out_is_said() -> None:
    said = from_spec.not_simulated(spec(router={"replicas": 2}, max_model_len=4096))
    assert [sentence.split(" is ")[0] for sentence in said] == ["max_model_len"]
    assert sim_cluster(spec(router={"replicas": 2}), roofline()).num_routers == 2
    assert from_spec.not_simulated(spec()) == []


@unit
@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_spec_that_comes_with_kvrelay_can_be_simulated(path: Path) -> None:
    found = load_spec(path)
    cluster = sim_cluster(found, roofline("cpu-generic", "kvrelay-demo-125m"))
    assert len(cluster.workers) == sum(pool.replicas for pool in found.pools)
