"""A capture that fails leaves the device's current stream and the allocator as they were, and the sizes that could be
captured serve: on a stand-in that fails as torch's capture does."""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import ReferenceType, ref

import pytest
import torch

from engine.engine import Engine
from engine.errors import EngineBroken
from engine.gpu.graphs import cuda_capture
from engine.gpu.steps import GpuSteps
from engine.options import EngineOptions
from tests.engine.attention import fake_flashinfer
from tests.engine.rehearsal import RehearsedGpu, run_again
from tests.engine.test_engine import greedy, prompts, save
from tests.engine.test_execution import of_cuda
from tests.zoo import make_tiny_model

GPU = torch.device("cuda", 0)
Pool = tuple[int, int]
NOT_PERMITTED, INVALIDATED, ILLEGAL_ADDRESS = 900, 901, 700


@dataclass
class Cuda:
    """torch.cuda's state that a capture touches: it allocates to a pool on the device and to one of the host's memory,
    and a capture whose end fails ends neither. The host's has no other way to end."""

    stream: str = "the engine's"
    recording: list[Pool] = field(default_factory=list)  # pools that allocations go to
    users: Counter[Pool] = field(default_factory=Counter)  # of each pool that the device's allocator knows
    pools: int = 0  # handles given out
    end_fails: bool = False  # of the next capture
    host_recording: dict[Pool, ReferenceType[Any]] = field(default_factory=dict)  # the graph that it asks at each call

    def begin(self, graph: object, pool: Pool) -> None:
        if pool in self.recording or pool in self.host_recording:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        if pool in self.users and not self.users[pool]:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self.recording.append(pool)
        self.users[pool] += 1
        self.host_recording[pool] = ref(graph)

    def new_pool(self) -> Pool:
        self.pools += 1
        return (0, self.pools)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        cuda = self

        class Graph:
            pool: Pool | None = None  # where it was captured

            def replay(self) -> None: ...

            def reset(self) -> None:
                if self.pool is not None:
                    cuda.users[self.pool] -= 1
                self.pool = None

        @contextmanager
        def capturing(graph: Graph, pool: Pool) -> Iterator[None]:
            before, cuda.stream = cuda.stream, "the capture's"
            cuda.begin(graph, pool)
            try:
                yield
            finally:  # torch ends a capture before it goes back to the stream
                if cuda.end_fails:
                    raise of_cuda(INVALIDATED, "CUDA error: operation failed due to a previous error during capture")
                cuda.recording.remove(pool)
                del cuda.host_recording[pool]
                graph.pool = pool
                cuda.stream = before

        @contextmanager
        def stream(_: str) -> Iterator[None]:
            before = cuda.stream
            try:
                yield
            finally:
                cuda.stream = before

        def end(_: int, pool: Pool) -> None:
            if pool not in cuda.recording:
                raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
            cuda.recording.remove(pool)

        def release(_: int, pool: Pool) -> None:
            cuda.users[pool] -= 1

        for name, value in {
            "graph_pool_handle": cuda.new_pool,
            "synchronize": lambda _: None,
            "CUDAGraph": Graph,
            "graph": capturing,
            "stream": stream,
            "current_stream": lambda _: cuda.stream,
        }.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
        patch.setattr(torch._C, "_cuda_releasePool", release, raising=False)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    made.install(monkeypatch)
    return made


def waits() -> torch.Tensor:
    raise of_cuda(NOT_PERMITTED, "CUDA error: operation not permitted when stream is capturing")


@pytest.mark.parametrize("end_fails", [False, True])
@pytest.mark.parametrize("captured_before", [0, 1])
def test_a_capture_that_fails_leaves_nothing_behind_and_others_follow(
    cuda: Cuda, end_fails: bool, captured_before: int
) -> None:
    capture = cuda_capture(GPU)
    kept = [capture(lambda: torch.ones(1)) for _ in range(captured_before)]
    for _ in range(2):
        cuda.end_fails = end_fails
        with pytest.raises(RuntimeError, match="capturing" if not end_fails else "previous error"):
            capture(waits)
        assert (cuda.stream, cuda.recording, cuda.users.total()) == ("the engine's", [], len(kept))
        cuda.end_fails = False
        kept.append(capture(lambda: torch.ones(1)))
    assert cuda.users.total() == len(kept)


def test_a_graph_that_the_allocator_still_asks_is_kept(cuda: Cuda) -> None:
    cuda.end_fails = True
    with pytest.raises(RuntimeError):
        cuda_capture(GPU)(waits)
    gc.collect()
    (graph,) = cuda.host_recording.values()
    assert graph() is not None, "torch's allocator of host memory would call what is gone"


class Failing(RehearsedGpu):
    """Cannot capture the graphs of these sizes, by what torch says when one ends."""

    def __init__(self, sizes: set[int], error: Exception) -> None:
        super().__init__("tensor", True, fake_flashinfer)
        self._sizes = sizes
        self._error = error

    def capture(self) -> Callable[..., tuple[Callable[[], object], torch.Tensor]]:
        def capture(run: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
            if len(run()) not in self._sizes:
                return run_again(run)
            try:
                raise self._error
            finally:
                raise of_cuda(INVALIDATED, "CUDA error: operation failed due to a previous error during capture")

        return capture


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("llama"), "LlamaConfig")


def load(directory: str, platform: RehearsedGpu) -> Engine:
    small: dict[str, Any] = {"num_pages": 64, "dtype": "float32", "device": "cpu", "max_graph_batch": 4}
    options = EngineOptions(model=directory, max_model_len=128, **small)
    return Engine.load(options, platform=platform)


@pytest.mark.parametrize(
    ("failing", "sizes", "said"),
    [
        (set(), (1, 2, 4), ""),
        ({4}, (1, 2), "no CUDA graph could be made for decode steps of 4 requests"),
        ({2}, (1, 4), "no CUDA graph could be made for decode steps of 2 requests"),
        ({1, 2, 4}, (), "no CUDA graph could be made for decode steps of 4, 2, 1 requests"),
    ],
)
def test_sizes_that_cannot_be_captured_are_left_out_and_said_in_one_sentence(
    directory: str, caplog: pytest.LogCaptureFixture, failing: set[int], sizes: tuple[int, ...], said: str
) -> None:
    with caplog.at_level(logging.WARNING, "engine"):
        engine = load(directory, Failing(failing, torch.OutOfMemoryError("CUDA out of memory\nat length")))
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ([f"{said}: OutOfMemoryError: CUDA out of memory"] if said else [])
    assert isinstance(engine.steps, GpuSteps)
    assert (engine.steps.graphs.sizes if engine.steps.graphs is not None else ()) == sizes
    wanted = greedy(load(directory, Failing(set(), RuntimeError())), prompts((9, 8, 7)), new_tokens=4, chunk=64)
    assert greedy(engine, prompts((9, 8, 7)), new_tokens=4, chunk=64) == wanted


def test_a_capture_that_loses_the_device_ends_the_load(directory: str) -> None:
    with pytest.raises(EngineBroken, match="the device is lost to this process"):
        load(directory, Failing({2}, of_cuda(ILLEGAL_ADDRESS)))


@pytest.mark.parametrize("model", ["llama", "llama_dynamic_rope"])
def test_a_graph_carries_rope_lengths_where_the_model_reads_them(tmp_path: Path, model: str) -> None:
    steps: Any = load(str(make_tiny_model(model, tmp_path)), Failing(set(), RuntimeError())).steps
    for meta in steps.graphs._metas.values():
        assert (meta.rope_lengths is not None) == (model != "llama")
