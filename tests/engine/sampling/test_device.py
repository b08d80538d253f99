"""Sampling on the device follows engine/sampling/host.py: the same numbers, the same rules, the same tokens."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable

import numpy as np
import pytest
import torch

from engine.sampling.device import draw, sampled_tokens
from engine.sampling.host import sample
from engine.sampling.host import sampled_tokens as host_tokens
from engine.sampling.plan import SamplingPlan, uniforms
from engine.sampling.rng import uniform
from engine.types import SampledToken, SampleSpec, SamplingParams

VOCAB = 700
EDGES = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53 + 1, 2**63 - 1]


def test_uniform_numbers_are_the_host_s_to_the_last_bit() -> None:
    rng = random.Random(0)
    pairs = [(seed, position) for seed in EDGES for position in EDGES]
    pairs += [(rng.getrandbits(63), rng.getrandbits(20)) for _ in range(500)]
    seeds, positions = (torch.tensor(column) for column in zip(*pairs, strict=True))
    assert uniforms(seeds, positions).tolist() == [uniform(seed, position) for seed, position in pairs]


def on_device(logits: torch.Tensor, specs: list[SampleSpec]) -> list[SampledToken]:
    plan = SamplingPlan.of([str(i) for i in range(len(specs))], specs)
    placed = {name: torch.from_numpy(array) for name, array in plan.arrays.items()}
    return sampled_tokens(plan, draw(logits, plan, placed).tensors())


def assert_same(logits: torch.Tensor, specs: list[SampleSpec]) -> None:
    wanted = sample(logits, specs)
    got = on_device(logits, specs)
    assert [token.token_id for token in got] == [token_id for token_id, _, _ in wanted]
    for token, (_, logprob, top) in zip(got, wanted, strict=True):
        assert (token.logprob is None) == (logprob is None)
        if logprob is None or token.logprob is None:
            continue
        assert token.logprob.logprob == pytest.approx(logprob.logprob, abs=1e-9)
        assert [t.token_id for t in token.top_logprobs] == [t.token_id for t in top]
        assert [t.logprob for t in token.top_logprobs] == pytest.approx([t.logprob for t in top], abs=1e-9)


def logits_of(rows: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))).to(dtype)


def spec(row: int, **changes: object) -> SampleSpec:
    fields = {f.name for f in dataclasses.fields(SampleSpec)}
    own = {key: changes.pop(key) for key in list(changes) if key in fields}
    return SampleSpec(params=SamplingParams(seed=7 * row + 1, **changes), position=row + 3, **own)  # type: ignore[arg-type]


class Given:
    """A form that allows these tokens."""

    def __init__(self, token_ids: Iterable[int], error: str = "") -> None:
        self.error = error
        bits = np.zeros(VOCAB, np.uint8)
        bits[list(token_ids)] = 1
        self._bits = np.packbits(bits, bitorder="little").tobytes()

    def bits(self) -> bytes:
        return self._bits


WAYS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.7},
    "hot": {"temperature": 50.0},
    "cold": {"temperature": 1e-6},
    "top_k": {"top_k": 5},
    "top_k of one": {"top_k": 1},
    "top_k beyond the vocabulary": {"top_k": 10**6},
    "top_p": {"top_p": 0.7},
    "tiny top_p": {"top_p": 1e-9},
    "min_p": {"min_p": 0.2},
    "top_n_sigma": {"top_n_sigma": 1.5},
    "top_n_sigma, some banned": {"top_n_sigma": 2.0, "banned_ids": tuple(range(0, VOCAB, 2)), "top_k": 9},
    "typical_p": {"typical_p": 0.3},
    "typical_p of the few": {"typical_p": 0.8, "top_k": 20, "min_p": 0.01, "temperature": 1.4},
    "all three": {"top_k": 40, "top_p": 0.9, "min_p": 0.05, "temperature": 0.8},
    "bans": {"temperature": 0.0, "banned_ids": tuple(range(0, VOCAB, 2))},
    "bans at random": {"banned_ids": tuple(range(0, VOCAB, 2)), "top_k": 3},
    "all banned": {"banned_ids": tuple(range(VOCAB))},
    "bias": {"logit_bias": tuple((token, 0.1 * token - 30) for token in range(0, VOCAB, 3)), "temperature": 0.4},
    "bias and repetition": {"logit_bias": ((3, 6.0),), "repetition_penalty": 1.8, "output_ids": (3, 9)},
    "allowed": {"allowed_token_ids": (5, 5, 9, 600), "logit_bias": ((4, 50.0), (9, 2.0))},
    "allowed, some banned": {"allowed_token_ids": (5, 9, 600), "banned_ids": (9,)},
    "allowed, all banned": {"allowed_token_ids": (5, 9), "banned_ids": (9, 5), "temperature": 0.0},
    "a form": {"form": Given(range(0, VOCAB, 7)), "temperature": 1.3},
    "a form, some banned": {"form": Given((5, 9, 699)), "banned_ids": (9,), "logit_bias": ((4, 50.0),)},
    "a form, all banned": {"form": Given((5, 9)), "banned_ids": (9, 5), "temperature": 0.0},
    "repetition": {"repetition_penalty": 1.8, "prompt_ids": (1, 2, 2, 3), "output_ids": (3, 9)},
    "frequency and presence": {"frequency_penalty": 0.7, "presence_penalty": -0.4, "output_ids": (9, 9, 9, 12)},
    "frequency, no output yet": {"frequency_penalty": 0.7},
    "logprobs": {"logprobs": 4, "temperature": 0.6},
    "logprob of the token alone": {"logprobs": 0},
    "a given token": {"given_id": 77, "temperature": 0.0, "logprobs": 3},
    "penalties do not touch logprobs": {"logprobs": 2, "repetition_penalty": 3.0, "prompt_ids": tuple(range(50))},
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_every_row_draws_the_host_s_token(way: dict[str, object]) -> None:
    assert_same(logits_of(40), [spec(row, **way) for row in range(40)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("seed", range(5))
def test_rows_of_all_ways_together_draw_the_host_s_tokens(seed: int, dtype: torch.dtype) -> None:
    rng = random.Random(seed)
    specs = [spec(row, **rng.choice(list(WAYS.values()))) for row in range(60)]  # type: ignore[arg-type]
    assert_same(logits_of(60, seed, dtype), specs)


def test_ties_fall_to_the_lowest_id() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, [500, 20, 90]] = 4.0
    assert_same(logits, [spec(0, temperature=0.0), spec(1, top_k=2), spec(2, top_p=0.01)])
    assert on_device(logits, [spec(0, temperature=0.0)] * 3)[0].token_id == 20


def test_candidates_are_the_host_s() -> None:
    bans = {"banned_ids": (3, 9), "repetition_penalty": 1.3, "prompt_ids": [1, 2], "output_ids": [5]}
    specs = [spec(0, temperature=0.0, num_candidates=12), spec(1, top_p=0.5), spec(2, num_candidates=5, **bans)]
    specs += [spec(3, temperature=0.0, num_candidates=9, allowed_token_ids=(4, 5, 6)), spec(4, logprobs=2)]
    logits = logits_of(len(specs))
    names = [str(row) for row in range(len(specs))]
    for ours, wanted in zip(on_device(logits, specs), host_tokens(logits, names, specs), strict=True):
        assert [top.token_id for top in ours.top_logprobs] == [top.token_id for top in wanted.top_logprobs]
        assert [top.logprob for top in ours.top_logprobs] == pytest.approx([top.logprob for top in wanted.top_logprobs])
        if not specs[int(ours.request_id)].num_candidates:
            assert ours.token_id == wanted.token_id


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_is_named_and_the_others_draw(poison: float, temperature: float) -> None:
    logits = logits_of(3)
    logits[1, 77] = poison
    specs = [spec(row, temperature=temperature, top_p=0.9) for row in range(3)]
    first, bad, last = on_device(logits, specs)
    assert bad.token_id == -1
    assert "logits of row 1 hold NaN" in bad.error
    wanted = sample(logits[[0, 2]], [specs[0], specs[2]])
    assert [first.token_id, last.token_id] == [token_id for token_id, _, _ in wanted]


def test_a_form_that_leaves_nothing_is_the_request_s_own_fault() -> None:
    specs = [
        spec(0, form=Given((), "cannot be kept")),
        spec(1, form=Given([3]), allowed_token_ids=(4,)),
        spec(2, form=Given([3])),
    ]
    host = host_tokens(logits_of(3), ["0", "1", "2"], specs)
    assert host == on_device(logits_of(3), specs)
    assert [token.error for token in host] == [
        "cannot be kept",
        "allowed_token_ids has none that keeps the answer's form",
        "",
    ]
    assert [token.is_own_fault for token in host] == [True, True, False]
    assert host[2].token_id == 3


def test_greedy_rows_upload_nothing() -> None:
    assert SamplingPlan.of(["a"], [spec(0, temperature=0.0)]).arrays == {}
