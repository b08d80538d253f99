"""A spec: what it takes, what it refuses and in which words, and what it becomes on a given machine."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.deploy import gpus
from cluster.spec.errors import SpecError
from cluster.spec.load import load_spec, parse_spec
from cluster.spec.resolve import Machine, resolve, workers_of
from cluster.usage.options import UsageOptions, UsageUrl
from worker.wire.private_files import state_folder

pytestmark = pytest.mark.unit


def spec_data(**changes: Any) -> dict[str, Any]:
    return {"model": "./model", "pools": [{"role": "prefill"}, {"role": "decode"}], **changes}


def pools(prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    return [{"role": "prefill", **(prefill or {})}, {"role": "decode", **(decode or {})}]


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"pools": pools()}, "model is missing; give it a value"),
        ({"modle": "m", "pools": pools()}, "modle is not a known key; did you mean model?"),
        (
            spec_data(router={"accounts": {"chat": {"request_per_minute": 3}}}),
            "router.accounts.chat.request_per_minute is not a known key; "
            "did you mean router.accounts.chat.requests_per_minute?",
        ),
        (
            spec_data(router={"accounts": {"chat": {"weight": 0}}}),
            "router.accounts.chat.weight is 0; give a number of 0.01 or more",
        ),
        (
            spec_data(replan="act"),
            "replan is act, and router has no targets; give slo_ttft_ms, slo_tpot_ms or both",
        ),
        (
            spec_data(replan_attainment=0.8),
            "replan_attainment is given, and replan is off; make it advise or act",
        ),
        (
            spec_data(replan="act", replan_attainment=1, router={"slo_ttft_ms": 500}),
            "replan_attainment is 1; give a number below 1.0",
        ),
        (
            spec_data(replan="act", replan_policy="distserve", replan_most_devices=8, router={"slo_ttft_ms": 500}),
            "replan_most_devices is given, and replan_policy is distserve, which has no rule for fewer devices; take "
            "one of them out",
        ),
        (
            spec_data(replan_most_devices=8),
            "replan_most_devices is given, and replan is off; make it advise or act",
        ),
        (spec_data(port=1), "port is not a known key here; did you mean router.port?"),
        (spec_data(kv_dtype="int8"), "kv_dtype is not a known key here; did you mean pools[].kv_dtype?"),
        (spec_data(router={"prot": 1}), "router.prot is not a known key; did you mean router.port?"),
        (spec_data(pools=pools({"thread": 1})), "pools[0].thread is not a known key; did you mean pools[0].threads?"),
        (spec_data(router={"replicas": 0}), "router.replicas is 0; give a number of 1 or more"),
        (spec_data(pools=pools({"replicas": True})), "pools[0].replicas is True; give a number"),
        (spec_data(max_model_len=True), "max_model_len is True; give a number"),
        (spec_data(router={"port": 70000}), "router.port is 70000; give a number of 65535 or less"),
        (spec_data(router=[]), "router is []; give keys and values, indented under it"),
        (spec_data(model=""), "model is ''; give text"),
        (spec_data(pools={}), "pools is {}; give a list"),
        (spec_data(pools=[]), "pools is []; give one or more"),
        (spec_data(pools=[{"role": "both"}]), "pools[0].role is 'both'; give 'prefill', 'decode' or 'mixed'"),
        (spec_data(pools=[{"role": ["decode"]}]), "pools[0].role is ['decode']; give 'prefill', 'decode' or 'mixed'"),
        (
            spec_data(pools=pools({"watermark": 0.1, "max_batch_size": 2, "admission": "watermark"})),
            "pools[0].max_batch_size is for decode and mixed pools; take it out of this prefill pool",
        ),
        (
            spec_data(pools=[{"role": "mixed", "speculative_model": "small"}]),
            "pools[0].speculative_model is 'small' with num_speculative_tokens 0; "
            "give how many tokens it guesses, or take it out",
        ),
        (spec_data(dtype="int8"), "dtype is 'int8'; give 'auto', 'float32' or 'bfloat16'"),
        (spec_data(max_model_len="long"), "max_model_len is 'long'; give a whole number"),
        (
            spec_data(pools=pools({"kv_memory": "1 GBit"})),
            "pools[0].kv_memory is '1 GBit'; give a size such as 512MiB, 2GiB or a number of bytes",
        ),
        (
            spec_data(pools=pools({"kv_memory": 0})),
            "pools[0].kv_memory is 0; give auto, or a size such as 512MiB or 2GiB",
        ),
        (spec_data(pools=pools({"threads": 0})), "pools[0].threads is 0; give auto or a whole number from 1 to 1024"),
        (
            spec_data(pools=pools({"threads": 9999})),
            "pools[0].threads is 9999; give auto or a whole number from 1 to 1024",
        ),
        (
            spec_data(pools=pools(decode={"tensor_parallel": 0})),
            "pools[1].tensor_parallel is 0; give a whole number of 1 or more",
        ),
        (
            spec_data(pools=pools({"pipeline_parallel": "2"})),
            "pools[0].pipeline_parallel is '2'; give a whole number of 1 or more",
        ),
        (
            spec_data(pools=pools({"tensor_parallel": 2, "cpus": [0, 1, 2]})),
            "pools[0].cpus is [0, 1, 2]; give a number of cores that 1 replicas of 2 processes each can share",
        ),
        (
            spec_data(pools=pools({"kv_dtype": "fp8_e4m3", "tensor_parallel": 2}, {"kv_dtype": "fp8_e4m3"})),
            "pools[0].kv_dtype is 'fp8_e4m3' with tensor_parallel 2; give one of the two",
        ),
        (
            spec_data(pools=pools({"kv_dtype": "fp8_e4m3", "pipeline_parallel": 2}, {"kv_dtype": "fp8_e4m3"})),
            "pools[0].kv_dtype is 'fp8_e4m3' with pipeline_parallel 2; give one of the two",
        ),
        (
            spec_data(pools=pools(decode={"expert_parallel": True})),
            "pools[1].expert_parallel is true with tensor_parallel 1, whose one process has all experts; "
            "give tensor_parallel 2 or more, or take it out",
        ),
        (
            spec_data(pools=pools({"num_gpus": 4, "tensor_parallel": 2})),
            "pools[0].num_gpus is 4; give 2 or less",
        ),
        (
            spec_data(pools=pools({"max_batch_size": 4})),
            "pools[0].max_batch_size is for decode and mixed pools; take it out of this prefill pool",
        ),
        (
            spec_data(pools=pools({"replicas": 2, "cpus": [0, 1, 2]})),
            "pools[0].cpus is [0, 1, 2]; give a number of cores that 2 replicas can share",
        ),
        (
            spec_data(pools=[{"role": "decode"}]),
            "pools has none that computes prefill; add one with role prefill, or mixed",
        ),
        (
            spec_data(pools=[*pools(), {"role": "decode"}]),
            "pools has 2 pools named decode; give each a name of its own",
        ),
        (
            spec_data(transfer={"transports": ["rdma"]}),
            "transfer.transports is ['rdma']; 'rdma' is no transport; "
            "give some of cuda_ipc, shared_memory, tcp, process_group",
        ),
        (
            spec_data(name="My Cluster"),
            "name is 'My Cluster'; give small letters, digits and -, at most 40, such as chat-1",
        ),
        (
            spec_data(router={"port": 65535, "replicas": 2}),
            "router.port is 65535, too high for 2 replicas with a port each; give 65534 or less",
        ),
        (["model"], "the spec is ['model']; give keys and values such as model: DIR"),
    ],
)
def test_a_mistake_is_one_sentence_with_key_value_and_mend(data: object, sentence: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(data)
    assert caught.value.sentences == (sentence,)


def test_every_mistake_is_named_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(spec_data(dtyp="auto", router={"port": "x"}))
    assert caught.value.sentences == (
        "router.port is 'x'; give a whole number",
        "dtyp is not a known key; did you mean dtype?",
    )


@pytest.mark.parametrize(
    ("text", "nbytes"), [("1GiB", 1 << 30), ("1.5 GiB", 3 << 29), ("100MB", 100_000_000), ("4096", 4096), (7, 7)]
)
def test_sizes_are_read_as_people_write_them(text: str | int, nbytes: int) -> None:
    assert parse_spec(spec_data(pools=pools({"kv_memory": text}))).pools[0].kv_memory == nbytes


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("model: [", "is not YAML: line"),
        ("model: a\nname: x\nmodel: b\n", "says model twice, again in line 3; keep one of them"),
        ("model: a\nmax_model_len: 1:30\npools: [{role: mixed}]", "max_model_len is '1:30'; give a whole number"),
        ("", "the spec is None; give keys and values such as model: DIR"),
    ],
)
def test_a_file_that_is_no_spec_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    with pytest.raises(SpecError, match=problem.replace("[", r"\[")):
        load_spec(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"nothing\.yaml cannot be read: No such file or directory"):
        load_spec(tmp_path / "nothing.yaml")


def test_a_relative_model_is_found_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "spec.yaml").write_text("model: ./model\npools: [{role: prefill}, {role: decode}]\n")
    assert load_spec(tmp_path / "spec.yaml").model == str(tmp_path / "model")


CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_the_shipped_specs_are_good(path: Path) -> None:
    assert load_spec(path).pools


def test_cores_are_shared_out_and_pinned_when_they_suffice() -> None:
    spec = parse_spec(spec_data(pools=pools({"replicas": 2}, {"replicas": 2})))
    plans = workers_of(resolve(spec, Machine(cores=tuple(range(10, 18)), memory_bytes=8 << 30)))
    assert [(plan.name, plan.cpus, plan.engine["threads"]) for plan in plans] == [
        ("prefill-0", (10, 11), 2),
        ("prefill-1", (12, 13), 2),
        ("decode-0", (14, 15), 2),
        ("decode-1", (16, 17), 2),
    ]


def test_too_few_cores_are_not_pinned() -> None:
    plans = workers_of(resolve(parse_spec(spec_data()), Machine(cores=(0,), memory_bytes=8 << 30)))
    assert [(plan.cpus, plan.engine["threads"]) for plan in plans] == [((), 1), ((), 1)]


def test_cores_of_which_a_container_has_a_part_are_not_pinned_to() -> None:
    """Each container would be pinned to the same first ones."""
    machine = Machine(cores=tuple(range(64)), memory_bytes=4 << 30, core_limit=4)
    plans = workers_of(resolve(parse_spec(spec_data()), machine))
    assert [(plan.cpus, plan.engine["threads"]) for plan in plans] == [((), 2), ((), 2)]


def test_workers_tell_in_how_few_bits_they_hold_numbers() -> None:
    data = spec_data(quantization="int8", pools=pools({"kv_dtype": "int8"}, {"kv_dtype": "int8"}))
    machine = Machine(cores=(0,), memory_bytes=8 << 30)
    plain, narrow = (workers_of(resolve(parse_spec(each), machine))[0].options.limits for each in (spec_data(), data))
    assert (narrow["quantization"], narrow["kv_dtype"]) == ("int8", "int8")
    assert not {"quantization", "kv_dtype"} & plain.keys()


def test_cores_that_are_named_are_kept_from_the_others() -> None:
    spec = parse_spec(spec_data(pools=pools({"threads": 1}, {"cpus": [0], "threads": 1})))
    plans = workers_of(resolve(spec, Machine(cores=(0, 1), memory_bytes=8 << 30)))
    assert [plan.cpus for plan in plans] == [(1,), (0,)]


def test_a_core_that_the_machine_lacks_is_refused() -> None:
    spec = parse_spec(spec_data(pools=pools({"cpus": [7]})))
    with pytest.raises(SpecError, match=r"pools\[0\]\.cpus has 7; this machine has the cores 0, 1"):
        resolve(spec, Machine(cores=(0, 1), memory_bytes=8 << 30))


def test_a_joined_cluster_is_not_pinned_and_takes_its_threads_from_num_cpus() -> None:
    spec = parse_spec(spec_data(pools=pools({"num_cpus": 8})))
    resolved = resolve(spec, None, node_host="10.0.0.1")
    assert resolved.router.host == "10.0.0.1"
    assert [(plan.cpus, plan.engine["threads"]) for plan in workers_of(resolved)] == [((), 8), ((), 1)]


def test_what_is_written_reaches_the_workers() -> None:
    data = spec_data(
        page_size=32,
        pools=pools({"max_batch_tokens": 77}, {"max_batch_size": 3, "admission": "worst_case", "kv_memory": "1MiB"}),
        transfer={"transports": ["process_group"], "checksums": False, "timeout_s": 2},
    )
    prefill, decode = workers_of(resolve(parse_spec(data), None))
    assert prefill.options.policy.max_batch_tokens == 77
    policy = decode.options.policy
    assert (policy.max_batch_size, policy.admission) == (3, "worst_case")
    assert (decode.options.transfer.transports, decode.options.transfer.checksums) == (("process_group",), False)
    assert (decode.engine["page_size"], decode.engine["kv_bytes"]) == (32, 1 << 20)
    assert decode.options.transfer.timeout_s == 2


# GPUs

CPUS = Machine(cores=(0, 1), memory_bytes=8 << 30)
GPUS = Machine(cores=tuple(range(8)), memory_bytes=64 << 30, gpus=1, why_no_cuda="")
NO_CUDA = "the torch that is installed was built without CUDA; install kvrelay[gpu]"


def with_gpus(count: int) -> Machine:
    return replace(GPUS, gpus=count)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (
            spec_data(pools=pools({"attention": "flashinfer", "device": "cpu"})),
            "pools[0].attention is 'flashinfer', which wants a GPU; give device: cuda, or auto",
        ),
        (
            spec_data(pools=pools({"attention": "native", "device": "cuda"})),
            "pools[0].attention is 'native', which is for CPUs; give flashinfer or auto with device: cuda",
        ),
        (
            spec_data(pools=pools({"attention": "native", "kv_dtype": "fp8_e4m3"})),
            "pools[0].attention is 'native', which does not read kv_dtype fp8_e4m3; give attention: flashinfer",
        ),
        (
            spec_data(pools=pools({"kv_dtype": "fp8_e4m3"})),
            "pools[1].kv_dtype is 'auto', but pools[0].kv_dtype is 'fp8_e4m3'; give both the same, "
            "for KV is handed over as it is",
        ),
        (
            spec_data(pools=pools({"device": "cuda"}, {"device": "cpu"})),
            "pools[1].device is 'cpu', but pools[0].device is 'cuda'; give both the same, "
            "for KV is handed over as it is",
        ),
        (
            spec_data(pools=pools({"device": "cpu", "num_gpus": 0.5})),
            "pools[0].num_gpus is 0.5 with device: cpu; take one of them out",
        ),
        (
            spec_data(pools=pools(decode={"device": "cpu", "cuda_graphs": False})),
            "pools[1].cuda_graphs is for GPUs; take it out of this pool with device: cpu",
        ),
        (spec_data(pools=pools({"num_gpus": 2})), "pools[0].num_gpus is 2; give 1 or less"),
        (
            spec_data(pools=pools({"gpu_memory_utilization": 1.5})),
            "pools[0].gpu_memory_utilization is 1.5; give auto, or a share above 0 and up to 1, such as 0.45",
        ),
        (
            spec_data(pools=pools({"device": "cuda"}), transfer={"transports": ["shared_memory"]}),
            "transfer.transports is ['shared_memory'], and none of them moves KV with device: cuda; "
            "add cuda_ipc or process_group",
        ),
        (
            spec_data(transfer={"nccl": {"UCX_TLS": "all"}}),
            "transfer.nccl is {'UCX_TLS': 'all'}; 'UCX_TLS' is no setting of NCCL's; "
            "give keys that begin with NCCL_ or TORCH_NCCL_",
        ),
    ],
)
def test_what_cannot_be_with_or_without_a_gpu_is_one_sentence(data: object, sentence: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(data)
    assert caught.value.sentences == (sentence,)


@pytest.mark.parametrize("changes", [{"device": "cuda"}, {"num_gpus": 1}, {"attention": "flashinfer"}])
def test_a_gpu_that_is_wanted_and_cannot_be_used_is_told_with_the_mend(changes: dict[str, Any]) -> None:
    spec = parse_spec(spec_data(pools=pools(changes)))
    with pytest.raises(SpecError) as caught:
        resolve(spec, replace(GPUS, why_no_cuda=NO_CUDA))
    assert str(caught.value) == f"pools[0] (prefill) is to run on a GPU, but {NO_CUDA}"


@pytest.mark.parametrize(
    ("machine", "data", "wanted"),
    [
        (GPUS, pools(), "cuda"),
        (replace(GPUS, why_no_cuda=NO_CUDA), pools(), "cpu"),
        (replace(GPUS, gpus=0, why_no_cuda="none"), pools(), "cpu"),
        (GPUS, pools(decode={"attention": "native"}), "cpu"),
        (GPUS, pools({"device": "cpu"}), "cpu"),
        (None, pools(), "cpu"),
        (None, pools({"num_gpus": 1}), "cuda"),
    ],
)
def test_which_device_auto_is(machine: Machine | None, data: list[dict[str, Any]], wanted: str) -> None:
    resolved = resolve(parse_spec(spec_data(pools=data)), machine)
    assert [plan.engine["device"] for plan in workers_of(resolved)] == [wanted, wanted]


@pytest.mark.parametrize(
    ("gpus", "prefill", "decode", "share", "utilization"),
    [(1, 1, 1, 0.5, 0.45), (2, 1, 1, 1.0, 0.9), (8, 4, 4, 1.0, 0.9), (2, 2, 1, 0.5, 0.45)],
)
def test_gpus_are_shared_out(gpus: int, prefill: int, decode: int, share: float, utilization: float) -> None:
    spec = parse_spec(spec_data(pools=pools({"replicas": prefill}, {"replicas": decode})))
    for plan in workers_of(resolve(spec, with_gpus(gpus))):
        assert (plan.num_gpus, plan.engine["gpu_memory_utilization"]) == (share, utilization)
        assert plan.engine["kv_bytes"] is None


def test_shares_that_were_written_are_kept() -> None:
    data = pools({"num_gpus": 0.25, "kv_memory": "1GiB"}, {"num_gpus": 0.75, "gpu_memory_utilization": 0.6})
    prefill, decode = workers_of(resolve(parse_spec(spec_data(pools=data)), GPUS))
    assert (prefill.num_gpus, prefill.engine["gpu_memory_utilization"], prefill.engine["kv_bytes"]) == (
        0.25,
        0.225,
        1 << 30,
    )
    assert (decode.num_gpus, decode.engine["gpu_memory_utilization"]) == (0.75, 0.6)


def test_gpus_keep_room_for_the_largest_step_of_any_role() -> None:
    data = pools({"max_batch_tokens": 32768}, {})
    for plan in workers_of(resolve(parse_spec(spec_data(pools=data)), GPUS)):
        assert plan.engine["max_step_tokens"] == 32768


def test_more_gpus_than_there_are_is_refused() -> None:
    spec = parse_spec(spec_data(pools=pools({"num_gpus": 1}, {"num_gpus": 1})))
    with pytest.raises(SpecError) as caught:
        resolve(spec, GPUS)
    assert str(caught.value) == (
        "the pools' num_gpus take 2 GPUs in all, and this machine has 1; lower num_gpus, "
        "such as 0.5 for two workers on one GPU"
    )


def test_a_planned_spec_of_any_degrees_resolves_to_a_gpu_for_each_process() -> None:
    degrees = {"tensor_parallel": 2, "num_gpus": 2}, {"tensor_parallel": 4, "pipeline_parallel": 2, "num_gpus": 8}
    planned = resolve(parse_spec(spec_data(pools=pools(*degrees))), with_gpus(10))
    assert [(pool.tensor_parallel, pool.pipeline_parallel) for pool in planned.pools] == [(2, 1), (4, 2)]
    assert [pool.gpu_memory_utilization for pool in planned.pools] == [0.9, 0.9]
    shared_out = resolve(parse_spec(spec_data(pools=pools({"pipeline_parallel": 2}, {}))), with_gpus(3))
    assert [pool.num_gpus for pool in shared_out.pools] == [2, 1]
    engines = [plan.engine for plan in workers_of(planned)]
    assert [(engine["tensor_parallel"], engine["pipeline_parallel"]) for engine in engines] == [(2, 1), (4, 2)]


def test_gpus_that_are_not_as_many_as_processes_and_guesses_in_stages_are_told_before_anything_starts() -> None:
    for decode, machine, wanted in (
        (
            {"tensor_parallel": 2, "pipeline_parallel": 2, "num_gpus": 2},
            with_gpus(8),
            "pools[1].num_gpus is 2 with tensor_parallel 2 and pipeline_parallel 2, whose processes each want a GPU of "
            "their own; give 4, or leave it out",
        ),
        (
            {"pipeline_parallel": 2, "num_speculative_tokens": 4},
            CPUS,
            "pools[1].pipeline_parallel is 2 with num_speculative_tokens 4; give one of the two",
        ),
    ):
        with pytest.raises(SpecError) as caught:
            resolve(parse_spec(spec_data(pools=pools(decode=decode))), machine)
        assert str(caught.value) == wanted


def test_each_process_of_a_worker_gets_a_gpu_and_other_workers_share_what_is_left() -> None:
    data = pools({"tensor_parallel": 2}, {"replicas": 4})
    for machine, alone in ((with_gpus(8), 1.0), (with_gpus(4), 0.5), (None, 1.0)):
        given = pools({"tensor_parallel": 2, "device": "cuda"}, {"replicas": 4, "device": "cuda"})
        prefill, *decode = workers_of(resolve(parse_spec(spec_data(pools=data if machine else given)), machine))
        assert (prefill.num_gpus, prefill.engine["gpu_memory_utilization"]) == (2, 0.9)
        assert prefill.engine["device"] == "cuda"
        assert {plan.num_gpus for plan in decode} == {alone}
    with pytest.raises(SpecError) as caught:
        resolve(parse_spec(spec_data(pools=pools({"tensor_parallel": 2, "num_gpus": 1}))), with_gpus(8))
    assert str(caught.value) == (
        "pools[0].num_gpus is 1 with tensor_parallel 2, whose processes each want a GPU of their own; "
        "give 2, or leave it out"
    )


@pytest.mark.parametrize("key", ["tensor_parallel", "pipeline_parallel"])
def test_the_processes_of_a_worker_share_out_its_cores(key: str) -> None:
    data = spec_data(pools=pools({key: 2}, {"cpus": [2, 3], "kv_memory": "1GiB"}))
    machine = replace(CPUS, cores=(0, 1, 2, 3))
    prefill, decode = workers_of(resolve(parse_spec(data), machine))
    assert (prefill.engine[key], prefill.engine["threads"]) == (2, 1)
    assert (prefill.cpus, prefill.engine["rank_cpus"]) == ((0,), ((0,), (1,)))
    assert (prefill.options.limits[key], prefill.options.limits["threads"]) == ("2", "1")
    assert decode.cpus == (2, 3)
    assert (decode.engine[key], decode.engine["rank_cpus"]) == (1, ())
    joined, _ = workers_of(resolve(parse_spec(spec_data(pools=pools({key: 2, "num_cpus": 8}))), None))
    assert (joined.engine["threads"], joined.cpus, joined.engine["rank_cpus"]) == (4, (), ())


def test_a_workers_options_for_a_gpu_reach_its_engine_and_only_there() -> None:
    data = spec_data(
        pools=pools({"kv_dtype": "fp8_e4m3"}, {"kv_dtype": "fp8_e4m3", "cuda_graphs": False, "max_batch_size": 96}),
        transfer={"nccl": {"NCCL_DEBUG": "WARN", "NCCL_NVLS_ENABLE": 0, "TORCH_NCCL_ENABLE_MONITORING": False}},
    )
    prefill, decode = workers_of(resolve(parse_spec(data), with_gpus(2)))
    assert (prefill.engine["kv_dtype"], prefill.engine["cuda_graphs"]) == ("fp8_e4m3", True)
    assert (decode.engine["cuda_graphs"], decode.engine["max_graph_batch"]) == (False, 96)
    assert decode.options.transfer.nccl == {
        "NCCL_DEBUG": "WARN",
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
    }
    on_cpu = workers_of(resolve(parse_spec(spec_data()), replace(GPUS, gpus=0, why_no_cuda="none")))
    assert "gpu_memory_utilization" not in on_cpu[0].engine


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 4), ("", 0), ("0,2", 2), ("-1", 0), ("GPU-a,GPU-b,-1,GPU-c", 2), ("0,1,2,3,4", 4)]
)
def test_gpus_that_cuda_does_not_show_do_not_count(
    visible: str | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "_nvml_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus.count_gpus() == count


@pytest.mark.parametrize(
    ("shares", "machine_gpus", "taken"),
    [
        ((0.6, 0.6, 0.6), 2, 3),  # 1.8 in sum, but no two of them are on one
        ((0.5, 0.5, 0.5), 1, 2),
        ((0.7, 0.3, 0.3, 0.7), 2, None),
        ((1 / 9,) * 9, 1, None),  # in floats a little more than one
        ((0.4, 0.2, 0.3, 0.1), 1, None),
    ],
)
def test_each_share_is_of_one_gpu(shares: tuple[float, ...], machine_gpus: int, taken: int | None) -> None:
    pools = [
        {"role": "decode" if i else "prefill", "name": f"pool{i}", "num_gpus": share} for i, share in enumerate(shares)
    ]
    spec = parse_spec(spec_data(pools=pools))
    if taken is None:
        assert sum(plan.num_gpus for plan in workers_of(resolve(spec, with_gpus(machine_gpus)))) > 0
        return
    with pytest.raises(SpecError, match=rf"num_gpus take {taken} GPUs in all, and this machine has {machine_gpus};"):
        resolve(spec, with_gpus(machine_gpus))


def test_why_no_gpu_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpus.why_no_cuda(2, "13.0") == ""
    assert gpus.why_no_cuda(0, "13.0").startswith("this machine has no GPU")
    assert gpus.why_no_cuda(1, None) == (
        "the torch that is installed was built without CUDA; "
        "install kvrelay[gpu] (CUDA 13) or kvrelay[gpu-cu12] (CUDA 12.8)"
    )
    monkeypatch.setattr(gpus, "why_too_old", lambda torch_cuda: f"too old for {torch_cuda}")
    assert gpus.why_no_cuda(1, "13.0") == "too old for 13.0"


@pytest.mark.parametrize(
    ("line", "wanted"), [("cuda: Optional[str] = '13.0'", "13.0"), ("cuda = '12.8'", "12.8"), ("cuda = None", None)]
)
def test_the_cuda_of_a_torch_is_read_without_importing_it(
    tmp_path: Path, line: str, wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise AssertionError('it was imported')")
    (tmp_path / "torch" / "version.py").write_text(f"__all__ = ['cuda']\n__version__ = '2.11.0'\n{line}\nhip = '1.0'\n")
    spec = importlib.machinery.PathFinder.find_spec("torch", [str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert gpus.torch_cuda_version() == wanted


@pytest.mark.parametrize(
    ("name", "gpus_there", "num_workers"),
    [("h200-1p1d-one-gpu", 1, 2), ("h200-1p1d", 2, 2), ("h200-2p2d", 4, 4), ("h100-8", 8, 8)],
)
def test_the_specs_for_gpus_fit_the_machines_they_name(name: str, gpus_there: int, num_workers: int) -> None:
    spec = load_spec(CONFIGS / f"{name}.yaml")
    plans = workers_of(resolve(spec, with_gpus(gpus_there)))
    assert len(plans) == num_workers
    assert sum(plan.num_gpus for plan in plans) == gpus_there
    if gpus_there > 1:
        with pytest.raises(SpecError, match="this machine has"):
            resolve(spec, with_gpus(gpus_there - 1))
    on_one = [float(plan.engine["gpu_memory_utilization"]) for plan in plans if plan.num_gpus < 1]
    assert sum(on_one) <= 0.95


@pytest.mark.parametrize(("written", "meant"), [("off", "off"), ('"off"', "off"), ("advise", "advise"), ("act", "act")])
def test_replan_is_off_as_yaml_says_it(tmp_path: Path, written: str, meant: str) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(
        f"model: m\nreplan: {written}\nrouter: {{slo_ttft_ms: 500, slo_tpot_ms: 0}}\n"
        "pools: [{role: prefill}, {role: decode}]\n"
    )
    spec = load_spec(path)
    assert (spec.replan, spec.targets_s) == (meant, {"ttft_s": 0.5})


@pytest.mark.parametrize(
    ("router", "why"),
    [
        (
            {"usage_db": "mysql://me:hush@host/usage"},
            r"mysql://me:\*\*\*@host/usage'; .*the scheme mysql; give postgresql:",
        ),
        ({"prices": {"currency": "EUR", "prompt": 1, "cached": 1}}, "generated"),
        ({"prices": {"currency": "EUR", "prompt": -1, "cached": 1, "generated": 1}}, "prompt"),
    ],
)
def test_where_usage_is_kept_and_its_prices_are_checked(router: dict[str, object], why: str) -> None:
    with pytest.raises(SpecError, match=why):
        parse_spec({"model": "m", "pools": [{"role": "mixed"}], "router": router})


def test_usage_can_be_off_as_yaml_reads_it_and_is_on_by_default() -> None:
    def place(**router: object) -> Path | UsageUrl | None:
        spec = parse_spec({"model": "m", "pools": [{"role": "mixed"}], "router": router})
        return spec.router.options(UsageOptions).place(spec.name)

    folder = state_folder() / "usage" / "kvrelay"
    assert place(usage_db=False) is place(usage_db="off") is None
    assert place(usage_db="/var/u.db") == Path("/var/u.db")
    assert place() == folder / "usage.db"
    url = place(usage_db="postgresql://me:hush@host/usage")
    assert url == UsageUrl("postgresql://me:hush@host/usage", folder / "postgresql")
    assert "hush" not in repr(url)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("? [a, b]\n: 3\n", "line 1: found unhashable key"),
        ("pools: &p [{role: mixed}, *p]\n", "line 1: an alias stands in what it names"),
        ("[" * 50_000, "it is nested too deep"),
    ],
)
def test_a_file_that_goes_on_without_end_is_told_in_a_sentence(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "odd.yaml").write_text(text)
    with pytest.raises(SpecError, match=told):
        load_spec(tmp_path / "odd.yaml")


def test_a_value_of_no_kind_that_it_may_be_of_is_one_mistake() -> None:
    for router, told in (
        ({"http_port": "abc"}, "router.http_port is 'abc'; give a whole number or 'auto'"),
        ({"accounts": {"a": {"weight": True}}}, "router.accounts.a.weight is True; give a number"),
        ({"accounts": {1: {"weight": 2}}}, "router.accounts[1] is 1; give text"),
        ({"accounts": {"a": {"weight": "x"}}}, "router.accounts.a.weight is 'x'; give a number"),
    ):
        with pytest.raises(SpecError) as caught:
            parse_spec(spec_data(router=router))
        assert str(caught.value) == told
