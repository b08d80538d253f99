"""`python docs/draw_demo.py`: runs the demo and draws what it printed, as docs/demo.svg."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

DRAWN = Path(__file__).resolve().parent / "demo.svg"
COLUMNS = 100


def main() -> None:
    plain_bars = {"FORCE_COLOR": "1", "TTY_INTERACTIVE": "0", "COLUMNS": str(COLUMNS)}  # rich's: colours, nothing moves
    command = [sys.executable, "-m", "kvrelay.demo"]
    ran = subprocess.run(command, env=os.environ | plain_bars, stdout=subprocess.PIPE, text=True, check=True)
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    told = ran.stdout.rstrip().replace(f"{Path.cwd()}{os.sep}", "")
    console.print(Text.from_ansi(f"$ make demo\n{told}"))
    DRAWN.write_text(console.export_svg(title="kvrelay", unique_id="demo"), encoding="utf-8")


if __name__ == "__main__":
    main()
