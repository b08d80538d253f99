"""Flags made from the keys of a spec: where they go, and how what is typed is read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from cluster.spec.errors import SpecError
from kvrelay.cli.groups import sentence_of
from kvrelay.cli.spec.wanted import build
from kvrelay.cli.spec_flags import SpecChanges

pytestmark = pytest.mark.unit


def changed(**parts: dict[str, Any]) -> Any:
    return build(None, SpecChanges(**{"cluster": {"model": "m"}, **parts}), {"decode": 2}).spec


def test_a_pools_flag_goes_to_the_pools_whose_role_has_it() -> None:
    prefill, decode = changed(pools={"watermark": 0.5, "pack_tokens": 7, "num_cpus": 2.0}).pools
    assert (decode.policy.watermark, prefill.policy.pack_tokens) == (0.5, 7)
    assert (prefill.num_cpus, decode.num_cpus, decode.replicas) == (2.0, 2.0, 2)


def test_workers_that_do_both_need_no_others() -> None:
    changes = SpecChanges(cluster={"model": "m"}, pools={"watermark": 0.5, "chunk_tokens": 7})
    pools = [build(None, changes, replicas).spec.pools for replicas in ({"mixed": 2}, {"mixed": 1, "prefill": 1})]
    assert [[(pool.role, pool.replicas) for pool in each] for each in pools] == [
        [("mixed", 2)],
        [("mixed", 1), ("prefill", 1)],
    ]
    assert (pools[0][0].policy.watermark, pools[0][0].policy.chunk_tokens) == (0.5, 7)


def test_text_is_read_as_the_file_would_have_it() -> None:
    spec = changed(
        pools={"threads": "1", "cpus": "[0, 1]"},
        transfer={"transports": ["process_group"], "nccl": "{NCCL_DEBUG: WARN}"},
        cluster={"model": "m", "served_model_name": "7"},
    )
    assert (spec.pools[0].threads, spec.pools[0].cpus, spec.served_model_name) == (1, (0, 1), "7")
    assert (spec.transfer.transports, spec.transfer.nccl) == (("process_group",), {"NCCL_DEBUG": "WARN"})


def test_a_flag_wins_over_the_file_and_leaves_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(
        "model: m\nrouter: {port: 1234, overcommit: 0.5}\npools: [{role: prefill}, {role: decode, watermark: 0.1}]\n"
    )
    spec: Any = build(path, SpecChanges(router={"overcommit": 0.0}), {}).spec
    assert (spec.router.port, spec.router.overcommit, spec.pools[1].policy.watermark) == (1234, 0.0, 0.1)


def test_a_value_out_of_range_is_told_by_the_spec() -> None:
    with pytest.raises(SpecError, match=r"pools\[1\].watermark is 2.0; give a number below 1"):
        changed(pools={"watermark": 2.0})


@pytest.mark.parametrize(
    ("meaning", "unit", "sentence"),
    [
        ("Lengths from len * (1 - R) to len * (1 + R).", "", "Lengths from len * (1 - R) to len * (1 + R)."),
        (
            "that Ray sets aside, with `--address` *one* each",
            "GPUs",
            "GPUs that Ray sets aside, with --address one each.",
        ),
    ],
)
def test_the_help_of_a_flag_is_the_meaning_of_its_knob_as_a_sentence(meaning: str, unit: str, sentence: str) -> None:
    assert sentence_of(meaning, unit) == sentence


@pytest.mark.parametrize("text", ["[0, ", "2026-13-45", "{a: 1, a: 2}"])
def test_text_that_cannot_be_read_is_told_by_the_spec(text: str) -> None:
    told = rf"pools\[0\].cpus is '{re.escape(text)}'; give auto, null, or a list of cores such as"
    with pytest.raises(SpecError, match=told):
        changed(pools={"cpus": text})
