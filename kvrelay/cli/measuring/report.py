"""`kvrelay report`: one page of one or more results of `kvrelay bench --save-result`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvrelay.cli.console import CliError, JsonOption, exit_codes, print_json

HELP = """Make a page of what kvrelay bench saved: figures, ratios, distributions, attainment by rate and the knee.

The page stands alone: no script and no request. Of several results each is a line, under its file's name.

Examples:

  kvrelay bench --rates 1,2,4,8 --goodput ttft:500 tpot:50 --num-prompts 200 --save-result

  kvrelay report series-model-20260101-120000.json -o report.html
"""


def register(app: typer.Typer) -> None:
    app.command(help=HELP)(report)


def report(
    results: Annotated[list[Path], typer.Argument(metavar="RESULT.json...", help="What --save-result wrote.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.")] = Path("report.html"),
    as_json: JsonOption = False,
) -> None:
    from kvrelay.bench.pages.page import page
    from kvrelay.bench.pages.reading import read_result, together
    from kvrelay.bench.workload import WorkloadError

    with exit_codes(as_json, wrong=(WorkloadError,), interrupted="interrupted; nothing was written"):
        text = page(together([(path.stem, read_result(path)) for path in results]))
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise CliError(
                f"{output} cannot be written: {(error.strerror or str(error)).lower()}; give another -o"
            ) from None
    if as_json:
        print_json({"report": str(output), "bytes": len(text.encode())})
    else:
        print(output)
