"""The knee lies where attainment crosses what is wanted, and its interval holds the truth as often as it says."""

from __future__ import annotations

import numpy as np
import pytest

from kvrelay.bench.series.knee import Knee, Met, falling, knee, next_rate

pytestmark = pytest.mark.unit


def curve(*points: tuple[float, float], requests: int = 1000) -> dict[float, Met]:
    return {rate: Met(within=round(share * requests), requests=requests) for rate, share in points}


def find(*points: tuple[float, float], wanted: float = 0.9, requests: int = 1000) -> Knee:
    return knee(curve(*points, requests=requests), wanted, np.random.default_rng(0))


def test_between_two_rates_it_is_interpolated() -> None:
    found = find((1, 1.0), (2, 0.95), (4, 0.75))
    assert found.where == "within"
    assert found.rate == pytest.approx(2.5)
    assert found.low < 2.5 < found.high


def test_where_no_rate_misses_or_all_do_it_is_beyond_them() -> None:
    assert (find((1, 1.0), (2, 0.95)).where, find((1, 1.0), (2, 0.95)).rate) == ("above", 2)
    assert (find((1, 0.5), (2, 0.3)).where, find((1, 0.5), (2, 0.3)).rate) == ("below", 1)


def test_what_rises_is_levelled_with_what_is_before_it() -> None:
    assert falling([1.0, 0.8, 0.9, 0.2], [1, 1, 1, 1]) == pytest.approx([1.0, 0.85, 0.85, 0.2])
    assert falling([0.8, 0.9], [3, 1]) == pytest.approx([0.825, 0.825])
    assert find((1, 1.0), (2, 0.85), (3, 0.95), (4, 0.5)).rate == pytest.approx(3.0)  # 0.9 at both


def test_more_requests_make_it_surer() -> None:
    few, many = (find((1, 1.0), (4, 0.7), requests=count) for count in (50, 5000))
    assert few.high - few.low > 3 * (many.high - many.low)


def test_the_interval_holds_the_truth_nine_times_in_ten() -> None:
    shares, rng = {1.0: 0.99, 2.0: 0.95, 3.0: 0.85, 4.0: 0.6}, np.random.default_rng(1)
    held = 0
    for _ in range(200):
        met = {rate: Met(within=int(rng.binomial(150, share)), requests=150) for rate, share in shares.items()}
        found = knee(met, 0.9, rng)
        held += found.low <= 2.5 <= found.high
    assert 0.82 <= held / 200 <= 0.99


def played(truth: float, first: float = 1.0) -> list[float]:
    """The rates that a search plays against a server that misses from `truth` on."""
    met: dict[float, Met] = {}
    while (rate := next_rate([met], 0.9, first)) is not None:
        met[rate] = Met(within=100 if rate < truth else 0, requests=100)
    return list(met)


@pytest.mark.parametrize(("truth", "first"), [(11.0, 1.0), (0.3, 1.0), (1.0, 1.0), (100.0, 4.0)])
def test_a_search_doubles_then_narrows_down(truth: float, first: float) -> None:
    rates = played(truth, first)
    kept = max(rate for rate in rates if rate < truth)
    missed = min(rate for rate in rates if rate >= truth)
    assert missed / kept <= 1.1
    assert len(rates) <= 16


def test_a_search_ends_though_no_rate_decides() -> None:
    assert len(played(float("inf"))) == 16


def test_two_are_searched_until_both_are_narrow() -> None:
    met: list[dict[float, Met]] = [{}, {}]
    while (rate := next_rate(met, 0.9, 1.0)) is not None:
        for each, truth in zip(met, (3.0, 13.0), strict=True):
            each[rate] = Met(within=100 if rate < truth else 0, requests=100)
    for each, truth in zip(met, (3.0, 13.0), strict=True):
        assert min(r for r in each if r >= truth) / max(r for r in each if r < truth) <= 1.1
