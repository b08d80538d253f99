"""Environment variables in a spec file, and where each value of a spec comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.spec.errors import SpecError
from cluster.spec.load import read_spec
from cluster.spec.resolve import Machine, resolve
from cluster.spec.sources import HIDDEN, rows_of

pytestmark = pytest.mark.unit

MACHINE = Machine(cores=(0, 1), memory_bytes=8 << 30)
POOLS = "pools: [{role: prefill}, {role: decode}]\n"


def read(tmp_path: Path, text: str, **environ: str) -> tuple[Any, dict[str, str]]:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    spec, sources = read_spec(path, environ)
    return spec, {key: source.removeprefix(f"{tmp_path}/") for key, source in sources.items()}


def test_a_variable_is_a_value_of_the_type_that_it_looks_like(tmp_path: Path) -> None:
    text = """
model: ${HOME_OF}/models/$$x
name: "${NAME:-chat}"
router: {port: "${PORT}", auth: "${AUTH}", metrics_port: "${NONE:-}0"}
pools:
  - role: prefill
    threads: ${N}
    cpus: ${CPUS:-null}
  - role: decode
    replicas: ${N}
    kv_memory: ${SIZE:-64MiB}
"""
    spec, _ = read(tmp_path, text, HOME_OF="/m", PORT="1234", AUTH="true", N="2", NAME="")
    assert (spec.model, spec.name, spec.router.port, spec.router.auth) == ("/m/models/$x", "chat", 1234, True)
    assert (spec.pools[0].threads, spec.pools[0].cpus, spec.pools[1].replicas) == (2, None, 2)
    assert (spec.pools[1].kv_memory, spec.router.metrics_port) == (64 << 20, 0)


def test_what_a_variable_holds_stays_one_value(tmp_path: Path) -> None:
    hostile = "x\nname: other\npools: []"
    spec, _ = read(tmp_path, f"model: ${{M}}\n{POOLS}", M=hostile)
    assert (spec.model, spec.name, len(spec.pools)) == (hostile, "kvrelay", 2)
    spec, _ = read(tmp_path, f"model: ${{M}}\n{POOLS}", M="[a, b]")
    assert spec.model == "[a, b]"
    spec, _ = read(tmp_path, f'model: m\nserved_model_name: "${{M}}"\n{POOLS}', M="7")
    assert spec.served_model_name == "7", "in quotes it is text"
    spec, _ = read(tmp_path, f"model: ${{M}}\n{POOLS}", M="${N}")
    assert spec.model == "${N}", "it is not looked into again"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "model: m\npools:\n- role: prefill\n  threads: ${N}\n- role: decode\n",
            "pools[0].threads, in line 4, wants N, which is not set; set it, or write ${N:-default}",
        ),
        (f"model: ${{1}}\n{POOLS}", "model, in line 1, has a ${ that names no variable; write ${NAME}"),
        (f"model: ${{A\n{POOLS}", "model, in line 1, has a ${ that names no variable"),
        (f"model: m\nname: ${{BAD}}\n{POOLS}", "name is 'Big'; give small letters"),
    ],
)
def test_a_variable_that_cannot_be_used_is_told_in_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(SpecError) as refused:
        read(tmp_path, text, BAD="Big")
    assert str(refused.value).startswith(sentence)


def test_what_an_alias_repeats_is_filled_in_once(tmp_path: Path) -> None:
    text = "model: m\npools:\n- &p {role: prefill, kv_memory: '${A}'}\n- {<<: *p, role: decode}\n"
    spec, sources = read(tmp_path, text, A="64MiB")
    assert [pool.kv_memory for pool in spec.pools] == [64 << 20] * 2
    assert sources["pools[1].kv_memory"] == "cluster.yaml:3 ${A}"


def rows(tmp_path: Path, text: str, **environ: str) -> dict[str, tuple[Any, str]]:
    spec, sources = read(tmp_path, text, **environ)
    return {row.key: (row.value, row.source) for row in rows_of(spec, resolve(spec, MACHINE), sources)}


def test_each_value_says_where_it_comes_from(tmp_path: Path) -> None:
    text = "model: m\nrouter:\n  port: ${P}\n" + POOLS
    known = rows(tmp_path, text, P="7")
    assert known["router.port"] == (7, "cluster.yaml:3 ${P}")
    assert known["pools[1].role"] == ("decode", "cluster.yaml:4")
    assert known["router.max_calls"] == (4096, "default")
    assert known["pools[0].threads"] == (1, "derived")
    assert known["pools[1].cpus"] == ([1], "derived")
    assert known["tls"] == (None, "default")


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    text = (
        f"model: ${{DB}}\nserved_model_name: ${{API_TOKEN}}\ntransfer: {{nccl: {{NCCL_X: '${{MY_SECRET}}'}}}}\n{POOLS}"
    )
    known = rows(tmp_path, text, DB="postgres://me:hush@db/x", API_TOKEN="hush", MY_SECRET="hush")
    assert known["model"][0] == "postgres://me:***@db/x"
    assert known["served_model_name"][0] == known["transfer.nccl"][0] == HIDDEN
    assert "hush" not in repr(known)
    text = "model: m\nrouter: {usage_db: 'postgresql://me@db/x?sslmode=require&password=hush'}\n"
    known = rows(tmp_path, text + POOLS)
    assert known["router.usage_db"][0] == "postgresql://me@db/x?sslmode=require&password=***"
    assert "hush" not in repr(known)
