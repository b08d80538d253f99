"""Which rounds count, how often one is played again, and what is told of ratios."""

from __future__ import annotations

from typing import Any

import pytest

from bench.common import kind_of_cpu
from bench.rounds import Replays, counted, noise_of, noise_report, spread

pytestmark = pytest.mark.unit

CLEAN = {"stolen_cores": 0.0, "other_cores": 0.1}
STOLEN = {"stolen_cores": 0.2, "other_cores": 0.0}
BUSY = {"stolen_cores": 0.0, "other_cores": 1.0}


def played(replays: Replays, *figures: dict[str, float]) -> tuple[dict[str, Any], int]:
    """What is kept of these attempts, and how many were made."""
    made: list[int] = []

    def attempt(number: int) -> dict[str, Any]:
        made.append(number)
        return {"attempt": number, **figures[number]}

    return replays.clean(attempt), len(made)


@pytest.mark.parametrize(
    ("used", "noise"),
    [
        (CLEAN, ""),
        ({"stolen_cores": 0.1, "other_cores": 0.3}, ""),
        (STOLEN, "10% of the cores' time was stolen by other guests"),
        (BUSY, "50% of the cores' time went to other work"),
    ],
)
def test_a_round_is_noise_by_shares_of_all_cores(used: dict[str, float], noise: str) -> None:
    assert noise_of(used, cores=2) == noise


def test_a_clean_round_is_played_once() -> None:
    kept, attempts = played(Replays(5, cores=2), CLEAN)
    assert (kept["attempt"], kept["noise"], kept["played_again"], attempts) == (0, "", [], 1)


def test_a_noisy_round_is_played_until_it_is_clean() -> None:
    kept, attempts = played(Replays(5, cores=2), BUSY, CLEAN)
    assert (kept["attempt"], kept["noise"], attempts) == (1, "", 2)
    assert kept["played_again"] == ["50% of the cores' time went to other work"]


def test_a_round_that_cannot_be_had_clean_is_the_least_noisy_and_says_so() -> None:
    kept, attempts = played(Replays(5, cores=2), BUSY, STOLEN, BUSY)
    assert (kept["attempt"], attempts) == (1, 3)
    assert kept["noise"] == "10% of the cores' time was stolen by other guests"
    assert len(kept["played_again"]) == 2


def test_all_rounds_share_how_often_one_may_be_played_again() -> None:
    replays = Replays(1, cores=2)
    assert played(replays, BUSY, CLEAN)[1] == 2
    assert played(replays, BUSY)[1] == 1, "none is left"


def test_noisy_rounds_count_only_where_none_is_clean() -> None:
    noisy, clean = {"noise": "so"}, {"noise": ""}
    assert counted([noisy, clean]) == [clean]
    assert counted([noisy, noisy]) == [noisy, noisy]


def test_a_ratio_is_of_theirs_to_ours_in_the_same_round() -> None:
    assert spread([(2.0, 4.0), (4.0, 4.0), (1.0, 3.0)]) == {"median": 2.0, "least": 1.0, "most": 3.0, "rounds": 3}


def test_a_report_names_each_noisy_round() -> None:
    rounds = {"decode 1": [{"noise": "", "played_again": ["busy"]}, {"noise": "stolen", "played_again": []}]}
    assert noise_report(rounds) == {
        "played_again": ["decode 1, round 1: busy"],
        "not_clean": ["decode 1, round 2: stolen"],
    }


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ("avx512_bf16 amx_bf16 amx_tile avx512_fp16", "_amx"),
        ("avx512_bf16 avx512_fp16", "_avx512_fp16"),
        ("avx2 avx512_bf16 avx512_vp2intersect", ""),
        ("avx2 avx512_bf16", "_zen4"),
        ("avx avx2", "_avx2"),
        ("asimd bf16", ""),
    ],
)
def test_results_are_named_by_the_kind_of_cpu(flags: str, kind: str) -> None:
    assert kind_of_cpu(flags.split()) == kind
