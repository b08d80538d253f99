"""Every cell is held against a published bound, and can be asked for by its name."""

from __future__ import annotations

import pytest

from kvrelay.chaos.bounds import bound_of, seconds
from kvrelay.chaos.cells.cell import PHASES
from kvrelay.chaos.cells.table import CELLS
from kvrelay.cli.console import CliError
from kvrelay.cli.measuring.chaos import chosen

pytestmark = pytest.mark.unit


def test_every_cell_has_a_bound() -> None:
    for cell in CELLS.values():
        assert bound_of(cell.bound).fault == cell.bound


def test_a_bound_is_a_sum() -> None:
    assert seconds("2 * a_s + b_s + 0.5", {"a_s": 3.0, "b_s": 1.0}) == 7.5


def test_cells_are_found_by_name_and_by_beginning() -> None:
    assert [cell.name for cell in chosen(["poison/prompt"])] == ["poison/prompt"]
    kills = chosen(["kill/"])
    assert {cell.name for cell in kills} == {name for name in CELLS if name.startswith("kill/")}
    assert len(chosen(None)) == len(CELLS) > len(PHASES)
    with pytest.raises(CliError, match="no cell is called so"):
        chosen(["kil/"])
