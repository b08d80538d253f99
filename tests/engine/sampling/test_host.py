"""What sample() promises: the stated order of steps, exact draws, and rows that know nothing of each other."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TypicalLogitsWarper

from engine.sampling.host import NonFiniteLogits, sample
from engine.sampling.rng import philox_4x32, uniform
from engine.types import InvalidRequest, SampleSpec, SamplingParams

THREE = 0.5, 0.3, 0.2


def spec(
    position: int = 7,
    *,
    prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
    banned: tuple[int, ...] = (),
    **kw: Any,
) -> SampleSpec:
    return SampleSpec(
        params=SamplingParams(**kw), position=position, prompt_ids=prompt, output_ids=output, banned_ids=banned
    )


def logits_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities]).log()


def support(logits_1V: torch.Tensor, draws: int = 200, **kw: Any) -> set[int]:
    """Every id drawn over many positions: with probabilities of a tenth and more, the whole kept set."""
    rows = logits_1V.expand(draws, -1)
    return {token for token, _, _ in sample(rows, [spec(position, **kw) for position in range(draws)])}


def greedy(logits_1V: torch.Tensor, **kw: Any) -> int:
    return sample(logits_1V, [spec(temperature=0.0, **kw)])[0][0]


# --- the generator


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # Random123's kat_vectors, philox 4x32 10
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_vectors(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, int, int, int]
) -> None:
    assert philox_4x32(counter, key) == expected


def test_uniform_numbers_fill_the_unit_interval_evenly() -> None:
    drawn = np.array([uniform(seed, position) for seed in range(50) for position in range(200)])
    assert drawn.min() >= 0.0
    assert drawn.max() < 1.0
    observed, _ = np.histogram(drawn, bins=20, range=(0, 1))
    chi_square = float(((observed - 500) ** 2 / 500).sum())
    assert chi_square < 50  # 19 degrees of freedom: a fair generator passes with p = 0.9999


def test_seed_and_position_both_key_the_draw_beyond_32_bits() -> None:
    keys = [(0, 0), (1, 0), (0, 1), (1 << 32, 0), (0, 1 << 32), ((1 << 63) - 1, 0)]
    assert len({uniform(*key) for key in keys}) == len(keys)


# --- greedy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_greedy_takes_the_lowest_of_tied_ids(dtype: torch.dtype) -> None:
    logits = torch.zeros(2, 5000, dtype=dtype)
    logits[0, [17, 4000, 4999]] = 3
    assert [token for token, _, _ in sample(logits, [spec(temperature=0.0)] * 2)] == [17, 0]


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.empty(0, 10), []) == []


# --- the distribution


@pytest.mark.parametrize("vocab", [8, 2000])  # below and above one block of the cumulative sum
def test_draws_follow_the_softmax_at_the_given_temperature(vocab: int) -> None:
    draws = 4000
    logits_V = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 2
    expected_V = torch.softmax(logits_V.double() / 0.7, -1).numpy() * draws
    specs = [spec(position, temperature=0.7, seed=11) for position in range(draws)]
    drawn = Counter(token for token, _, _ in sample(logits_V.expand(draws, -1), specs))
    likely = np.flatnonzero(expected_V >= 10)
    observed = np.array([drawn[int(i)] for i in likely])
    rest = draws - observed.sum(), draws - expected_V[likely].sum()
    chi_square = ((observed - expected_V[likely]) ** 2 / expected_V[likely]).sum() + (rest[0] - rest[1]) ** 2 / max(
        rest[1], 1
    )
    degrees = len(likely)
    assert chi_square < degrees + 5 * math.sqrt(2 * degrees)


def test_a_masked_id_is_never_drawn() -> None:
    logits = torch.full((1, 1500), -math.inf)
    logits[0, [3, 1400]] = 0.0
    assert support(logits) == {3, 1400}


def test_a_tiny_temperature_is_nearly_greedy_and_does_not_overflow() -> None:
    assert support(torch.tensor([[1.0, 5.0, 4.999]]), temperature=1e-300) == {1}


# --- top-k, top-p, min-p


def test_top_k_keeps_k_ids_and_the_lowest_of_ties() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0]])
    assert support(logits, top_k=1) == {1}
    assert support(logits, top_k=2) == {1, 3}
    assert support(logits, top_k=3) == {0, 1, 3}
    assert support(logits, top_k=99) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(1e-9, {0}), (0.5, {0}), (0.51, {0, 1}), (0.8, {0, 1}), (0.81, {0, 1, 2}), (0.999, {0, 1, 2})],
)
def test_top_p_keeps_the_fewest_ids_that_reach_it(top_p: float, kept: set[int]) -> None:
    assert support(logits_of(*THREE), top_p=top_p) == kept


def test_top_p_takes_the_lowest_of_ties() -> None:
    assert support(torch.zeros(1, 10), top_p=0.3) == {0, 1, 2}


def test_min_p_is_relative_to_the_likeliest() -> None:
    assert support(logits_of(0.5, 0.3, 0.1, 0.1), min_p=0.5) == {0, 1}
    assert support(logits_of(0.5, 0.3, 0.1, 0.1), min_p=1.0) == {0}


def test_top_n_sigma_counts_deviations_of_what_may_be_drawn() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0, -50.0]])  # without the last the deviation is 1.118
    assert support(logits, top_n_sigma=1.0, banned=(4,)) == {0, 1}
    assert support(logits, top_n_sigma=1.8, banned=(4,), temperature=3.0) == {0, 1, 2}
    assert support(logits, top_n_sigma=0.1, banned=(4,), top_k=3) == {0}
    assert support(logits, top_n_sigma=0.0, banned=(4,), temperature=3.0) == {0, 1, 2, 3}


@pytest.mark.parametrize("mass", [0.05, 0.2, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_typical_p_keeps_what_transformers_keeps(mass: float, seed: int) -> None:
    logits = 1.5 * torch.randn(1, 8, generator=torch.Generator().manual_seed(seed))
    wanted = TypicalLogitsWarper(mass)(torch.zeros(1, 1, dtype=torch.long), logits.clone())
    assert support(logits, draws=4000, typical_p=mass) == set(torch.isfinite(wanted[0]).nonzero().flatten().tolist())


def test_top_p_sees_the_distribution_after_top_k() -> None:
    logits = logits_of(0.4, 0.3, 0.2, 0.1)
    assert support(logits, top_p=0.6) == {0, 1}
    assert support(logits, top_p=0.55, top_k=2) == {0}  # 0.4 of 0.7 is 0.57


def test_top_p_sees_the_distribution_after_temperature() -> None:
    logits = logits_of(0.6, 0.4)
    assert support(logits, top_p=0.65) == {0, 1}
    assert support(logits, top_p=0.65, temperature=0.5) == {0}  # 0.36 : 0.16, so the first has 0.69


# --- penalties and bans


def test_no_repetition_penalty_that_may_be_asked_for_makes_logits_infinite() -> None:
    """That looks like a fault of the worker, whose circuit opens for it."""
    logits = torch.tensor([[6e4, 1.0, -6e4]])
    smallest = SamplingParams(repetition_penalty=1 / 64)  # exact in the API's floats
    smallest.validate(3)
    assert greedy(logits, repetition_penalty=smallest.repetition_penalty, prompt=(0, 2)) == 0
    for too_small in (1e-45, 0.015):
        with pytest.raises(InvalidRequest, match=r"repetition_penalty is .*; give a number from 0\.015625 to 100"):
            SamplingParams(repetition_penalty=too_small).validate(3)


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_once_for_each_id() -> None:
    logits = torch.tensor([[4.0, 3.0, 2.5]])
    assert greedy(logits, repetition_penalty=1.5, prompt=(0, 0, 0)) == 1  # 4 / 1.5 = 2.67 < 3
    assert greedy(logits, repetition_penalty=1.5, prompt=(0,), output=(1,)) == 0  # 2.67 beats 2 and 2.5
    assert greedy(-logits, repetition_penalty=1.5, output=(2,)) == 1  # -3.75 loses to -3


def test_presence_counts_once_frequency_counts_each_and_the_prompt_is_free() -> None:
    logits = torch.tensor([[4.0, 3.0, 0.0]])
    assert greedy(logits, presence_penalty=0.9, output=(0, 0, 0)) == 0
    assert greedy(logits, presence_penalty=1.1, output=(0,)) == 1
    assert greedy(logits, frequency_penalty=0.4, output=(0, 0)) == 0
    assert greedy(logits, frequency_penalty=0.4, output=(0, 0, 0)) == 1
    assert greedy(logits, presence_penalty=2.0, frequency_penalty=2.0, prompt=(0, 0)) == 0


def test_repetition_is_applied_before_presence() -> None:
    logits = torch.tensor([[3.0, 0.4]])  # 3 / 2 - 1 = 0.5; the other way round it would be 1
    assert greedy(logits, repetition_penalty=2.0, presence_penalty=1.0, output=(0,)) == 0
    logits = torch.tensor([[3.0, 0.6]])
    assert greedy(logits, repetition_penalty=2.0, presence_penalty=1.0, output=(0,)) == 1


def test_penalties_come_before_temperature() -> None:
    logits = torch.tensor([[2.0, 1.0]])  # 2 - 1 ties; 200 - 1 would not
    drawn = support(logits, presence_penalty=1.0, output=(0,), temperature=0.01)
    assert drawn == {0, 1}


def test_a_banned_id_is_not_drawn_and_makes_room_in_top_k() -> None:
    logits = logits_of(*THREE)
    assert greedy(logits, banned=(0,)) == 1
    assert support(logits, banned=(0,), top_k=2) == {1, 2}
    assert support(logits, banned=(0,), top_p=0.5) == {1}  # 0.3 of the 0.5 that is left


def test_bias_is_added_before_the_penalties() -> None:
    logits = torch.tensor([[1.0, 1.2]])
    assert greedy(logits, logit_bias=((0, 0.3),)) == 0
    assert greedy(logits, logit_bias=((0, 3.0),), repetition_penalty=4.0, output=(0,)) == 1  # (1 + 3) / 4 = 1


def test_none_but_allowed_ids_are_drawn_whatever_their_bias() -> None:
    logits = logits_of(*THREE)
    assert support(logits, allowed_token_ids=(1, 2)) == {1, 2}
    assert greedy(logits, allowed_token_ids=(1, 2), logit_bias=((0, 100.0), (2, 5.0))) == 2
    assert greedy(logits, allowed_token_ids=(1, 2), banned=(1,)) == 2


def test_bans_that_leave_nothing_do_not_hold() -> None:
    assert support(logits_of(*THREE), allowed_token_ids=(1, 2), banned=(1, 2)) == {1, 2}
    assert support(logits_of(*THREE), banned=(0, 1, 2)) == {0, 1, 2}


def test_the_callers_logits_are_not_changed() -> None:
    logits = torch.randn(2, 50)
    before = logits.clone()
    edits: dict[str, Any] = {"logit_bias": ((4, 9.0),), "allowed_token_ids": (3, 4, 5)}
    sample(logits, [spec(repetition_penalty=2.0, prompt=(1, 2), banned=(3,), top_p=0.9), spec(**edits)])
    assert torch.equal(logits, before)


# --- logprobs


def test_logprobs_are_of_the_raw_distribution_likeliest_first() -> None:
    result = sample(
        logits_of(*THREE), [spec(temperature=0.0, logprobs=2, banned=(0,), presence_penalty=1.0, output=(1,))]
    )
    token, chosen, top = result[0]
    assert chosen is not None
    assert chosen.token_id == token
    assert math.exp(chosen.logprob) == pytest.approx(THREE[token], rel=1e-6)
    assert [(t.token_id, round(math.exp(t.logprob), 6)) for t in top] == [(0, 0.5), (1, 0.3)]


def test_logprobs_zero_gives_the_chosen_token_only_and_none_gives_nothing() -> None:
    with_zero, without = sample(
        logits_of(*THREE).expand(2, -1), [spec(temperature=0.0, logprobs=0), spec(temperature=0.0)]
    )
    assert with_zero[1] is not None
    assert with_zero[2] == ()
    assert without[1:] == (None, ())


def test_more_logprobs_than_ids_gives_all_ids() -> None:
    assert len(sample(logits_of(*THREE), [spec(logprobs=20)])[0][2]) == 3


# --- rows


def mixed_specs(rows: int) -> list[SampleSpec]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"top_k": 40, "top_p": 0.9},
        {"top_p": 0.8, "temperature": 1.3, "logprobs": 3},
        {"min_p": 0.05, "banned": (1, 2, 3)},
        {"top_n_sigma": 2.5, "typical_p": 0.6, "banned": (7,)},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "prompt": (5, 6), "output": (9, 9, 10)},
    ]
    return [spec(position=100 + row, seed=row * 31, **kinds[row % len(kinds)]) for row in range(rows)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_gives_the_same_token_alone_and_in_any_batch(dtype: torch.dtype) -> None:
    rows = 24
    logits = (torch.randn(rows, 5003, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    specs = mixed_specs(rows)
    together = sample(logits, specs)
    alone = [sample(logits[i : i + 1], specs[i : i + 1])[0] for i in range(rows)]
    order = list(reversed(range(rows)))
    turned = sample(logits[order], [specs[i] for i in order])
    assert together == alone
    assert [turned[order.index(i)] for i in range(rows)] == together


def test_the_seed_matters_and_repeats() -> None:
    logits = torch.zeros(1, 1000)
    tokens = [sample(logits, [spec(seed=seed)])[0][0] for seed in (1, 2, 1)]
    assert tokens[0] == tokens[2]
    assert tokens[0] != tokens[1]


# --- broken logits


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"top_p": 0.9}, {"logprobs": 1}])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_rows_that_are_not_finite_are_named(params: dict[str, Any], value: float) -> None:
    logits = torch.zeros(3, 100)
    logits[1, 50] = value
    with pytest.raises(NonFiniteLogits, match="row 1 hold NaN") as error:
        sample(logits, [spec(**params)] * 3)
    assert error.value.rows == (1,)
