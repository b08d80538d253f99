"""A small round of `kvrelay chaos`: real processes, a few faults of each kind. The machine may be busy, so that no time
is held against a bound; every answer is, and every page comes back.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvrelay.chaos import suite
from kvrelay.chaos.cells.table import CELLS
from kvrelay.chaos.report import as_object, sentences
from kvrelay.chaos.suite import Findings, Wish, play

ANY_TIME_S = 60.0
SMALL = (
    *("kill/decode/decoding", "kill/prefill/mid-transfer", "engine/decode/fail"),
    *("segment/corrupt", "client/cancel", "link/router/reset"),
)


class NoCluster:
    """One that does not start."""

    async def start(self) -> None:
        raise TimeoutError("decode-0 is late")

    async def stop(self) -> list[int]:
        return []


def wish_of(names: Sequence[str], minutes: float = 2.0) -> Wish:
    return Wish(cells=[CELLS[name] for name in names], faults=len(names), minutes=minutes, seed=0, busy_s=ANY_TIME_S)


def test_what_a_cluster_does_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "make_cluster", lambda *_: NoCluster())
    result = as_object(play(wish_of(["client/cancel", "kill/decode/stalled"]), tmp_path, lambda _: None))
    assert not result["is_ok"]
    assert any("small failed: TimeoutError: decode-0 is late" in problem for problem in result["problems"])
    assert any("pools failed: TimeoutError: decode-0 is late" in problem for problem in result["problems"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_was_found_until_a_signal_is_kept(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def interrupted(_: Any, __: Path, findings: Findings, ___: Any) -> None:
        findings.problems.append("as an example")
        os.kill(os.getpid(), number)
        await asyncio.sleep(ANY_TIME_S)

    monkeypatch.setattr(suite, "run", interrupted)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may have ignored it
    findings = play(wish_of(["client/cancel"]), tmp_path, lambda _: None)
    assert findings.was_interrupted
    assert findings.problems == ["as an example"]


@pytest.mark.alone
def test_a_small_round_loses_nothing(tmp_path: Path) -> None:
    result = as_object(play(wish_of(SMALL), tmp_path, lambda _: None))
    assert {cell["cell"] for cell in result["cells"]} == set(SMALL)
    assert result["is_ok"], sentences(result)
