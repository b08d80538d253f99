"""A spec of several models: who serves which, and how they come and go."""

from __future__ import annotations

import re
from typing import Any

import pytest

from cluster.deploy.changes.running_spec import RunningSpec
from cluster.spec.errors import SpecError
from cluster.spec.load import parse_spec, read_spec
from cluster.spec.resolve import Machine, resolve, workers_of
from placement.build.from_spec import sim_cluster
from placement.catalogs.base import PlanError

pytestmark = pytest.mark.unit

MACHINE = Machine(cores=(0, 1, 2, 3), memory_bytes=8 << 30)
OWN = [{"role": "prefill"}, {"role": "decode", "max_batch_size": 7}]
QWEN: dict[str, Any] = {"name": "qwen", "model": "/q", "dtype": "float32"}
BESIDE = {"role": "mixed", "name": "beside", "model": "qwen"}


def data(*pools: Any, **keys: Any) -> dict[str, Any]:
    return {"model": "/m", "dtype": "bfloat16", "pools": [*OWN, *pools], **keys}


def test_a_worker_is_of_its_pools_model_with_that_models_keys() -> None:
    plans = {plan.name: plan for plan in workers_of(resolve(parse_spec(data(BESIDE, models=[QWEN])), MACHINE))}
    assert {name: plan.model for name, plan in plans.items()} == {"prefill-0": "", "decode-0": "", "beside-0": "qwen"}
    assert [plans["beside-0"].engine[key] for key in ("model", "dtype")] == ["/q", "float32"]
    assert [plans["decode-0"].engine[key] for key in ("model", "dtype")] == ["/m", "bfloat16"]
    assert plans["prefill-0"].options.elsewhere == {"decode": {"max_batch_size": 7}}, "not of another model's pools"


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (data(models=[QWEN]), "pools has none that computes prefill of qwen; add one with role prefill, or mixed and"),
        (data(BESIDE), "pools[2].model is 'qwen', which is not in models; there are none, and a pool without a model"),
        (data(BESIDE, models=[QWEN, QWEN]), "models has 'qwen', the name of another one; give each its own"),
        (data(models=[QWEN | {"name": "m"}]), "models has 'm', the name of another one; give each its own"),
        (data(BESIDE, models=[QWEN | {"name": "q w"}]), "models[0].name is 'q w'; give letters, digits and"),
        (data(BESIDE, models=[QWEN | {"dtyp": 1}]), "models[0].dtyp is not a known key; did you mean models[0].dtype?"),
        (
            data(BESIDE, models=[QWEN], router={"adapters": {"qwen": "/a"}}),
            "router.adapters has 'qwen', which is a model's own name; take another",
        ),
        (
            data(BESIDE, models=[QWEN], replan="advise", router={"slo_ttft_ms": 1}),
            "replan is advise, and there are several models, of which a replanner knows one",
        ),
    ],
)
def test_what_is_wrong_with_models_is_said_in_a_sentence(spec: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpecError, match=re.escape(sentence)):
        parse_spec(spec)


def test_each_models_kv_may_be_of_another_kind() -> None:
    assert parse_spec(data(BESIDE | {"kv_dtype": "int8"}, models=[QWEN]))
    with pytest.raises(SpecError, match="give both the same, for KV is handed over as it is"):
        parse_spec(data(BESIDE | {"kv_dtype": "int8"}, {**BESIDE, "name": "other"}, models=[QWEN]))


def test_models_come_and_go_and_only_theirs_are_replaced() -> None:
    own, both = data(), data(BESIDE, models=[QWEN])
    running = RunningSpec.of(parse_spec(own), resolve(parse_spec(own), MACHINE), {}, MACHINE, "127.0.0.1")
    coming = running.plan_for(both, {})
    assert [(each.key, each.after, each.change.how) for each in coming.changes] == [
        ("models[0]", "qwen: /q", "now"),
        ("pools[2]", "beside: 1 mixed", "now"),
    ]
    before = running.made_by("decode")
    running.take(coming, None)
    assert running.made_by("decode") == before
    made = running.made_by("beside")
    checked = running.plan_for(data(BESIDE, models=[QWEN | {"parity_check": False}]), {})
    assert [(each.key, each.change.how) for each in checked.changes] == [("models[0].parity_check", "rolling")]
    running.take(checked, None)
    assert running.made_by("beside") != made
    assert running.made_by("decode") == before
    elsewhere = running.plan_for(data(BESIDE, models=[QWEN | {"model": "/other"}]), {})
    assert "models[0].model is '/q', and '/other' cannot replace it while the cluster runs" in elsewhere.why_not
    going = running.plan_for(own, {})
    assert {each.key: each.after for each in going.changes} == {"models[0]": None, "pools[2]": None}
    assert not going.why_not


def test_a_directory_is_meant_from_the_specs_folder(tmp_path: Any) -> None:
    (tmp_path / "q").mkdir()
    path = tmp_path / "spec.yaml"
    path.write_text(
        "model: m\nmodels: [{name: qwen, model: ./q}]\npools: [{role: mixed}, {role: mixed, name: q, model: qwen}]"
    )
    spec, sources = read_spec(path, {})
    assert spec.models[0].model == str(tmp_path / "q")
    assert sources["models[0].name"] == f"{path}:2"


def test_a_simulation_is_of_one() -> None:
    with pytest.raises(PlanError, match="models has qwen, and a simulation is of one model; give a spec for each"):
        sim_cluster(parse_spec(data(BESIDE, models=[QWEN])), None)  # type: ignore[arg-type]
