"""docs/planning.md shows what its commands print: they are run again, and its numbers stand in their outputs."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def script() -> ModuleType:
    found = importlib.util.spec_from_file_location("fill_planning", ROOT / "docs" / "fill_planning.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


FILL = script()
PAGE = FILL.PAGE.read_text(encoding="utf-8")
SHOWN = FILL.shown(PAGE)


def is_quick(command: str) -> bool:
    """Refused before anything is simulated, or planned for so few GPUs that it takes seconds."""
    return "error:" in dict(SHOWN)[command] or "--num-gpus 2 " in command


@pytest.mark.unit
def test_every_output_is_filled_and_every_bold_number_is_in_one() -> None:
    assert len(SHOWN) >= 4
    assert PAGE.count("<!-- output -->") == len(SHOWN)
    outputs = " ".join(" ".join(output.split()) for _, output in SHOWN)
    assert all(output.strip() for _, output in SHOWN)
    bold = [text for text in re.findall(r"\*\*([^*]+)\*\*", PAGE) if re.search(r"\d", text)]
    assert len(bold) >= 3
    assert [text for text in bold if text not in outputs] == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", [command for command, _ in SHOWN if is_quick(command)])
def test_a_command_still_prints_what_the_page_shows(command: str) -> None:
    assert FILL.printed(command) == dict(SHOWN)[command]


@pytest.mark.unit
def test_filling_touches_the_outputs_alone() -> None:
    assert FILL.filled(PAGE, lambda command: dict(SHOWN)[command]) == PAGE
    assert FILL.filled(PAGE, lambda command: "x\n") != PAGE
