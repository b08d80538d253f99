"""The doctor measures a cluster that runs, names what is slow or broken in it, and leaves it as it was."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.deploy.local import LocalCluster
from cluster.spec.assumed import Assumed
from engine.types import Step
from kv_transfer.transports.faulty import Faults
from kvrelay.client.client import AsyncClient
from kvrelay.client.types import GenerateOptions, KvrelayError
from kvrelay.doctor.finding import Finding
from kvrelay.doctor.live.checks import live_checks
from tests.serving.conftest import ModelDir
from tests.serving.harness import engine_with, worker_with
from tests.serving.test_calibrate_verify import kvrelay

SLOW_S = 0.08  # a step
PROMPT_TOKENS = 48


def cluster(model: Path, *, decode: int = 1, **more: Any) -> LocalCluster:
    return LocalCluster(str(model), decode=decode, engine=engine_with(), worker=worker_with(), **more)


def verdicts(findings: Iterable[Finding], part: str) -> dict[str, str]:
    return {finding.name: finding.verdict for finding in findings if finding.part == part}


async def checked(served: LocalCluster, **assumed_s: float) -> list[Finding]:
    assumed = Assumed(prompt_tokens=PROMPT_TOKENS, **assumed_s)
    async with AsyncClient(served.endpoint) as client:
        return await live_checks(client, assumed={"prefill": assumed, "decode": assumed}, at_most_s=60.0)


async def test_every_pair_and_worker_of_a_cluster_is_measured(model_dir: ModelDir, tmp_path: Path) -> None:
    spec = tmp_path / "cluster.yaml"
    assumed = {"prompt_tokens": PROMPT_TOKENS, "prefill_s": 60.0, "decode_s": 60.0, "transfer_s": 60.0}
    pools = [{"role": "prefill", "assumed": assumed}, {"role": "decode", "replicas": 2, "assumed": assumed}]
    spec.write_text(yaml.safe_dump({"model": str(model_dir("llama")), "pools": pools}))
    async with cluster(model_dir("llama"), decode=2) as served:
        asked = ("doctor", str(spec), "--endpoint", served.endpoint, "--json")
        code, out, err = await kvrelay(*asked)
        assert code == 0, out + err
        assert "one at a time and behind all others" in err
        checks = [Finding(**each) for each in json.loads(out)["checks"]]
        assert verdicts(checks, "links").keys() == {"prefill-0 to decode-0", "prefill-0 to decode-1"}
        assert "bad" not in verdicts(checks, "links").values()  # though one may be an outlier on a machine that is busy
        assert verdicts(checks, "prefill steps") == {"prefill-0": "good"}
        assert verdicts(checks, "decode steps").keys() == {"decode-0", "decode-1"}
        assert {"software", "engine", "machine", "cluster"} <= {check.part for check in checks}
        assert all("GB/s" in check.found and "planned" in check.found for check in checks if check.part == "links")
        await served.settled()
        served.check_invariants()


async def test_a_worker_that_is_slower_than_planned_is_named(model_dir: ModelDir) -> None:
    async with cluster(model_dir("llama"), decode=2) as served:
        slow = served.decode[1].engine
        begin = slow.begin

        def later(step: Step) -> Any:
            time.sleep(SLOW_S)
            return begin(step)

        slow.begin = later  # type: ignore[method-assign]
        findings = await checked(served, decode_s=SLOW_S / 10)
        assert verdicts(findings, "decode steps")["decode-1"] == "bad"
        named = next(finding for finding in findings if finding.verdict == "bad" and finding.name == "decode-1")
        assert "planned 8.0 ms" in named.found
        assert named.mend
        await served.settled()


async def test_a_pair_that_cannot_hand_over_is_named(model_dir: ModelDir) -> None:
    async with cluster(model_dir("llama"), faults=Faults(drop_all=True)) as served:
        findings = await checked(served)
        assert verdicts(findings, "links") == {"prefill-0 to decode-0": "bad"}
        assert not verdicts(findings, "decode steps")
        await served.settled()


async def test_a_mixed_worker_has_steps_and_no_link(model_dir: ModelDir) -> None:
    async with cluster(model_dir("llama"), prefill=0, decode=0, mixed=1) as served:
        findings = await checked(served)
        assert not verdicts(findings, "links")
        assert verdicts(findings, "prefill steps").keys() == verdicts(findings, "decode steps").keys() == {"mixed-0"}


async def test_each_model_s_workers_are_measured(model_dir: ModelDir) -> None:
    async with cluster(model_dir("llama"), models={"gemma": str(model_dir("gemma2"))}) as served:
        findings = await checked(served, decode_s=60.0)
        steps = {"decode-0": "good", "gemma-decode-0": "unknown"}  # what is assumed of a role is not of the other model
        assert verdicts(findings, "decode steps") == steps
        assert verdicts(findings, "links").keys() == {"prefill-0 to decode-0", "gemma-prefill-0 to gemma-decode-0"}
        await served.settled()


async def test_only_whole_pairs_can_be_named(model_dir: ModelDir) -> None:
    async with cluster(model_dir("llama")) as served, AsyncClient(served.endpoint) as client:
        wrong: tuple[tuple[GenerateOptions, str], ...] = (
            ({"prefill_worker": "prefill-0"}, "give both, or neither"),
            ({"prefill_worker": "prefill-0", "decode_worker": "decode-9"}, "decode_worker is 'decode-9'"),
        )
        for named, why in wrong:
            with pytest.raises(KvrelayError, match=why) as refused:
                await client.generate([5, 6, 7], **named)
            assert refused.value.code == "INVALID_ARGUMENT"


async def test_a_router_that_does_not_answer_is_bad() -> None:
    code, out, _ = await kvrelay("doctor", "--endpoint", "127.0.0.1:1", "--json")
    assert code == 1
    assert json.loads(out)["checks"][-1]["verdict"] == "bad"
