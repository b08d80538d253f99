"""`kvrelay plan` of several models: what is told, what is written, and what is asked wrongly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from cluster.spec.load import parse_spec
from cluster.spec.resolve import why_not_served
from kvrelay.plan.reading import build_request
from kvrelay.plan.together import SharingPlan, as_object, plan_together, save, sentences, spec_data, tables
from placement.catalogs.base import Degrees
from placement.plan import Plan
from placement.search.together import Share, Together
from tests.kvrelay.plan.plan_fixture import PLAN, point, pool
from tests.kvrelay.plan.plan_fixture import together as mixed
from tests.kvrelay.plan.test_plan_cli import refused, run

ASKED: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "hardware": "h100-sxm",
    "rate": 4,
    "random_input_len": 128,
    "random_output_len": 16,
    "ttft": "500ms",
    "tpot": "50ms",
}


REPLAYED = {"random_input_len": None, "random_output_len": None, "trace": "t.csv", "trace_timestamps": True}


def write(folder: Path, name: str, **changes: Any) -> str:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in (ASKED | changes).items() if value is not None}))
    return str(path)


def own(replicas: int) -> Plan:
    chosen = replace(PLAN.chosen, candidate=mixed(1, replicas), usd_per_hour=3.0 * replicas)
    return replace(PLAN, chosen=chosen, tried=(chosen,))


def shared(groups: int, growth: float) -> Together:
    shares = tuple(
        Share(name=name, pool=pool("mixed", 1, groups, chunk_tokens=512), memory=0.45, point=point(4.0, 8.0))
        for name in ("chat", "code-x")
    )
    return Together(degrees=Degrees(1), groups=groups, shares=shares, growth=growth, growth_gpus=3)


def sharing(together: Together | str, tmp_path: Path) -> SharingPlan:
    rate = PLAN.chosen.goodput.value / 2
    requests = tuple(build_request(Path(write(tmp_path, name, rate=rate)), {}) for name in ("chat", "code-x"))
    return SharingPlan(names=("chat", "code-x"), requests=requests, apart=(own(2), own(1)), together=together)


@pytest.mark.unit
def test_sharing_is_the_answer_on_fewer_gpus_or_with_more_room(tmp_path: Path) -> None:
    fewer = sharing(shared(2, 1.5), tmp_path)
    assert sentences(fewer) == [
        "Let the models share two GPUs, in groups of 1 with a worker of each model, where apart they take three GPUs "
        "(chat 2, code-x 1).",
        "On three GPUs, all rates could grow to 1.5 times together and to 2 times apart: steps of one wait for the "
        "others', and none are batched together.",
    ]
    assert fewer.usd_per_hour == pytest.approx(6.0)
    roomier = sharing(shared(3, 3.0), tmp_path)
    assert roomier.shared is not None
    assert sentences(roomier)[1].endswith(
        "3 times together and to 2 times apart: bursts of one use what the others leave."
    )
    as_many = sharing(shared(3, 2.05), tmp_path)
    assert as_many.shared is None, "within what two sets of requests differ by"
    assert sentences(as_many)[0].startswith("Give each model GPUs of its own, three GPUs (chat 2, code-x 1): together")
    assert sentences(sharing("they miss their targets", tmp_path)) == [
        "Give each model GPUs of its own, three GPUs (chat 2, code-x 1): they miss their targets."
    ]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("together", "pools"), [(shared(2, 3.0), {"num_gpus": 0.5}), ("it cannot be", {"num_gpus": 1})]
)
def test_the_spec_is_one_that_up_serves(tmp_path: Path, together: Together | str, pools: dict[str, Any]) -> None:
    plan = sharing(together, tmp_path)
    (tmp_path / "out").mkdir()
    for name in ("report.html", "tornado.png", "mine.png"):
        (tmp_path / "out" / name).touch()
    saved = save(plan, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"cluster.yaml", "plan.json", "mine.png"}
    assert [path.name for path in saved.files] == ["cluster.yaml", "plan.json"]
    assert not saved.notes
    spec = parse_spec(yaml.safe_load((tmp_path / "out" / "cluster.yaml").read_text()))
    assert (spec.model_name, [model.name for model in spec.models]) == ("chat", ["code-x"])
    assert {(each.label, each.model) for each in spec.pools} == {("chat-mixed", ""), ("code-x-mixed", "code-x")}
    assert all(each.num_gpus == pools["num_gpus"] for each in spec.pools)
    assert as_object(plan)["answer"]["is_shared"] == (not isinstance(together, str))
    assert spec_data(plan)["name"] == "chat-code-x"
    assert spec_data(plan)["router"] == {"slo_ttft_ms": 500.0, "slo_tpot_ms": 50.0}
    assert len(spec.served) == 2


@pytest.mark.unit
def test_the_tables_show_both(tmp_path: Path) -> None:
    console = Console(width=120, record=True)
    for table in tables(sharing(shared(2, 1.5), tmp_path)):
        console.print(table)
    shown = console.export_text()
    assert "Together, 2 x TP 1, each with a mixed worker of every model" in shown
    assert shown.count("chat ") >= 2


@pytest.mark.unit
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rate": None, "num_gpus": 2}, "b: rate is missing; several models are planned for the rate of each"),
        (
            {"hardware": "a100-80g-sxm"},
            "models that may share GPUs have one kind of them, and hardware is a h100-sxm, b a",
        ),
        ({"hardware": "a100-80g-sxm,h100-sxm"}, "b: several models are planned on one kind of GPU, by a roofline"),
        (
            {"random_input_len": None, "random_output_len": None, "trace": "t.csv", "trace_timestamps": True},
            "b: trace_t",
        ),
        ({"margin": "m.json"}, "b: a margin is of one model; plan it alone, or take it out"),
        ({"what_if": True}, "b: what_if is of one model; plan it alone, or take it out"),
    ],
)
def test_what_is_asked_wrongly_is_one_sentence(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    assert refused(write(tmp_path, "a"), write(tmp_path, "b", **changes)).startswith(sentence)


@pytest.mark.unit
def test_files_of_one_name_are_told_apart_by_nobody(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    told = refused(write(tmp_path, "a"), write(tmp_path / "other", "a"))
    assert refused(write(tmp_path, "a"), write(tmp_path, "b c")).startswith("'b c' is a file's name, by which a model")
    assert told == "2 files are called a, by which a model is named; give each a name of its own"


def test_two_models_with_little_to_do_share_a_gpu(tmp_path: Path) -> None:
    paths = [Path(write(tmp_path, name, tensor_parallel=1)) for name in ("a", "b")]
    plan = plan_together({path.stem: build_request(path, {}) for path in paths})
    assert plan.shared is not None
    assert (plan.shared.gpus, plan.gpus_apart) == (1, 2)
    assert run(write(tmp_path, "a"), write(tmp_path, "b", rate=None)).exit_code == 2


@pytest.mark.unit
def test_models_that_would_share_several_gpus_get_a_spec_with_their_own(tmp_path: Path) -> None:
    groups = shared(2, 3.0)
    two = replace(
        groups, shares=tuple(replace(each, pool=replace(each.pool, degrees=Degrees(2))) for each in groups.shares)
    )
    saved = save(sharing(two, tmp_path), tmp_path / "out")
    [note] = saved.notes
    assert note.startswith(
        "cluster.yaml has each model on GPUs of its own, as kvrelay up does not serve groups: pools[0]"
    )
    spec = parse_spec(yaml.safe_load((tmp_path / "out" / "cluster.yaml").read_text()))
    assert why_not_served(spec) == ""
    assert len({pool.model for pool in spec.pools}) == 2
