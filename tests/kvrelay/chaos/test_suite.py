"""A small round of `kvrelay chaos`: real processes, a few faults of each kind. The machine may be busy, so that no time
is held against a bound; every answer is, and every page comes back.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvrelay.chaos.cells import CELLS
from kvrelay.chaos.report import as_object, sentences
from kvrelay.chaos.suite import Wish, run

pytestmark = pytest.mark.alone

ANY_TIME_S = 60.0


def test_a_small_round_loses_nothing(tmp_path: Path) -> None:
    cells = [cell for cell in CELLS.values() if cell.is_quick]
    wish = Wish(cells=cells, faults=len(cells), minutes=2.0, seed=0, busy_s=ANY_TIME_S)
    result = as_object(asyncio.run(run(wish, tmp_path, lambda _: None)))
    assert {cell["cell"] for cell in result["cells"]} == {cell.name for cell in cells}
    assert result["is_ok"], sentences(result)
