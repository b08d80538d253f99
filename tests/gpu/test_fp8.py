"""KV in fp8 on a GPU: half the bytes, answers within e4m3's precision, one fingerprint for all workers."""

from __future__ import annotations

import pytest
import torch

from tests.engine.test_engine import greedy, prompts
from tests.gpu.test_engine import load


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_pages_take_half_the_bytes_and_scales_agree(directories: dict[str, str], name: str) -> None:
    plain = load(directories[name])
    engine, again = (load(directories[name], kv_dtype="fp8_e4m3") for _ in range(2))
    assert engine.layout.page_bytes() * 2 == plain.layout.page_bytes()
    assert engine.info.fingerprint == again.info.fingerprint != plain.info.fingerprint


def test_logits_stay_near_those_of_bfloat16_pages(directories: dict[str, str]) -> None:
    plain, engine = load(directories["llama"]), load(directories["llama"], kv_dtype="fp8_e4m3")
    lengths = (70, 20)
    tokens = greedy(engine, prompts(lengths), new_tokens=8, chunk=32)
    assert all(len(row) == 8 for row in tokens)
    from engine.types import Chunk

    chunks = [
        Chunk(request_id=str(i), token_ids=ids, start=0, block_table=range(10 * i, 10 * i + 5))
        for i, ids in enumerate(prompts(lengths))
    ]
    with torch.inference_mode():
        exact, lossy = (e.model.forward(e.pages, chunks).float() for e in (plain, engine))
    error = (exact - lossy).norm(dim=-1) / exact.norm(dim=-1)
    assert 0 < error.median() < 0.1
