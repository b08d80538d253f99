"""What a process of the fault suite has grown by: not by the load that it happened to be seen in."""

from __future__ import annotations

import pytest

from kvrelay.chaos.flat import Flat
from kvrelay.chaos.report import as_object
from kvrelay.chaos.suite import Findings
from kvrelay.chaos.targets.base import ProcessState

pytestmark = pytest.mark.unit


def growth_of_tasks(*tasks: int) -> float:
    flat = Flat()
    for count in tasks:
        flat.see({7: ProcessState(descriptors=9, threads=3, memory_mb=50.0)}, {7: ("decode-0", count)})
    return flat.growth()["tasks"].by


def test_a_count_taken_under_load_is_no_growth() -> None:
    assert growth_of_tasks(10, 11, 10, 12, 10, 62) == 0


def test_a_leak_is_growth() -> None:
    assert growth_of_tasks(10, 20, 30, 40, 50, 60) == 30


def test_a_process_seen_once_has_not_grown() -> None:
    assert growth_of_tasks(10) == 0
    assert Flat().growth()["tasks"].by == 0


def test_the_process_is_named_that_has_grown_most() -> None:
    flat = Flat()
    for threads in (3, 3, 3, 30, 30, 30):
        states = {7: ProcessState(descriptors=9, threads=threads, memory_mb=50.0)}
        states[8] = ProcessState(descriptors=9, threads=threads // 2, memory_mb=50.0)
        flat.see(states, {7: ("decode-0", 5)})
    findings = Findings()
    findings.on_grown(flat.growth())
    assert as_object(findings)["problems"] == ["decode-0, seen 6 times, from 3 to 30: grew by 27 threads"]
