"""CELLS are the faults of the suite by their names. A fault is a few lines in the file of its kind."""

from __future__ import annotations

from kvrelay.chaos.cells import clients, deployed, engines, links, machine, processes
from kvrelay.chaos.cells.cell import Cell

KINDS = (processes, engines, links, clients, machine, deployed)
CELLS: dict[str, Cell] = {cell.name: cell for kind in KINDS for cell in kind.CELLS}
