"""What a fork server has before its first fork is what most workers of a spec would load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.deploy.forks import shared
from cluster.deploy.forks.shared import preload_of
from cluster.spec.model import ClusterSpec
from cluster.spec.resolve import Machine, resolve
from engine.loading.ready_made import alike
from engine.options import EngineOptions
from tests.hub import as_downloaded

MACHINE = Machine(cores=(0, 1, 2, 3), memory_bytes=1 << 34, gpus=0)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(b"0" * 1000)
    for name in ("config.json", "tokenizer.json"):
        (directory / name).write_text("{}")
    return directory


def engine_of(model: Path, *pools: dict[str, Any], **settings: Any) -> EngineOptions | None:
    spec = ClusterSpec.model_validate({"model": str(model), "pools": list(pools), **settings})
    made = preload_of(resolve(spec, MACHINE, node_host="127.0.0.1")).engine
    return None if made is None else EngineOptions(**made)


def test_pools_that_differ_in_their_pages_and_threads_share_a_model(model: Path) -> None:
    decode = {"role": "decode", "kv_memory": "128MiB", "threads": 2}
    made = engine_of(model, {"role": "prefill", "kv_memory": "64MiB", "threads": 1}, decode)
    assert made is not None
    assert alike(made) == made
    assert made.model == str(model)


def test_the_most_alike_share_it(model: Path) -> None:
    made = engine_of(model, {"role": "prefill", "attention": "torch"}, {"role": "decode", "replicas": 2})
    assert made is not None
    assert made.attention == "auto"


def test_a_large_model_each_worker_loads_for_itself(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "MAX_WEIGHT_BYTES", 999)
    assert engine_of(model, {"role": "mixed"}) is None


def test_so_do_workers_of_a_machine_with_several_memories(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("node0", "node1"):
        (tmp_path / "nodes" / name).mkdir(parents=True)
    monkeypatch.setattr(shared, "NODES", tmp_path / "nodes")
    assert engine_of(model, {"role": "mixed"}) is None


def test_and_those_of_several_processes(model: Path) -> None:
    assert engine_of(model, {"role": "mixed", "tensor_parallel": 2}) is None


def test_a_name_on_the_hub_is_each_workers_to_fetch(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine_of(Path("some/model"), {"role": "mixed"}) is None
    made = engine_of(Path(as_downloaded(model, "some/model", tmp_path / "hub", monkeypatch)), {"role": "mixed"})
    assert made is not None, "it is here"


def test_light_forks_are_the_controller_and_the_routers(model: Path) -> None:
    spec = ClusterSpec.model_validate({"model": str(model), "pools": [{"role": "mixed"}], "router": {"replicas": 2}})
    assert preload_of(resolve(spec, MACHINE, node_host="127.0.0.1")).num_light == 3
