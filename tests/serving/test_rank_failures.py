"""A rank that is killed at any moment takes its worker with it, and no more: clients get their tokens from others.

Whoever keeps a worker ends it when it says that it is broken; here its server vanishes.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from cluster.deploy.local import LocalCluster
from engine.engine import Engine
from engine.errors import EngineBroken
from engine.parallel.processes import Processes
from engine.types import SampledToken, Step
from kv_transfer.base import Segment
from kv_transfer.transports.faulty import Faults
from kvrelay.client.client import AsyncClient
from tests.serving.conftest import ModelDir
from tests.serving.harness import (
    ROUTER,
    WAIT_S,
    Gate,
    engine_with,
    random_prompt,
    transformers_tokens,
    until,
    worker_with,
)
from worker.driver import Worker

PROMPT_LENS = (70, 33)
NEW_TOKENS = 12
MANY_TOKENS = 60  # so that one who decodes can be moved meanwhile


class Killer:
    """Kills the rank of one worker, once it is told whose."""

    def __init__(self) -> None:
        self.is_armed = False
        self.pids: list[int] = []

    def kill(self, worker: Worker[Any]) -> None:
        if self.is_armed:
            self.is_armed = False
            [pid] = worker.engine.model.ranks.pids  # type: ignore[union-attr]
            os.kill(pid, signal.SIGKILL)
            self.pids.append(pid)

    def before_steps_of(self, worker: Worker[Any], then: Callable[[Worker[Any]], None]) -> None:
        original = worker.engine.step

        def step(step: Step) -> list[SampledToken]:
            then(worker)
            return original(step)

        worker.engine.step = step  # type: ignore[method-assign]


async def _first_broken(workers: list[Worker[Any]]) -> Worker[Any]:
    waiting = {asyncio.create_task(worker.wait_broken()): worker for worker in workers}
    async with asyncio.timeout(WAIT_S):
        done, rest = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
    [lost] = done
    with pytest.raises(EngineBroken, match=r"was ended by signal 9$"):
        lost.result()
    return waiting[lost]


async def test_whoever_loses_a_rank_whenever_the_client_gets_its_tokens(model_dir: ModelDir) -> None:
    prompts = [random_prompt(length, seed) for seed, length in enumerate(PROMPT_LENS)]
    wanted = transformers_tokens(model_dir("llama"), prompts, NEW_TOKENS)
    killer, senders, faults = Killer(), list[Worker[Any]](), Faults()
    cluster = LocalCluster(
        str(model_dir("llama")),
        prefill=3,
        decode=3,
        engine=engine_with(tensor_parallel=2),
        worker=worker_with(layers_per_group=1),
        router=ROUTER,
        faults=faults,
    )

    def receiver() -> Worker[Any]:
        return next(worker for worker in cluster.decode if worker.role.reservations.handoffs.leases.leased_pages)

    def kill_before_send(whose: Callable[[], Worker[Any]]) -> Callable[[Segment], None]:
        return lambda segment: killer.kill(whose()) if segment.layers.start else None  # in the middle of it

    async with cluster, AsyncClient(cluster.endpoint) as client:
        everyone = list(cluster.prefill), list(cluster.decode)
        for worker in cluster.prefill:
            killer.before_steps_of(worker, senders.append)

        async def lose_one(arm: Callable[[], None]) -> None:
            arm()
            killer.is_armed = True
            how: dict[str, Any] = {"temperature": 0.0, "max_tokens": NEW_TOKENS, "min_tokens": NEW_TOKENS}
            asking = asyncio.gather(*(client.generate(p, timeout_s=WAIT_S, **how) for p in prompts))
            lost = await _first_broken([*cluster.prefill, *cluster.decode])
            await lost._server.stop(0)  # its process ends
            cluster.prefill = [worker for worker in cluster.prefill if worker is not lost]
            cluster.decode = [worker for worker in cluster.decode if worker is not lost]
            faults.before_send = None
            assert [list(answer.token_ids) for answer in await asking] == wanted
            await cluster.settled()
            cluster.check_invariants()

        def before_steps(workers: list[Any]) -> None:
            for worker in workers:
                killer.before_steps_of(worker, killer.kill)

        await lose_one(lambda: setattr(faults, "before_send", kill_before_send(lambda: senders[-1])))
        await lose_one(lambda: setattr(faults, "before_send", kill_before_send(receiver)))
        await lose_one(lambda: before_steps(cluster.decode))
        await lose_one(lambda: before_steps(cluster.prefill))
        assert (len(cluster.prefill), len(cluster.decode)) == (1, 1)
        await until(lambda: not any(map(psutil.pid_exists, killer.pids)), "a killed rank is waited for")
        cluster.prefill, cluster.decode = everyone  # whom its end stops


@pytest.mark.parametrize("end", ["source", "target"])
async def test_whoever_loses_a_rank_in_a_move_the_client_gets_its_tokens(model_dir: ModelDir, end: str) -> None:
    prompts = [random_prompt(length, seed) for seed, length in enumerate(PROMPT_LENS)]
    wanted = transformers_tokens(model_dir("llama"), prompts, MANY_TOKENS)
    killer, faults = Killer(), Faults()
    cluster = LocalCluster(
        str(model_dir("llama")),
        prefill=0,
        decode=0,
        mixed=3,
        engine=engine_with(tensor_parallel=2),
        worker=worker_with(layers_per_group=1, report_interval_s=0.05),
        router=ROUTER,
        faults=faults,
    )
    async with cluster, AsyncClient(cluster.endpoint) as client:
        everyone: list[Any] = list(cluster.mixed)
        gates = [Gate(worker.engine, at=10) for worker in everyone]
        how: dict[str, Any] = {"temperature": 0.0, "max_tokens": MANY_TOKENS, "min_tokens": MANY_TOKENS}
        asking = asyncio.gather(*(client.generate(p, timeout_s=WAIT_S, **how) for p in prompts))

        def decoding() -> list[Any]:
            return [w for w in everyone if any(r.num_outputs > 1 for r in w.role.requests.values())]

        await until(decoding, "one decodes")
        source = decoding()[0]

        def kill(segment: Segment) -> None:
            if segment.layers.start:  # in the middle of it
                target = next(worker for worker in everyone if worker.role.receiver.leases.leased_pages)
                killer.kill(source if end == "source" else target)

        killer.is_armed = True
        faults.before_send = kill
        source.is_draining = True
        for gate in gates:
            gate.open()
        lost = await _first_broken(everyone)
        assert (lost is source) == (end == "source")
        await lost._server.stop(0)  # its process ends
        cluster.mixed = [worker for worker in everyone if worker is not lost]
        faults.before_send = None
        assert [list(answer.token_ids) for answer in await asking] == wanted
        await cluster.settled()
        cluster.check_invariants()
        cluster.mixed = everyone  # whom its end stops


@pytest.mark.parametrize("after", ["begin", "loaded"])
async def test_a_rank_that_is_killed_while_it_loads_is_told(
    model_dir: ModelDir, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids: list[int] = []
    original: Any = {"begin": Processes.wait_loaded, "loaded": Processes.ask}[after]

    def kill_first(self: Processes, *args: Any) -> Any:
        if not pids:
            pids.extend(self.pids)
            os.kill(pids[0], signal.SIGKILL)
        return original(self, *args)

    monkeypatch.setattr(Processes, original.__name__, kill_first)
    options = engine_with(model=str(model_dir("llama")), tensor_parallel=2)
    with pytest.raises(EngineBroken, match=r"^rank 1 \(process \d+\) was ended by signal 9$"):
        await asyncio.to_thread(Engine.load, options)
    await until(lambda: not psutil.pid_exists(pids[0]), "it is waited for")
