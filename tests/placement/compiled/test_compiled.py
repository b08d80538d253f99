"""Compiled or not, a simulation has one outcome."""

from __future__ import annotations

import importlib
import multiprocessing
import pkgutil
import shutil
import sys
from concurrent.futures import BrokenExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decode_worker.options import DecodeOptions
from mixed_worker.options import MixedOptions
from placement.compiled.constructors import with_constructors
from placement.compiled.pool import call, packed, simulation_pool
from placement.latency.scaled import scaled_latency
from placement.latency.speculation import Speculation
from placement.papers.distserve.coefficients import distserve_latency
from placement.papers.distserve.rules import DistServeCluster
from placement.papers.distserve.rules import simulate as simulate_distserve
from placement.simulator.cluster import Drain, RoleChange
from placement.simulator.outcome import Outcome
from placement.simulator.simulate import simulate
from placement.workload.closed_loop import ClosedLoop
from tests.placement.simulator.test_simulate import cluster, requests, workers


def import_all(*packages: str) -> None:
    for package in packages:
        for found in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            importlib.import_module(found.name)


def where_the_policies_are() -> str:
    return str(sys.modules["decode_worker.policy"].__file__)


@pytest.mark.timeout(900)  # the first time it compiles: a minute, but on a loaded machine
@pytest.mark.skipif(shutil.which("cc") is None and shutil.which("gcc") is None, reason="no C compiler")
def test_the_compiled_simulator_finds_the_same() -> None:
    latency = distserve_latency("opt_13b", 1)
    short = cluster(workers("prefill", 2, latency=latency), workers("decode", 2, latency=latency, num_pages=60))
    both = cluster(workers("mixed", 2, latency=latency, num_pages=60), workers("prefill", latency=latency))
    workload = requests(rate=10)
    numbers = np.arange(len(workload))
    left = replace(workload, priority=numbers % 3 - 1, cancel_after_s=np.where(numbers % 4, np.inf, 0.5))
    became = RoleChange(worker="mixed-1", at_s=5.0, role="decode", policy=DecodeOptions(max_batch_size=16))
    trouble = replace(both, num_routers=2, role_changes=(became,), drains=(Drain(worker="mixed-1", at_s=4.0),))
    guesses = Speculation(num_tokens=4, acceptance=0.7, draft=scaled_latency(latency, 0.05))
    guessing = [
        *workers("decode", 2, latency=latency, policy=DecodeOptions(num_speculative_tokens=4)),
        *workers("mixed", latency=latency, policy=MixedOptions(num_speculative_tokens=4)),
    ]
    guessing = [replace(worker, speculation=guesses) for worker in guessing]
    ahead = cluster(workers("prefill", 2, latency=latency), guessing)
    in_turn = replace(left, loop=ClosedLoop(max_concurrency=9, think_s=0.01))
    with simulation_pool(1) as pool:
        found: list[Outcome] = [
            pool.submit(call, packed(simulate, short, workload)).result(),
            pool.submit(call, packed(simulate, both, workload)).result(),
            pool.submit(call, packed(simulate, trouble, left)).result(),
            pool.submit(call, packed(simulate, both, in_turn)).result(),
            pool.submit(call, packed(simulate, ahead, workload)).result(),
            pool.submit(
                call, packed(simulate_distserve, DistServeCluster(prefill=latency, decode=latency), workload)
            ).result(),
        ]
        assert not pool.submit(where_the_policies_are).result().endswith(".py")
        pool.submit(import_all, "placement", "kvrelay.calibrate").result()  # what is not compiled is there, too
    expected = [
        simulate(short, workload),
        simulate(both, workload),
        simulate(trouble, left),
        simulate(both, in_turn),
        simulate(ahead, workload),
        simulate_distserve(DistServeCluster(prefill=latency, decode=latency), workload),
    ]
    assert expected[0].counters["preempted"] > 0
    assert expected[2].counters["cancelled"] > 20
    assert expected[2].counters["role_changes"] == 1
    assert expected[4].counters["accepted_tokens"] > 100
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one.first_token_s, other.first_token_s, equal_nan=True)
        assert np.array_equal(one.finish_s, other.finish_s, equal_nan=True)
        assert np.array_equal(one.workload.arrival_s, other.workload.arrival_s)
        assert one.counters == other.counters


def test_without_a_compiler_the_sources_run_and_a_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    workload = requests(20)
    for _ in range(2):
        with simulation_pool(1, cache=tmp_path) as pool:
            outcome: Outcome = pool.submit(
                call, packed(simulate, cluster(workers("prefill"), workers("decode")), workload)
            ).result()
        assert outcome.served == 20
    assert [record.getMessage() for record in caplog.records] == [
        "the simulator runs uncompiled, at about a quarter of its speed: "
        "there is no C compiler no-such-compiler; install one, or name it in CC"
    ]


def test_a_dataclass_with_its_constructor_written_out_is_the_same() -> None:
    source = """
from dataclasses import dataclass, field

@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    name: str
    sizes: list[int] = field(default_factory=lambda: [1, 2])
    share: float = 0.5

    def __post_init__(self) -> None:
        if self.share > 1:
            raise ValueError(self.share)

@dataclass(slots=True)
class Account:
    value: Value
    waiting: dict[str, int] = field(default_factory=dict)
"""
    made = []
    for text in (source, with_constructors(source)):
        space: dict[str, Any] = {"__name__": __name__}
        exec(text, space)
        account = space["Account"](space["Value"](name="a"))
        account.waiting["x"] = 1
        with pytest.raises(ValueError, match="7"):
            space["Value"](name="b", share=7)
        with pytest.raises(TypeError):
            space["Value"]("a")
        assert space["Account"](account.value).waiting == {}
        twins = [space["Value"](name="a", sizes=(), share=0.1) for _ in range(2)]
        assert hash(twins[0]) == hash(twins[1])
        made.append(repr(account))
    assert made[0] == made[1]


class Unreadable:
    """Cannot be made again in another process."""

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return int, ("no number",)


def test_a_task_that_a_process_cannot_read_is_told() -> None:
    with simulation_pool(1) as pool, pytest.raises(ValueError, match="no number"):
        pool.submit(call, packed(simulate, Unreadable())).result()


def test_processes_that_are_ended_from_outside_are_told_and_the_pool_is_left() -> None:
    others = set(multiprocessing.active_children())
    with simulation_pool(2) as pool:
        assert pool.submit(where_the_policies_are).result()
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()  # as `timeout` does, to all of a group
        with pytest.raises(BrokenExecutor):
            pool.submit(where_the_policies_are).result(timeout=60)
    assert not set(multiprocessing.active_children()) - others
