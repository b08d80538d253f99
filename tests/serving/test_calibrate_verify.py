"""A running cluster is measured, its profile predicts, and the prediction is checked against it: all by the command."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.deploy.local import LocalCluster
from engine.options import EngineOptions
from kvrelay.calibrate.loading import BUSY, MOST_REQUESTS
from placement.build.from_profile import sim_cluster
from placement.checks.margin import load_margin
from placement.latency.profile import Profile
from placement.latency.profile_file import read_profile, write_profile
from prefill_worker.options import PrefillOptions
from tests.placement.latency.test_profile import profile
from tests.serving.conftest import ModelDir

MAX_LEN = 192
VERIFYING = ("verify", "--profile", "GOOD", "--request-rate", "1", "--random-input-len", "9")
LIMITS: dict[str, Any] = {"max_batch_tokens": 64, "pack_tokens": 32, "max_batch_size": 4}


async def kvrelay(*arguments: str) -> tuple[int, str, str]:
    """The command in a process of its own, as a person would run it; exit code, stdout, stderr."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvrelay.cli.main"),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"COLUMNS": "160"},
    )
    out, err = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def cluster(model: Path) -> LocalCluster:
    engine = EngineOptions(model="", num_pages=256, max_model_len=MAX_LEN)
    return LocalCluster(str(model), engine=engine, worker=LIMITS)


async def test_a_cluster_is_calibrated_and_the_prediction_verified(model_dir: ModelDir, tmp_path: Path) -> None:
    profile_path, margin_path = tmp_path / "profile.json", tmp_path / "margin.json"
    async with cluster(model_dir("llama")) as served:
        calibrating = ("calibrate", "--endpoint", served.endpoint, "--quick", "--repeats", "1", "--minutes", "0.1")
        code, out, err = await kvrelay(*calibrating, "--out", str(profile_path), "--json")
        assert code == 0, err
        await check_profile(profile_path, json.loads(out))
        workload = ("--random-input-len", "40", "--random-output-len", "8", "--random-range-ratio", "0.5")
        asked = ("verify", "--profile", str(profile_path), "--endpoint", served.endpoint, *workload)
        verifying = (*asked, "--request-rate", "20", "--num-prompts", "40", "--ttft", "2s", "--tpot", "500ms")
        code, out, err = await kvrelay(*verifying, "--json")
        assert code == 0, err
        check_verified(json.loads(out))
        code, out, err = await kvrelay(*verifying, "--repeats", "2")
        assert code == 0, err
        assert "TTFT P90 was off by " in out
        for words in ("Time to first token, P90", "Within TTFT 2000 ms, TPOT 500 ms", "decode queue", str(margin_path)):
            assert words in out
        assert len(load_margin(margin_path).runs) == 3
        correcting = ("calibrate", "--endpoint", served.endpoint, "--correct", str(profile_path))
        code, out, err = await kvrelay(*correcting, "--out", str(tmp_path / "corrected.json"), "--json")
        assert code == 0, err
        check_corrected(json.loads(out), read_profile(profile_path))
        await served.settled()
        served.check_invariants()


def check_corrected(printed: dict[str, Any], before: Profile) -> None:
    """By all that was served meanwhile."""
    assert len(printed["prefill"]) == len(before.prefill)
    assert sum(run["requests"] for run in printed["load"]["runs"]) > 120


async def check_profile(path: Path, printed: dict[str, Any]) -> None:
    profile = read_profile(path)
    assert printed["format"] == "kvrelay-profile"
    assert (profile.page_size, profile.prefill_pool.num_pages, profile.decode_pool.count) == (16, 256, 1)
    assert profile.prefill_pool.options["pack_tokens"] == 32
    tokens = [point.tokens for point in profile.prefill]
    assert {1, 64} <= set(tokens)  # the least, and a full step
    assert any(start for point in profile.prefill for _, start in point.chunks)  # behind a cached beginning
    assert {1, 4} <= {point.batch_size for point in profile.decode}
    assert [point.bytes for point in profile.transfer] == sorted(point.bytes for point in profile.transfer)
    assert any(point.held_out for point in profile.prefill)
    assert profile.error.prefill > 0  # of points that are in no table
    assert profile.is_shared_host  # measured together
    assert profile.load is not None
    runs = profile.load.runs
    assert 1 <= len(runs) <= len(BUSY)
    assert [run.at_s for run in runs] == sorted(run.at_s for run in runs)
    assert all(0 < run.requests <= MOST_REQUESTS for run in runs)
    for phase in (profile.load.prefill, profile.load.decode):
        assert phase.beside >= phase.alone > 0
    limits = sim_cluster(profile).workers[0].policy
    assert isinstance(limits, PrefillOptions)
    assert (limits.max_batch_tokens, limits.pack_tokens) == (64, 32)


async def test_a_mixed_worker_is_calibrated_and_its_prediction_verified(model_dir: ModelDir, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    engine = EngineOptions(model="", num_pages=256, max_model_len=MAX_LEN)
    worker = LIMITS | {"chunk_tokens": 32, "threads": 1}
    lone = LocalCluster(str(model_dir("llama")), prefill=0, decode=0, mixed=1, engine=engine, worker=worker)
    async with lone as served:
        asked = ("--endpoint", served.endpoint)
        code, out, err = await kvrelay("calibrate", *asked, "--quick", "--repeats", "1", "--out", str(path), "--json")
        assert code == 0, err
        profile = read_profile(path)
        assert json.loads(out)["mixed"]
        assert {(point.batch_size, point.tokens) for point in profile.mixed} >= {(1, 8), (1, 32)}
        assert (profile.threads, profile.transfer, profile.slowdown) == (1, (), ())
        assert {1, 4} <= {point.batch_size for point in profile.decode}
        workload = ("--random-input-len", "40", "--random-output-len", "8", "--request-rate", "20")
        counted = ("--num-prompts", "40", "--ttft", "2s", "--tpot", "500ms", "--json")
        code, out, err = await kvrelay("verify", "--profile", str(path), *asked, *workload, *counted)
        assert code == 0, err
        check_verified(json.loads(out))
        served.check_invariants()


def check_verified(found: dict[str, Any]) -> None:
    assert found["num_requests"] == 40
    assert found["failed"] == 0
    assert [(row["metric"], row["percentile"]) for row in found["rows"]] == [
        (metric, p) for metric in ("ttft", "tpot", "e2e") for p in (50.0, 90.0, 99.0)
    ]
    for row in found["rows"]:
        assert row["measured"] > 0
        assert row["error"] == pytest.approx(row["measured"] / row["predicted"]["value"] - 1)
    assert 0 <= found["measured_attainment"] <= 1
    predicted, measured = zip(*found["phases_s"].values(), strict=True)
    assert all(seconds >= 0 for seconds in (*predicted, *measured))
    assert list(found["phases_s"])[:3] == ["route", "prefill_queue", "prefill"]
    assert found["margin"]["runs"] == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("verify",), "nothing says what was predicted"),
        (("verify", "PLAN"), "cannot be read"),
        (("verify", "--profile", "EMPTY", "--request-rate", "1", "--random-input-len", "9"), "format is not"),
        (("verify", "--profile", "EMPTY"), "--profile needs --request-rate"),
        (("verify", "--profile", "EMPTY", "--request-rate", "1"), "--profile needs a workload"),
        (("verify", "EMPTY"), "is no plan of this version"),
        (("verify", "EMPTY", "--profile", "EMPTY"), "do not go together"),
        (("verify", "--profile", "EMPTY", "--ttft", "soon"), "--ttft is 'soon'"),
        ((*VERIFYING, "--margin", "/nowhere/margin.json"), "--margin is /nowhere/margin.json, where no file"),
        (("calibrate", "--repeats", "0"), "--repeats is 0"),
        (("calibrate", "--minutes", "-1"), "--minutes is -1"),
        (("calibrate", "--out", "/nowhere/profile.json"), "--out is /nowhere/profile.json"),
        (("calibrate", "--correct", "PLAN"), "cannot be read"),
        (("calibrate", "--correct", "EMPTY"), "format is not"),
    ],
)
def test_what_is_typed_wrong_is_one_sentence(
    arguments: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import typer

    from kvrelay.cli import main as cli

    (tmp_path / "empty.json").write_text("{}")
    write_profile(profile(), tmp_path / "good.json")
    names = {key: str(tmp_path / f"{key.lower()}.json") for key in ("EMPTY", "GOOD", "PLAN")}
    cli._register()
    command: Any = typer.main.get_command(cli.app)
    with pytest.raises(SystemExit) as ended:
        command([names.get(word, word) for word in arguments], prog_name="kvrelay")
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1, error


async def test_a_cluster_of_another_size_is_not_verified(model_dir: ModelDir, tmp_path: Path) -> None:
    made = profile()
    write_profile(replace(made, decode_pool=replace(made.decode_pool, count=3)), tmp_path / "profile.json")
    async with cluster(model_dir("llama")) as served:
        asked = ("verify", "--profile", str(tmp_path / "profile.json"), "--endpoint", served.endpoint)
        workload = ("--request-rate", "5", "--random-input-len", "9", "--random-output-len", "3")
        code, out, err = await kvrelay(*asked, *workload, "--json")
    assert code == 2
    assert "is for 3 decode workers, and 1 are ready" in json.loads(out)["error"]["message"]
    assert "Traceback" not in err
