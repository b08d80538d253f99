"""Device sampling on a GPU draws the host's tokens, and its random numbers are the host's to the last bit."""

from __future__ import annotations

import random

import pytest
import torch

from engine.sampling.device import draw, sampled_tokens
from engine.sampling.host import sample
from engine.sampling.plan import SamplingPlan, uniforms
from engine.sampling.rng import uniform
from engine.types import SampledToken, SampleSpec
from tests.engine.sampling.test_device import EDGES, WAYS, logits_of, spec
from tests.engine.sampling.test_selection import DISTRIBUTIONS, narrowed


def on_gpu(logits: torch.Tensor, specs: list[SampleSpec]) -> list[SampledToken]:
    plan = SamplingPlan.of([str(i) for i in range(len(specs))], specs)
    placed = {name: torch.from_numpy(array).cuda() for name, array in plan.arrays.items()}
    return sampled_tokens(plan, [x.cpu() for x in draw(logits.cuda(), plan, placed).tensors()])


def test_uniform_numbers_are_the_host_s_to_the_last_bit() -> None:
    pairs = [(seed, position) for seed in EDGES for position in EDGES]
    seeds, positions = (torch.tensor(column).cuda() for column in zip(*pairs, strict=True))
    assert uniforms(seeds, positions).tolist() == [uniform(*pair) for pair in pairs]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("seed", range(4))
def test_rows_of_all_ways_together_draw_the_host_s_tokens(seed: int, dtype: torch.dtype) -> None:
    rng = random.Random(seed)
    specs = [spec(row, **rng.choice(list(WAYS.values()))) for row in range(200)]  # type: ignore[arg-type]
    logits = logits_of(200, seed, dtype)
    got, wanted = on_gpu(logits, specs), sample(logits, specs)
    assert [token.token_id for token in got] == [token_id for token_id, _, _ in wanted]


def test_a_whole_vocabulary_draws_the_host_s_tokens() -> None:
    logits = torch.randn(32, 128256, generator=torch.Generator().manual_seed(0))
    specs = [spec(row, top_p=0.95, top_k=0 if row % 2 else 50, temperature=0.7) for row in range(32)]
    assert [t.token_id for t in on_gpu(logits, specs)] == [token_id for token_id, _, _ in sample(logits, specs)]


@pytest.mark.parametrize("logits", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS.keys())
def test_whatever_the_distribution_the_host_s_tokens_are_drawn(logits: torch.Tensor) -> None:
    specs = [narrowed(row) for row in range(len(logits))]
    assert [t.token_id for t in on_gpu(logits, specs)] == [token_id for token_id, _, _ in sample(logits, specs)]


def test_rows_that_are_not_finite_are_named() -> None:
    logits = logits_of(3)
    logits[1, 5] = float("nan")
    tokens = on_gpu(logits, [spec(row) for row in range(3)])
    assert [bool(token.error) for token in tokens] == [False, True, False]
