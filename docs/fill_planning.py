"""`python docs/fill_planning.py`: runs the commands of docs/planning.md that show an output and writes what they print.

A command stands in an `sh` block, its output in a `text` block between `<!-- output -->` and `<!-- /output -->` right
after it. Nothing else of the page is touched.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from placement.compiled.build import compiled_folder

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "planning.md"
SHOWN = re.compile(
    r"(```sh\n(?P<command>[^`]+)```\n<!-- output -->\n```text\n)(?P<output>.*?)(?P<end>```\n<!-- /output -->)",
    re.DOTALL,
)
COLUMNS = "118"
TIMEOUT_S = 1800


def main() -> None:
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), printed), encoding="utf-8")


def filled(page: str, run: Callable[[str], str]) -> str:
    return SHOWN.sub(lambda found: f"{found[1]}{run(found['command'])}{found['end']}", page)


def shown(page: str) -> list[tuple[str, str]]:
    """Every command with an output, and the output."""
    return [(found["command"], found["output"]) for found in SHOWN.finditer(page)]


def printed(command: str) -> str:
    """stderr and then stdout of a `kvrelay ...` as a reader at a terminal of so many columns sees them."""
    compiled_folder()  # once for a version of the sources, which the command would say
    words = shlex.split(command.replace("\\\n", " "))
    assert words[0] == "kvrelay", f"{words[0]} is not run by this script"
    environment = {**os.environ, "COLUMNS": COLUMNS, "NO_COLOR": "1", "TERM": "dumb"}
    call = [sys.executable, "-m", "kvrelay.cli.main", *words[1:]]
    done = subprocess.run(
        call, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    lines = [line.rstrip() for line in f"{done.stderr}{done.stdout}".splitlines()]
    return "\n".join(lines).strip("\n") + "\n"


if __name__ == "__main__":
    main()
