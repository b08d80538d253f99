"""A worker over two GPUs, ranks or stages: the tokens of one, and KV that the leader reaches wherever it stands. Needs
two GPUs."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
import torch

from engine.errors import EngineBroken
from tests.engine.test_engine import greedy, prompts
from tests.gpu.test_engine import LENGTHS, NEW, assert_greedy, load

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


DEGREES = ("tensor_parallel", "pipeline_parallel")


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("degree", DEGREES)
def test_greedy_tokens_are_the_eager_model_s_or_ties(directories: dict[str, str], degree: str, graphs: bool) -> None:
    engine = load(directories["llama"], cuda_graphs=graphs, **{degree: 2})
    try:
        steps: object = engine.steps
        assert (getattr(steps, "graphs", None) is not None) == graphs
        for prompt, tokens in zip(prompts(LENGTHS), greedy(engine, prompts(LENGTHS), NEW, chunk=16), strict=True):
            assert_greedy(directories["llama"], prompt, tokens)
    finally:
        engine.close()


@pytest.mark.parametrize("degree", DEGREES)
def test_a_kernel_of_the_leader_s_gpu_copies_and_digests_all_there_is(directories: dict[str, str], degree: str) -> None:
    from engine.pages.memory import KvMemory
    from engine.pages.page_table import check_pages
    from kv_transfer.transports.gpu.cuda import gpu_of

    engine = load(directories["llama"], **{degree: 2})
    try:
        greedy(engine, prompts((40,)), 2, chunk=64)
        layers, src, dst = range(engine.layout.num_layers), check_pages([0, 2], 256), check_pages([5, 3], 256)
        whole, queue = KvMemory(engine.layout, "cuda:0"), gpu_of("cuda:0").queue()
        queue.wait_for(engine.memory.mark())
        queue.copy(engine.memory.places.to_read(layers), whole.places.to_write(layers), src, dst)
        queue.finish(5.0)
        for layer in engine.memory.share.layers_of(engine.layout):
            heads = engine.memory.share.heads(2)
            own, copied = engine.memory.k(layer)[src.tolist()], whole.k(layer)[dst.tolist()]
            assert torch.equal(own, copied[:, :, heads.start : heads.stop])
        for layer in layers:
            assert whole.k(layer)[5].float().abs().sum(-1).gt(0).all(), "a head is missing"
        digests = [
            queue.digest(memory.places.to_read(layers), pages) for memory, pages in ((engine.memory, src), (whole, dst))
        ]
        assert digests[0] == digests[1] != 0
        num_ranks = engine.memory.share.size
        assert np.unique(engine.memory.places.to_read(layers).addresses).size == 2 * num_ranks * len(layers)
    finally:
        engine.close()


@pytest.mark.parametrize("degree", DEGREES)
def test_one_that_is_killed_ends_the_step_and_the_engine(directories: dict[str, str], degree: str) -> None:
    engine = load(directories["llama"], **{degree: 2})
    try:
        [pid] = engine.model.ranks.pids  # type: ignore[union-attr]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineBroken):
            greedy(engine, prompts((40,)), 50, chunk=64)
    finally:
        engine.close()
