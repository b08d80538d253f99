"""A third kind of worker, tried: a copy of the sources gets one folder and one entry of the registry of roles. It can
be asked for in a spec, is explained with the others, and serves under Ray like any other, with knobs of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvrelay.demo_model import make_demo_model
from tests.trials.tree import copied, inserted, run

POLICY = '''
"""EagerPolicy reads prompts as PrefillPolicy does, the last that came first."""

from dataclasses import dataclass

from engine.knobs import knob
from prefill_worker.options import PrefillOptions
from prefill_worker.policy import PrefillPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerOptions(PrefillOptions):
    eagerness: float = knob(1.0, "how much the newest prompt counts", ge=0, le=1)


class EagerPolicy(PrefillPolicy):
    def _queue(self):
        queue = super()._queue()
        return queue[::-1] if self.options.eagerness else queue
'''
DRIVER = """
from functools import partial

from eager_worker.policy import EagerPolicy
from prefill_worker.driver import PrefillRole

EagerRole = partial(PrefillRole, make_policy=EagerPolicy)
"""
ENTRY = """        RoleKind(
            name="eager",
            phases=("prefill",),
            options="eager_worker.policy:EagerOptions",
            driver="eager_worker.driver:EagerRole",
        ),
"""
SPEC = """
model: ./model
router: {port: 0}
pools:
  - {role: eager, eagerness: 0.5, max_batch_tokens: 48, kv_memory: 4MiB}
  - {role: decode, kv_memory: 4MiB}
"""
SIMULATED = """
from cluster.spec.load import load_spec
from placement.build.from_spec import sim_cluster
from placement.build.sources import RooflineWorkers
from placement.latency.hardware import load_hardware
from placement.latency.model_files import load_shape
try:
    sim_cluster(load_spec("spec.yaml"), RooflineWorkers(load_shape("llama-3.1-8b"), load_hardware("h200-sxm")))
except ValueError as error:
    print(error)
"""
COMMAND = ("-m", "kvrelay.cli.main")


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = copied(tmp_path_factory.mktemp("tree"))
    (tree / "eager_worker").mkdir()
    (tree / "eager_worker" / "policy.py").write_text(POLICY)
    (tree / "eager_worker" / "driver.py").write_text(DRIVER)
    inserted(tree / "worker" / "roles.py", "    for kind in (\n", ENTRY)
    (tree / "spec.yaml").write_text(SPEC)
    make_demo_model(tree / "model")
    return tree


def test_a_third_kind_of_worker_serves(changed: Path) -> None:
    up = json.loads(run(changed, *COMMAND, "up", "spec.yaml", "--name", "third", "--detach", "--json"))
    try:
        endpoint = up["endpoints"][0]
        request = ("generate", "--endpoint", endpoint, "--max-tokens", "5", "--ignore-eos", "--json", "Hello")
        answer = json.loads(run(changed, *COMMAND, *request))
        status = json.loads(run(changed, *COMMAND, "status", "--endpoint", endpoint, "--json"))
    finally:
        run(changed, *COMMAND, "down", "third")
    workers = {worker["role"]: worker for worker in status["workers"]}
    assert set(workers) == {"eager", "decode"}
    assert workers["eager"]["limits"]["eagerness"] == "0.5"
    assert (answer["timeline"]["prefill_worker"], answer["usage"]["completion_tokens"]) == ("eager-0", 5)
    assert answer["receipt"]["checksums_ok"]


def test_a_third_kind_of_worker_is_explained_and_not_simulated(changed: Path) -> None:
    assert "--eagerness" in run(changed, *COMMAND, "up", "--help")
    run(changed, "docs/fill_serving.py")
    page = (changed / "docs" / "serving.md").read_text()
    assert "| `eagerness` | eager | `1.0` | - | from 0 to 1 | how much the newest prompt counts |" in page
    assert run(changed, "-c", SIMULATED) == (
        "eager-0 has the role eager, which is not simulated; give prefill, decode or mixed\n"
    )
