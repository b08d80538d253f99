"""A prefill and a decode process on one GPU: the tokens of one engine alone, and KV that went by cuda_ipc."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from kvrelay.demo_model import make_demo_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here"),
    pytest.mark.timeout(280),
]


def test_the_two_process_cluster_gives_the_tokens_of_one_engine(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    from bench.gpu import cluster as gpu_cluster

    model: Path = make_demo_model(tmp_path_factory.mktemp("model") / "m", size="125m")
    wanted = gpu_cluster.asks(24, 4000, 600, rehearse=False)
    served = asyncio.run(gpu_cluster.serve(str(model), wanted, False, 3))  # raises unless all went by cuda_ipc
    reference = gpu_cluster.Reference.load(str(model), False, 2048)
    found = gpu_cluster.compare(wanted, served["tokens"], reference)
    assert not found["wrong"], found["wrong"]
    assert found["equal"] >= len(wanted) // 2
    assert served["handoff"]["exposed_ms"] > 0
