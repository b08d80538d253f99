"""Every cell has its turn, then its share; a slow run still brings its faults."""

from __future__ import annotations

from collections import Counter

import pytest

from kvrelay.chaos.cells.cell import Cell
from kvrelay.chaos.order import Order
from kvrelay.chaos.round import Round

pytestmark = pytest.mark.unit


async def nothing(_: Round) -> None: ...


CELLS = [
    Cell(name="cheap", bound="client", act=nothing, share=80),
    Cell(name="rare", bound="client", act=nothing, share=2),
    Cell(name="slow", bound="client", act=nothing, share=18),
]
FAULTS = {"cheap": 20, "rare": 1, "slow": 1}


def played(*, round_s: float, seconds: float, faults: int = 1000) -> tuple[Counter[str], list[tuple[str, int]]]:
    order, now = Order(CELLS, faults, 7, begins_s=0.0, ends_s=seconds), 0.0
    done: Counter[str] = Counter()
    rounds = []
    while (turn := order.next(now)) is not None:
        cell, seed = turn
        rounds.append((cell.name, seed))
        done[cell.name] += FAULTS[cell.name]
        order.on_played(cell.name, FAULTS[cell.name], round_s)
        now += round_s
    return done, rounds


def test_each_once_then_by_their_shares() -> None:
    done, rounds = played(round_s=1.0, seconds=10_000.0)
    assert {name for name, _ in rounds[:3]} == {"cheap", "rare", "slow"}
    assert rounds.count(("slow", 7)) == rounds.count(("slow", 8)) == 1
    assert done.total() == pytest.approx(1000, abs=20)
    assert done["cheap"] == pytest.approx(800, abs=20)
    assert done["rare"] == pytest.approx(20, abs=2)


def test_where_time_is_short_cheap_faults_make_up_the_number() -> None:
    done, _ = played(round_s=1.0, seconds=100.0)
    assert done.total() >= 1000
    assert done["slow"] > 10


def test_it_ends_in_time() -> None:
    _, rounds = played(round_s=1.0, seconds=2.0)
    assert len(rounds) == 2
