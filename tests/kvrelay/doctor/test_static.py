"""Each check of a machine, its software and a spec, on machines that are made up: what is good, and what is not."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.spec.load import parse_spec
from cluster.spec.model import ClusterSpec
from cluster.spec.resolve import Machine
from engine.pages.host_memory import FreeMemory
from kvrelay.doctor import engine, fitting, machine, reading, software
from kvrelay.doctor.finding import Finding, from_plain, is_failed, plain
from kvrelay.doctor.table import findings_table, summary

pytestmark = pytest.mark.unit

GIB = 1 << 30
AVX2, AMX = frozenset({"avx2"}), frozenset({"avx2", "avx512f", "amx_bf16"})
SAPPHIRE_RAPIDS = (6, 143)
FACTS = engine.EngineFacts(instructions="AVX512", may_multiply=True)
ON_GPUS = replace(FACTS, torch_cuda="13.0", gpus=("H100", "H100"), nccl=(2, 29, 7))


def verdicts(findings: Iterable[Finding]) -> dict[str, str]:
    found = list(findings)
    assert all(finding.mend for finding in found if finding.verdict in ("bad", "doubtful")), "each has a mend"
    return {finding.name: finding.verdict for finding in found}


# software


def installed(**changed: str | None) -> Any:
    versions = {"torch": "2.13.0+cpu", "ray": "2.60.0", "grpcio": "1.85.1", "rich": "14.0"} | changed
    return versions.get


NEEDED = ["torch>=2.10", "ray[default]>=2.50", "grpcio>=1.80", "rich>=13.7", 'flashinfer-python<0.7; extra == "gpu"']


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({}, {}),
        ({"torch": "2.9.1"}, {"torch": "bad"}),
        ({"torch": "2.14.0.dev1"}, {}),
        ({"ray": None}, {"ray": "bad"}),
        ({"rich": "12.0"}, {"rich": "bad"}),
        ({"flashinfer-python": "0.7.1"}, {"flashinfer-python": "bad"}),
        ({"flashinfer-python": "0.6.14"}, {}),
    ],
)
def test_versions_are_held_against_the_bounds_of_the_package(changed: dict[str, str], wrong: dict[str, str]) -> None:
    found = verdicts(software.packages(NEEDED, installed(**changed)))
    assert {name: verdict for name, verdict in found.items() if verdict != "good"} == wrong
    assert "other packages" in found


def test_two_packages_of_nccl_spoil_each_other() -> None:
    both = {"nvidia-nccl-cu12": "2.27.5", "nvidia-nccl-cu13": "2.29.7"}
    assert verdicts(software.nccl_packages(both.get)) == {"NCCL packages": "bad"}
    assert not list(software.nccl_packages({"nvidia-nccl-cu13": "2.29.7"}.get))


def test_a_python_out_of_bounds_is_bad() -> None:
    assert software.python_version("3.11.7", ">=3.11,<3.14").verdict == "good"
    assert software.python_version("3.14.0", ">=3.11,<3.14").verdict == "bad"


# engine


@pytest.mark.parametrize(
    ("facts", "gpus", "wants_gpu", "wanted"),
    [
        (FACTS, 0, False, {"kernels": "good"}),
        (replace(FACTS, why_no_native="no C++ compiler was found"), 0, False, {"kernels": "doubtful"}),
        (replace(FACTS, instructions="AMX", may_multiply=False), 0, False, {"kernels": "doubtful"}),
        (engine.EngineFacts(trouble="it was killed"), 0, False, {"torch": "bad"}),
        (FACTS, 1, False, {"kernels": "good", "GPUs": "doubtful"}),
        (FACTS, 0, True, {"kernels": "good", "GPUs": "bad"}),
        (ON_GPUS, 2, True, {"kernels": "good", "GPUs": "good", "NCCL": "good", "GPU to GPU": "good"}),
        (
            replace(ON_GPUS, nccl=(2, 20, 5), apart=((0, 1),), flashinfer="it is not installed"),
            2,
            True,
            {"kernels": "good", "GPUs": "doubtful", "NCCL": "bad", "GPU to GPU": "doubtful"},
        ),
    ],
)
def test_kernels_and_gpus(facts: engine.EngineFacts, gpus: int, wants_gpu: bool, wanted: dict[str, str]) -> None:
    assert verdicts(engine.engine(facts, gpus=gpus, wants_gpu=wants_gpu)) == wanted


@pytest.mark.parametrize("code", ["raise SystemExit('no torch')", "import os; os.abort()", "print('hello')"])
def test_what_ends_the_process_that_reads_is_told(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, **more: run([command[0], "-c", code], **more))
    assert "end the process" in engine.engine_facts().trouble


# machine


@pytest.mark.parametrize(
    ("finding", "verdict"),
    [
        (machine.cpu("Xeon", AMX, SAPPHIRE_RAPIDS), "good"),
        (machine.cpu("Xeon", AVX2, SAPPHIRE_RAPIDS), "doubtful"),
        (machine.cpu("EPYC", AVX2, (25, 17)), "good"),
        (machine.cpu("Atom", frozenset({"sse2"}), (6, 28)), "doubtful"),
        (machine.open_files(1024, 4095, 2), "doubtful"),
        (machine.open_files(1024, 4096, 2), "good"),  # Ray raises it to that
        (machine.open_files(1024, -1, 2), "good"),
        (machine.open_files(1024, 4096, 2, is_joined=True), "doubtful"),
        (machine.open_files(1024, -1, 2000), "doubtful"),  # and no further than to 65536
        (machine.open_files(20000, -1, 2), "good"),
        (machine.open_files(20000, 20000, 1000), "doubtful"),
        (machine.open_files(-1, -1, 4096), "good"),
        (machine.locked_memory(8 << 20, 0), "good"),
        (machine.locked_memory(8 << 20, 2), "doubtful"),
        (machine.locked_memory(-1, 2), "good"),
        (machine.huge_pages("always [madvise] never"), "good"),
        (machine.huge_pages("always madvise [never]"), "doubtful"),
        (machine.huge_pages(""), "unknown"),
        (machine.stolen_time(0.01), "good"),
        (machine.stolen_time(0.2), "doubtful"),
        (machine.other_work(0.1), "good"),
        (machine.other_work(0.6), "doubtful"),
    ],
)
def test_a_machine(finding: Finding, verdict: str) -> None:
    assert list(verdicts([finding]).values()) == [verdict]


@pytest.mark.parametrize(
    ("source", "is_set", "wanted"),
    [("tsc", True, "good good"), ("hpet", False, "doubtful doubtful"), ("", None, "unknown unknown")],
)
def test_clocks(source: str, is_set: bool | None, wanted: str) -> None:
    assert " ".join(verdicts(machine.clock(source, is_set)).values()) == wanted


def test_this_machine_can_be_read() -> None:
    host = reading.read_host()
    assert host.cpu
    assert host.flags
    assert 0 <= host.stolen <= 1
    assert 0 <= host.busy <= 1
    assert host.free.num_bytes > 0


# spec


def spec(model: str = "org/name", **prefill: Any) -> ClusterSpec:
    return parse_spec({"model": model, "pools": [{"role": "prefill", **prefill}, {"role": "decode"}]})


@pytest.fixture
def model(tmp_path: Path) -> str:
    """8 GB in bfloat16, of which no weight is there."""
    shape = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 20}
    shape |= {"num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096}
    told = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(shape | told))
    return str(tmp_path)


def fitted(spec: ClusterSpec, *, cores: int = 8, free_gib: float = 64.0, shm: int = GIB) -> dict[str, str]:
    here = Machine(cores=tuple(range(cores)), memory_bytes=64 * GIB)
    return verdicts(fitting.fits(spec, here, FreeMemory(int(free_gib * GIB), "on this machine"), shm, 80 << 20))


def test_a_spec_that_fits(model: str) -> None:
    wanted = {"model": "good", "cores": "good", "memory": "good", "shared memory": "good"}
    assert fitted(spec(model)) == wanted


@pytest.mark.parametrize(
    ("machine_is", "name", "verdict"),
    [
        ({"cores": 2}, "cores", "doubtful"),
        ({"free_gib": 18.0}, "memory", "bad"),
        ({"free_gib": 22.0}, "memory", "doubtful"),
        ({"shm": 64 << 20}, "shared memory", "doubtful"),
    ],
)
def test_a_machine_that_is_too_small(model: str, machine_is: dict[str, Any], name: str, verdict: str) -> None:
    assert fitted(spec(model, threads=4), **machine_is)[name] == verdict


def test_a_model_of_the_hub_is_not_known_before(model: str) -> None:
    found = fitted(spec())
    assert (found["model"], found["memory"]) == ("unknown", "unknown")
    assert fitted(spec(f"{model}/nowhere"))["model"] == "bad"
    (Path(model) / "config.json").unlink()
    assert fitted(spec(model))["model"] == "bad"


def test_what_a_spec_says_of_other_machines_is_told_in_its_own_words() -> None:
    assert fitted(spec(cpus=[7, 8])) == {"spec": "bad"}


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        router = {"port": port, "http_port": 0}
        asked = parse_spec({"model": "m", "router": router, "pools": [{"role": "mixed"}]})
        assert verdicts(fitting.ports(asked)) == {"router.port": "bad"}
    assert verdicts(fitting.ports(asked)) == {"router.port": "good"}


@pytest.mark.parametrize("host", ["nohost.invalid", "203.0.113.5"])
def test_a_host_that_is_not_this_machine_is_named_and_no_port(host: str) -> None:
    router = {"host": host, "port": 50051, "http_port": 8000}
    asked = parse_spec({"model": "m", "router": router, "pools": [{"role": "mixed"}]})
    assert verdicts(fitting.ports(asked)) == {"router.host": "bad"}


def test_a_usage_database_elsewhere_that_is_away_is_doubtful_and_its_password_is_not_shown() -> None:
    def found(**router: str) -> list[Finding]:
        return [*fitting.usage_database(parse_spec({"model": "m", "router": router, "pools": [{"role": "mixed"}]}))]

    [away] = found(usage_db="postgresql://me:hush@127.0.0.1:1/usage")
    assert (away.name, away.verdict) == ("router.usage_db", "doubtful")
    assert "Connection refused" in away.found
    assert "hush" not in away.sentence
    assert found() == found(usage_db="off") == []


NODES = [{"CPU": 4.0, "GPU": 1.0}, {"CPU": 2.0}]


@pytest.mark.parametrize(
    ("wanted", "free", "verdict"),
    [
        ({"prefill-0": {"CPU": 4.0}, "decode-0": {"CPU": 2.0}}, {"CPU": 6.0}, "good"),
        ({"prefill-0": {"CPU": 4.0}, "decode-0": {"CPU": 2.0}}, {"CPU": 3.0}, "doubtful"),
        ({"prefill-0": {"CPU": 3.0}, "decode-0": {"CPU": 3.0}}, {"CPU": 6.0}, "bad"),
        ({"prefill-0": {"GPU": 1.0}, "decode-0": {"GPU": 1.0}}, {"GPU": 1.0}, "bad"),
        ({"prefill-0": {"CPU": 1.0, "prefill_host": 1.0}}, {"CPU": 6.0}, "bad"),
        ({"prefill-0": {}}, {}, "good"),
    ],
)
def test_what_ray_has_is_held_against_what_workers_want(wanted: Any, free: dict[str, float], verdict: str) -> None:
    assert verdicts([fitting.ray_resources(NODES, free, wanted)]) == {"resources": verdict}


# what comes of findings


def finding(verdict: Any, name: str = "x") -> Finding:
    return Finding(part="p", name=name, verdict=verdict, found="[1, 2]", mend="mend it")


def test_bad_fails_and_doubtful_does_when_asked() -> None:
    for verdict, fails, fails_strictly in (
        ("good", False, False),
        ("unknown", False, False),
        ("doubtful", False, True),
        ("bad", True, True),
    ):
        found = [finding("good"), finding(verdict)]
        assert (is_failed(found), is_failed(found, strict=True)) == (fails, fails_strictly)


def test_findings_come_back_from_plain_data() -> None:
    found = [finding("bad"), finding("good", "y")]
    assert from_plain(json.loads(json.dumps(plain(found)))) == found
    assert summary(found) == "1 bad, 1 good"


def test_many_good_ones_are_one_row() -> None:
    found = [finding("bad"), *(finding("good", f"g{i}") for i in range(100))]
    assert findings_table(found).row_count == 2
