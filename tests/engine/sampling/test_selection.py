"""Top-k and top-p on the device, sorted or by the GPU's kernel in Triton's interpreter: the host's draws, whatever the
distribution; and the largest few of a row, ties in order."""

from __future__ import annotations

import importlib
import importlib.util
import random
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from engine.sampling import device
from engine.sampling.device import draw, largest_draw
from engine.sampling.plan import SamplingPlan
from engine.sampling.ranking import largest
from engine.types import SampleSpec
from tests.engine.sampling.test_device import VOCAB, WAYS, assert_same, logits_of, spec

ROWS = 8
KERNEL = "engine.sampling.selection_kernel"


@pytest.fixture(scope="module", params=["sorted", "kernel"], autouse=True)
def keep(request: pytest.FixtureRequest) -> Iterator[None]:
    """The real kernel, run by Triton's interpreter on CPU memory; decided when it is imported."""
    if request.param == "sorted":
        yield
        return
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed: it comes with torch's CUDA builds")
    patch = pytest.MonkeyPatch()
    patch.setenv("TRITON_INTERPRET", "1")
    sys.modules.pop(KERNEL, None)
    kernel = importlib.import_module(KERNEL)
    patch.setattr(kernel, "BLOCK", 512)  # more than one for each row
    patch.setattr(device, "keep_largest", kernel.narrow)
    yield
    patch.undo()
    sys.modules.pop(KERNEL)


def narrowed(row: int) -> SampleSpec:
    rng = random.Random(row)
    ways = {"top_k": rng.choice([0, 1, 3, 40, VOCAB - 1, VOCAB]), "top_p": rng.choice([1e-9, 0.3, 0.9, 0.999, 1.0])}
    return spec(row, temperature=rng.choice([0.1, 1.0, 30.0]), **ways)


DISTRIBUTIONS = {
    "flat": torch.zeros(ROWS, VOCAB),
    "nearly flat": 1e-3 * logits_of(ROWS),
    "of few values, many ties": (logits_of(ROWS) / 3).round(),
    "of two values": torch.arange(VOCAB).remainder(2).float().repeat(ROWS, 1),
    "all in one token": torch.zeros(ROWS, VOCAB).index_fill(1, torch.tensor([431]), 80.0),
    "zeros of both signs": torch.zeros(ROWS, VOCAB).index_fill(1, torch.arange(0, VOCAB, 3), -0.0),
    "negative": -logits_of(ROWS).abs() - 5.0,
    "few possible": torch.full((ROWS, VOCAB), float("-inf")).index_fill(1, torch.tensor([3, 90, 699]), 2.0),
    "large": 1e30 * logits_of(ROWS),
    "small": 1e-12 * logits_of(ROWS),
}


@pytest.mark.parametrize("logits", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS.keys())
def test_whatever_the_distribution_the_host_s_tokens_are_drawn(logits: torch.Tensor) -> None:
    assert_same(logits, [narrowed(row) for row in range(len(logits))])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_all_ways_together_draw_the_host_s_tokens(dtype: torch.dtype) -> None:
    rng = random.Random(5)
    specs = [spec(row, **rng.choice(list(WAYS.values()))) for row in range(16)]  # type: ignore[arg-type]
    assert_same(logits_of(16, 5, dtype), specs)


@pytest.mark.parametrize("vocab", [2, 511, 513])
def test_a_small_vocabulary_is_narrowed_too(vocab: int) -> None:
    assert_same(logits_of(ROWS)[:, :vocab].contiguous(), [narrowed(row) for row in range(ROWS)])


def test_rows_that_are_not_narrowed_keep_all_their_weights() -> None:
    logits = logits_of(8)
    assert_same(logits, [narrowed(row) if row % 3 else spec(row, temperature=2.0) for row in range(8)])


def test_the_largest_are_those_of_a_stable_sort() -> None:
    scores = torch.cat([logits.clone() for logits in DISTRIBUTIONS.values()])
    wanted = scores.sort(dim=-1, descending=True, stable=True)
    for count in (1, 20, VOCAB, VOCAB + 5):
        values, ids = largest(scores, count)
        assert torch.equal(values, wanted.values[:, :count])
        assert torch.equal(ids, wanted.indices[:, :count])


def test_the_largest_draw_asks_for_all_that_any_does() -> None:
    plan = largest_draw(6)
    placed = {name: torch.from_numpy(array) for name, array in plan.arrays.items()}
    assert all(tensor is not None and len(tensor) in (6, 5, 1) for tensor in draw(logits_of(6), plan, placed).tensors())
    way = {"typical_p": 0.8, "top_k": 20, "min_p": 0.01, "top_n_sigma": 1.0, "logprobs": 1}
    everything = SamplingPlan.of(["a"], [spec(0, **way)])
    assert set(everything.arrays) < set(plan.arrays)
    assert np.array_equal(plan.arrays["random_rows"], [1, 2, 3, 4, 5])
