"""The `kvrelay` command: registers the commands and turns what they raise into exit codes. It does nothing itself.

Exit codes: 0 done; 1 it failed; 2 it was asked wrongly; 130 interrupted. What is heavy (ray, torch, grpc) is imported
by the commands when they need it, so that --help is quick.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib import import_module

import typer

from kvrelay.cli.console import ENDPOINT_VARIABLE, INTERRUPTED, CliError, report

PROGRAM = "kvrelay"

app = typer.Typer(
    name=PROGRAM,
    help="Serve a language model from a prefill pool and a decode pool: Ray places, gRPC streams, the KV cache is "
    "relayed between them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"kvrelay {version('kvrelay')}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    return


COMMANDS = {
    "up": "cluster.up",
    "down": "cluster.down",
    "status": "cluster.status",
    "doctor": "doctor",
    "token": "cluster.token",
    "drain": "cluster.drain",
    "role": "cluster.role",
    "scale": "cluster.scale",
    "adapter": "adapter",
    "apply": "spec.apply",
    "roll": "spec.roll",
    "config": "spec.config",
    "replan": "cluster.replan",
    "decisions": "cluster.replan",
    "explain": "explain",
    "usage": "usage",
    "generate": "generate",
    "chat": "chat",
    "bench": "measuring.bench",
    "report": "measuring.report",
    "plan": "planning.plan",
    "simulate": "planning.simulate",
    "calibrate": "planning.calibrate",
    "verify": "planning.verify",
    "chaos": "measuring.chaos",
    "make-model": "make_model",
}


def _register(command: str = "") -> None:
    """This one, or all: a module has what its own command needs."""
    paths = [COMMANDS[command]] if command in COMMANDS else dict.fromkeys(COMMANDS.values())
    for path in paths:
        import_module(f"kvrelay.cli.{path}").register(app)


def _command(arguments: list[str], environment: Mapping[str, str]) -> str:
    """The one that is asked for; empty: none yet. A shell that wants a completion tells its words: of bash in one way,
    of zsh and fish in another (typer's)."""
    if f"_{PROGRAM.upper()}_COMPLETE" in environment:
        line = environment.get("_TYPER_COMPLETE_ARGS") or environment.get("COMP_WORDS", "")
        arguments = line.split()[1:]
        if len(arguments) == 1 and not line[-1:].isspace():
            return ""  # its name may go on
    return arguments[0] if arguments else ""


def _find_endpoint(arguments: list[str]) -> None:
    """With one cluster running here, the commands that want an endpoint mean that one."""
    if ENDPOINT_VARIABLE in os.environ or any(a.partition("=")[0] == "--endpoint" for a in arguments):
        return
    from kvrelay.client import known_clusters

    endpoints = [cluster.endpoints[0] for cluster in known_clusters.alive() if cluster.endpoints]
    if len(endpoints) == 1:
        os.environ[ENDPOINT_VARIABLE] = endpoints[0]


ASK_A_ROUTER = (
    *("generate", "bench", "calibrate", "verify", "drain", "role", "scale", "adapter", "apply", "roll", "config"),
    *("replan", "decisions", "explain", "usage", "token"),
)


def main() -> None:
    _register(_command(sys.argv[1:], os.environ))
    if sys.argv[1:2] and sys.argv[1] in ASK_A_ROUTER:
        _find_endpoint(sys.argv[2:])
    try:
        app(prog_name=PROGRAM)  # by which shells ask for completions, too
    except CliError as error:
        sys.exit(report(error, "--json" in sys.argv))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
