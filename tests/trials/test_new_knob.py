"""One home for a knob, tried: a copy of the sources in which the decode policy has one knob more, and nothing else is
changed. The spec, the command's help, the page of the docs, the workers and the simulator all have it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.trials.tree import copied, inserted, run

KNOB = '    patience_steps: int = knob(3, "that a made-up knob waits for", unit="steps", ge=1)\n'
ASKED = """
import json
from pathlib import Path
from cluster.spec.load import SpecError, parse_spec
from cluster.spec.resolve import resolve, workers_of
from docs import fill_serving
from placement.build.from_spec import sim_cluster
from placement.build.sources import RooflineWorkers
from placement.latency.hardware import load_hardware
from placement.latency.model_files import load_shape

def spec(value, role=1):
    pools = [{"role": "prefill"}, {"role": "decode"}]
    pools[role]["patience_steps"] = value
    return parse_spec({"model": "llama-3.1-8b", "pools": pools})

def refused(*given):
    try:
        spec(*given)
    except SpecError as error:
        return str(error)

wanted = spec(7)
worker = workers_of(resolve(wanted, None))[1].options
machine = sim_cluster(wanted, RooflineWorkers(load_shape("llama-3.1-8b"), load_hardware("h200-sxm"))).workers[1]
page = fill_serving.filled(fill_serving.PAGE.read_text())
print(json.dumps({
    "refused": [refused(0), refused(2, 0)],
    "worker": [worker.policy.patience_steps, worker.limits["patience_steps"]],
    "simulated": machine.policy.patience_steps,
    "row": next(line for line in page.splitlines() if "patience_steps" in line),
}))
"""


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = copied(tmp_path_factory.mktemp("tree"))
    inserted(tree / "decode_worker" / "options.py", "class DecodeOptions:\n", KNOB)
    return tree


def test_a_new_knob_is_one_line_beside_its_policy(changed: Path) -> None:
    said = json.loads(run(changed, "-c", ASKED))
    assert said["refused"] == [
        "pools[1].patience_steps is 0; give a number of 1 or more",
        "pools[0].patience_steps is for decode and mixed pools; take it out of this prefill pool",
    ]
    assert said["worker"] == [7, "7"]
    assert said["simulated"] == 7
    row = "| `patience_steps` | decode, mixed | `3` | steps | 1 or more | that a made-up knob waits for |"
    assert said["row"] == row


@pytest.mark.parametrize("command", ["up", "simulate"])
def test_a_new_knob_is_in_the_help(changed: Path, command: str) -> None:
    shown = run(changed, "-m", "kvrelay.cli.main", command, "--help")
    assert "--patience-steps" in shown
    assert "Steps that a made-up knob waits for. Default: 3." in shown
