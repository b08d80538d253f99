"""A router's process looks through all of its objects when few calls run, and not in the middle of a flood."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
from collections.abc import Iterator

import pytest

from cluster.front.bounds import memory


@pytest.fixture
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def full_collections() -> int:
    return int(gc.get_stats()[2]["collections"])


@pytest.mark.usefixtures("thresholds")
@pytest.mark.unit
def test_a_flood_of_objects_starts_no_full_collection() -> None:
    memory.put_off_collections()
    before = full_collections()
    flood = [[] for _ in range(700_000)]  # type: ignore[var-annotated]
    assert full_collections() == before
    assert flood


@pytest.mark.unit
async def test_garbage_is_collected_when_few_calls_run_and_in_the_end_in_any_case(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "INTERVAL_S", 0.0)
    monkeypatch.setattr(memory, "MOST_SHARE", math.inf)
    monkeypatch.setattr(memory, "MOST_PUT_OFF", 3)
    looks: list[tuple[int, int]] = []  # calls, full collections until then

    def num_calls() -> int:
        calls = 0 if len(looks) == 1 else 10_000
        looks.append((calls, full_collections()))
        return calls

    task = asyncio.ensure_future(memory.let_go_forever(num_calls))
    while len(looks) < 8:
        await asyncio.sleep(0.001)
    task.cancel()
    made = [after[1] - look[1] for look, after in itertools.pairwise(looks)]
    assert made[:7] == [0, 1, 0, 0, 0, 1, 0]


@pytest.mark.unit
async def test_where_a_collection_takes_long_the_next_one_comes_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two routers in one process that had to wait for a processor did nothing but collect: no answer went on."""
    pauses_s: list[float] = []
    took_s = iter((0.05, 3.0, 0.05))

    async def sleep(pause_s: float) -> None:
        pauses_s.append(pause_s)

    monkeypatch.setattr(memory, "collect", lambda: next(took_s))
    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await memory.let_go_forever(lambda: 0)
    assert pauses_s == [1.0, 1.0, 30.0, 1.0]
