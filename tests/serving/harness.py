"""What the tests of a whole cluster share: options for small clusters, prompts, and what transformers says to them."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.deploy.local import LocalCluster
from cluster.front.server import ServerOptions, server_options
from cluster.router.monitoring.status import status_of
from engine.engine import Engine
from engine.options import EngineOptions
from engine.types import SampledToken, Step
from kvrelay.client.client import AsyncClient
from kvrelay.client.types import Completion
from placement.checks.replay import Replayed, read_recording, replay
from tests.greedy import eager_model, greedy_tokens
from tests.zoo import VOCAB
from worker.driver import Worker

PAGE_SIZE = 16  # tokens
WAIT_S = 30.0  # for what must happen soon; a test that waits so long has failed
FIRST_ID = 5  # below are the special tokens
ENGINE = EngineOptions(
    model="", dtype="float32", page_size=PAGE_SIZE, num_pages=96, max_model_len=512, threads=1, parity_check=False
)
WORKER: dict[str, object] = {"max_batch_tokens": 48, "short_prompt_tokens": 32, "connect_timeout_s": WAIT_S}
ROUTER = server_options(dead_after_s=20.0)  # a machine that stands still for a while loses no worker


def engine_with(**changes: object) -> EngineOptions:
    return replace(ENGINE, **changes)  # type: ignore[arg-type]


def worker_with(**changes: object) -> dict[str, object]:
    return WORKER | changes


def router_with(**changes: object) -> ServerOptions:
    return server_options(**{"dead_after_s": 20.0, **changes})


def random_prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(FIRST_ID, VOCAB) for _ in range(length)]


async def generate_all(client: AsyncClient, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Completion]:
    """Greedy answers of so many tokens to all at once."""
    how: dict[str, Any] = {"temperature": 0.0, "max_tokens": new_tokens, "min_tokens": new_tokens, "timeout_s": 60}
    return await asyncio.gather(*(client.generate(list(prompt), **how) for prompt in prompts))


def tokens_of(answers: Sequence[Completion]) -> list[list[int]]:
    return [list(each.token_ids) for each in answers]


def transformers_tokens(directory: Path, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """What `generate` makes of each prompt alone: greedy, in float32, with the model's own eager attention."""
    model = eager_model(directory)
    return [greedy_tokens(model, prompt, new_tokens) for prompt in prompts]


def counters(cluster: LocalCluster) -> Counter[str]:
    """The sum of all workers' counters, and the router's under `router_` names."""
    total: Counter[str] = Counter()
    for worker in cluster.workers:
        total.update(worker.report().counters)
    assert cluster.server is not None
    for name, count in cluster.server.router.metrics.counts.items():
        total[f"router_{name}"] += count
    return total


class Gate:
    """Holds a worker's engine before a step: `reached` says that it stands there, `open` lets it and all others go.

    `at`: the first step to hold, counted from 1. `seen`: the ids of what steps have computed, in their order.
    """

    def __init__(self, engine: Engine, at: int = 1) -> None:
        self._original = engine.step
        self._at = at
        self._steps = 0
        self.seen: list[str] = []
        self._reached = threading.Event()
        self._open = threading.Event()
        engine.step = self._step  # type: ignore[method-assign]

    def _step(self, step: Step) -> list[SampledToken]:
        self._steps += 1
        self.seen += [chunk.request_id for chunk in step.chunks]
        if self._steps >= self._at:
            self._reached.set()
            assert self._open.wait(WAIT_S), "a test left a gate closed"
        return self._original(step)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, WAIT_S), "the engine never came to the gate"

    def open(self) -> None:
        self._open.set()


async def leave(worker: Worker[Any], gate: Gate, *, drains: bool) -> None:
    """The worker that stands at the gate drains until all have left it, or is gone for all others."""
    if drains:
        worker.is_draining = True
        await until(lambda: worker.role.moves._moves, "one of them moves")  # else it could be done before
        gate.open()
        await until(lambda: not worker.role.requests, "it is left by all")
    else:
        await worker._server.stop(0)
        gate.open()


def state_of(cluster: LocalCluster, name: str) -> tuple[str, str]:
    """A worker's role and state, as `kvrelay status` shows them."""
    assert cluster.server is not None
    worker = next(worker for worker in status_of(cluster.server.router).workers if worker.name == name)
    return worker.role, worker.state


def replays(*recordings: Path) -> list[Replayed]:
    """Each gives every decision again that was made when it was recorded."""
    replayed = [replay(read_recording(path)) for path in recordings]
    for each in replayed:
        assert each.difference is None, str(each.difference)
    return replayed


async def until(predicate: Callable[[], object], what: str) -> None:
    """Wait for something that happens by itself."""
    deadline = time.monotonic() + WAIT_S
    while not predicate():
        assert time.monotonic() < deadline, f"never happened: {what}"
        await asyncio.sleep(0.002)
