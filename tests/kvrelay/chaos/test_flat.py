"""What a process of the fault suite has grown by: not by the load that it happened to be seen in."""

from __future__ import annotations

import pytest

from kvrelay.chaos.flat import Flat
from kvrelay.chaos.targets.base import ProcessState

pytestmark = pytest.mark.unit


def growth_of_tasks(*tasks: int) -> float:
    flat = Flat()
    for count in tasks:
        flat.see({7: ProcessState(descriptors=9, threads=3, memory_mb=50.0)}, {7: count})
    return flat.growth()["tasks"]


def test_a_count_taken_under_load_is_no_growth() -> None:
    assert growth_of_tasks(10, 11, 10, 12, 10, 62) == 0


def test_a_leak_is_growth() -> None:
    assert growth_of_tasks(10, 20, 30, 40, 50, 60) == 30


def test_a_process_seen_once_has_not_grown() -> None:
    assert growth_of_tasks(10) == 0
    assert Flat().growth()["tasks"] == 0
