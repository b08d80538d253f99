"""`kvrelay make-model`: writes the demo model. What it is made of is kvrelay/demo_model.py's to say."""

from __future__ import annotations

import shlex
from enum import StrEnum
from typing import Annotated

import typer

from kvrelay.cli.console import USAGE, CliError, JsonOption, note, print_json

HELP = """Make a small Llama-style model with random weights and a real tokenizer.

It is seeded: the same command writes the same weights. What it says is noise; that it says the same noise however the
cluster ran is the point.

Examples:

  kvrelay make-model ./model

  kvrelay make-model ./model-125m --size 125m && kvrelay up --model ./model-125m
"""


class Size(StrEnum):
    tiny = "tiny"
    m125 = "125m"


def register(app: typer.Typer) -> None:
    app.command("make-model", help=HELP)(make_model)


def make_model(
    directory: Annotated[str, typer.Argument(help="Where to write it; made if it is not there.")],
    size: Annotated[Size, typer.Option(help="tiny starts in seconds; 125m is for benchmarks.")] = Size.tiny,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Another seed, other weights.")] = 0,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    as_json: JsonOption = False,
) -> None:
    from kvrelay.demo_model import DemoModelError, make_demo_model

    try:
        path = make_demo_model(directory, size=size.value, seed=seed, dtype=dtype)
    except DemoModelError as error:
        raise CliError(str(error), USAGE) from None
    except Exception as error:  # what writes tokenizers and weights, in Rust, raises types of its own
        why = str(error.strerror if isinstance(error, OSError) else error)
        if not isinstance(error, OSError) and "(os error " not in why:
            raise
        raise CliError(f"{directory} cannot be written: {why}; give another directory") from None
    num_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    if as_json:
        print_json({"directory": str(path), "size": size.value, "seed": seed, "dtype": dtype, "bytes": num_bytes})
    else:
        print(path)
        note(f"{num_bytes / 1e6:.1f} MB; serve it with: kvrelay up --model {shlex.quote(directory)}")
