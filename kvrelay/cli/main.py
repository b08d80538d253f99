"""The `kvrelay` command: registers the commands and turns what they raise into exit codes. It does nothing itself.

Exit codes: 0 done; 1 it failed; 2 it was asked wrongly; 130 interrupted. What is heavy (ray, torch, grpc) is imported
by the commands when they need it, so that --help is quick.
"""

from __future__ import annotations

import os
import sys
from typing import Any

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


def _register() -> None:
    from kvrelay.cli import chat, doctor, explain, generate, make_model, usage
    from kvrelay.cli.cluster import down, drain, replan, role, scale, status, token, up
    from kvrelay.cli.measuring import bench, chaos, report
    from kvrelay.cli.planning import calibrate, plan, simulate, verify
    from kvrelay.cli.spec import apply, config, roll

    modules: list[Any] = [
        up,
        down,
        status,
        doctor,
        token,
        drain,
        role,
        scale,
        apply,
        roll,
        config,
        replan,
        explain,
        usage,
        generate,
        chat,
        bench,
        report,
        plan,
        simulate,
        calibrate,
        verify,
        chaos,
        make_model,
    ]
    for module in modules:
        module.register(app)


def _find_endpoint(arguments: list[str]) -> None:
    """With one cluster running here, the commands that want an endpoint mean that one."""
    if ENDPOINT_VARIABLE in os.environ or any(a.partition("=")[0] == "--endpoint" for a in arguments):
        return
    from kvrelay.client import known_clusters

    endpoints = [cluster.endpoints[0] for cluster in known_clusters.alive() if cluster.endpoints]
    if len(endpoints) == 1:
        os.environ[ENDPOINT_VARIABLE] = endpoints[0]


ASK_A_ROUTER = (
    *("generate", "bench", "calibrate", "verify", "drain", "role", "scale", "apply", "roll", "config", "replan"),
    *("decisions", "explain", "usage", "token"),
)


def main() -> None:
    _register()
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
