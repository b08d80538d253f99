"""A model that was prepared before a fork is served as one that was loaded, and its weights are nobody's twice."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from engine.loading import ready_made
from engine.options import EngineOptions
from kvrelay.demo_model import make_demo_model

FORKS = """
import json, logging, os, sys
from engine.process import set_environment

prepared, asked = json.loads(sys.argv[1])
set_environment(int(sys.argv[3]) if sys.argv[2] == "forked" else prepared["threads"])
os.environ["OPENBLAS_NUM_THREADS"] = "1"

from engine.engine import Engine
from engine.loading.load import prepare_for_forks
from engine.options import EngineOptions
from engine.types import Chunk, SampleSpec, SamplingParams, Step
from transformers.utils.logging import disable_progress_bar

disable_progress_bar()

def tokens(options):
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.INFO)
    engine = Engine.load(options)
    ids, drawn = list(range(3, 40)), []
    for _ in range(8):
        start = 0 if not drawn else len(ids) - 1
        spec = SampleSpec(params=SamplingParams(temperature=0.7, seed=5), position=len(ids))
        chunk = Chunk(request_id="a", token_ids=ids[start:], start=start, block_table=[0, 1, 2], sample=spec)
        [token] = engine.step(Step(chunks=[chunk]))
        drawn.append(token.token_id)
        ids.append(token.token_id)
    return {"tokens": drawn, "pages": engine.layout.num_pages, "fingerprint": engine.info.fingerprint,
            "said": [line for line in said if line.startswith(("products", "parity check"))]}

prepared, asked = EngineOptions(**prepared), EngineOptions(**asked)
if sys.argv[2] == "forked":
    prepare_for_forks(prepared)
    assert len(os.listdir("/proc/self/task")) == 1, "so that nothing is half there in a fork"
told, tell = os.pipe()
if os.fork() == 0:
    os.write(tell, json.dumps(tokens(asked)).encode())
    os._exit(0)
os.close(tell)
print(open(told).read())
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_demo_model(tmp_path_factory.mktemp("models") / "tiny", size="tiny")


def run(how: str, prepared: dict[str, object], asked: dict[str, object], threads: int = 2) -> dict[str, object]:
    """`threads`: of the process that forks."""
    command = [sys.executable, "-c", FORKS, json.dumps([prepared, asked]), how, str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    told: dict[str, object] = json.loads(done.stdout)
    return told


@pytest.mark.parametrize(("options", "forking", "own"), [({}, 2, 1), ({"kv_dtype": "int8", "dtype": "float32"}, 1, 2)])
def test_a_fork_draws_what_a_process_of_its_own_does(
    model: Path, options: dict[str, object], forking: int, own: int
) -> None:
    prepared: dict[str, object] = {"model": str(model), "threads": own, **options}
    asked = prepared | {"num_pages": 40}
    assert run("forked", prepared, asked, forking) == run("alone", prepared, asked)


def test_one_that_serves_another_model_loads_it_for_itself(model: Path, tmp_path: Path) -> None:
    other: dict[str, object] = {"model": str(make_demo_model(tmp_path / "other", size="tiny", seed=9)), "threads": 1}
    assert run("forked", {"model": str(model), "threads": 1}, other) == run("alone", other, other)


def test_a_checkpoint_that_was_changed_since_is_loaded_anew(tmp_path: Path) -> None:
    """`kvrelay roll` brings the files that are there now."""
    ready, other = (make_demo_model(tmp_path / name, size="tiny", seed=i) for i, name in enumerate("ab"))
    options = EngineOptions(model=str(ready))
    key = ready_made.key_of(options)
    assert ready_made.key_of(replace(options, num_pages=7)) == key
    (other / "model.safetensors").replace(ready / "model.safetensors")
    assert ready_made.key_of(options) != key
