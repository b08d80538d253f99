"""A round of messes at every door, and again what has been found in longer ones. `python -m bench.fuzz` goes on."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from cluster.deploy.local import LocalCluster
from tests.fuzz.doors import FILES, SERVICES, Doors, play
from tests.fuzz.models import model_dir
from tests.serving.harness import ENGINE, ROUTER, WORKER
from tests.zoo import make_tiny_model

CORPUS: dict[str, list[int]] = json.loads((Path(__file__).parent / "corpus.json").read_text())


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_read_or_refused_in_a_sentence(name: str) -> None:
    outcomes = Counter(FILES[name](seed) for seed in (*CORPUS.get(name, ()), *range(200)))
    assert outcomes["refused"] > 10
    assert outcomes["served"] > 10, "the messes are too large: nothing past the first check was tried"


async def test_services_refuse_or_serve_and_go_on(tmp_path: Path) -> None:
    directory = make_tiny_model("llama", tmp_path / "model")
    async with LocalCluster(str(directory), engine=ENGINE, worker=WORKER, router=ROUTER) as cluster:
        doors = Doors(cluster)
        for name in SERVICES:
            outcomes: Counter[str] = Counter()
            unclear = await play(doors, name, (*CORPUS.get(name, ()), *range(25)), outcomes)
            assert not unclear, f"{name}: {unclear}"
            await doors.check()


def test_a_model_is_loaded_or_refused_in_a_sentence(tmp_path: Path) -> None:
    good = make_tiny_model("llama", tmp_path / "model")
    outcomes = Counter(model_dir(good, seed) for seed in (*CORPUS["model"], *range(1000, 1010)))
    assert outcomes["served"], outcomes
    assert len(outcomes) > 1, outcomes
