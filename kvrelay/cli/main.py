"""The `kvrelay` command: registers the commands and turns what they raise into exit codes. It does nothing itself.

Exit codes: 0 done; 1 it failed; 2 it was asked wrongly; 130 interrupted. What is heavy (ray, torch, grpc) is imported
by the commands when they need it, and a command itself when it is meant, so that --help is quick.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Mapping
from importlib import import_module

import typer

from kvrelay.cli.console import ENDPOINT_VARIABLE, INTERRUPTED, CliError, report, write_to_any_terminal

PROGRAM = "kvrelay"
KNOCK_TIMEOUT_S = 1.0

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


COMMANDS = {  # the module of each, and how its help begins, which is all that `kvrelay --help` says of it
    "up": ("cluster.up", "Start a cluster and serve until Ctrl-C."),
    "down": (
        "cluster.down",
        "End a cluster in good order: running requests may finish, then every process that belongs to it is gone.",
    ),
    "status": (
        "cluster.status",
        "Show what a router knows: its requests, every worker's state, queue and pages, and what is wrong and why.",
    ),
    "doctor": ("doctor", "Check this machine, a spec and a running cluster, and say how to mend what is wrong."),
    "token": (
        "cluster.token",
        "Print the token of the cluster that was started from here, for curl, OpenAI's clients and gRPC tools.",
    ),
    "drain": (
        "cluster.drain",
        "Have a worker left: routers send it nothing new and move what it decodes to others, with no token lost.",
    ),
    "role": ("cluster.role", "Change what a worker does: prefill, decode, or mixed for both."),
    "scale": ("cluster.scale", "Have a pool of so many workers."),
    "adapter": ("adapter", "Which LoRA adapters requests may name, beside the model itself."),
    "apply": ("spec.apply", "Change what a running cluster runs with, to what a spec says."),
    "roll": ("spec.roll", "Replace the workers of pools, or all of them, one after another, with nothing lost."),
    "config": ("spec.config", "Look at what a cluster is started from, or runs with."),
    "replan": (
        "cluster.replan",
        "Say which workers should have other roles or chunks for what has come lately, or have them change.",
    ),
    "decisions": ("cluster.replan", "Show what `kvrelay replan` has decided, why, and what came of it."),
    "explain": (
        "explain",
        "Say where the time of a request went: what it waited for and why, who computed it, what was slow.",
    ),
    "usage": (
        "usage",
        "Say what each key used: requests, tokens of prompts, cached and generated, seconds of workers, and the cost.",
    ),
    "generate": ("generate", "Send one prompt and print the answer as it comes."),
    "chat": (
        "chat",
        "Talk with the model that is served. An empty line does nothing, Ctrl-C ends an answer, Ctrl-D ends the talk.",
    ),
    "bench": ("measuring.bench", "Play a trace or random lengths, and print latencies and goodput."),
    "report": (
        "measuring.report",
        "Make a page of what kvrelay bench saved: figures, ratios, distributions, attainment by rate and the knee.",
    ),
    "plan": (
        "planning.plan",
        "Size the prefill and decode pools for a model, a kind of GPU, a workload and two latency targets.",
    ),
    "simulate": (
        "planning.simulate",
        "Simulate a cluster spec under a load: attainment, TTFT and TPOT at each rate, where the time goes, "
        "what binds.",
    ),
    "calibrate": ("planning.calibrate", "Measure a running cluster: how long prefill, decode and handoff take."),
    "verify": ("planning.verify", "Play a plan's workload against a live cluster: predicted against measured."),
    "chaos": ("measuring.chaos", "Put faults into a cluster of real processes, and hold it to its bounds."),
    "make-model": ("make_model", "Make a small Llama-style model with random weights and a real tokenizer."),
}


UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)  # the last: beyond `ulimit -f`
LISTED = ("", "--help", "-h")  # in a command's place
NOT_HERE = ("--help", "-h", "--address", "--detach", "-d", "--check")  # `up` starts nothing, elsewhere, or only later


def _register(command: str = "") -> None:
    """This one, or all: a module has what its own command needs."""
    names = [command] if command in COMMANDS else COMMANDS
    for path in dict.fromkeys(COMMANDS[name][0] for name in names):
        import_module(f"kvrelay.cli.{path}").register(app)


def _list() -> None:
    """All by name, where they are only told of and none can be called: no module is imported for that."""
    for name, (_, about) in COMMANDS.items():
        app.command(name, help=about)(lambda: None)


def _command(arguments: list[str], environment: Mapping[str, str]) -> str:
    """The one that is asked for; empty: none yet. A shell that wants a completion tells its words: of bash in one way,
    of zsh and fish in another (typer's)."""
    if _is_completing(environment):
        line = environment.get("_TYPER_COMPLETE_ARGS") or environment.get("COMP_WORDS", "")
        arguments = line.split()[1:]
        if len(arguments) == 1 and not line[-1:].isspace():
            return ""  # its name may go on
    return arguments[0] if arguments else ""


def _is_completing(environment: Mapping[str, str]) -> bool:
    return f"_{PROGRAM.upper()}_COMPLETE" in environment


def _begins_forks(arguments: list[str], environment: Mapping[str, str]) -> bool:
    """Whether a fork server will most likely be wanted: it imports while the spec is read."""
    if arguments[:1] != ["up"] or _is_completing(environment):
        return False
    from cluster.deploy.gpus import count_gpus

    return not any(word.partition("=")[0] in NOT_HERE for word in arguments) and not count_gpus()


def _find_endpoint(arguments: list[str]) -> None:
    """With one cluster running here, the commands that want an endpoint mean that one: of its routers the first that
    answers."""
    if ENDPOINT_VARIABLE in os.environ or any(a.partition("=")[0] == "--endpoint" for a in arguments):
        return
    from kvrelay import known_clusters

    running = [cluster.endpoints for cluster in known_clusters.alive() if cluster.endpoints]
    if len(running) == 1:
        first, *others = running[0]
        os.environ[ENDPOINT_VARIABLE] = next(filter(_answers, running[0]), first) if others else first


def _answers(endpoint: str) -> bool:
    from worker.wire.knock import knock

    host, _, port = endpoint.rpartition(":")
    try:
        knock(host, int(port), KNOCK_TIMEOUT_S)
    except OSError:
        return False
    return True


ASK_A_ROUTER = (
    *("generate", "bench", "calibrate", "verify", "drain", "role", "scale", "adapter", "apply", "roll", "config"),
    *("replan", "decisions", "explain", "usage", "token"),
)


def main() -> None:
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # what fails is told in our own words; read as gRPC is imported
    with contextlib.ExitStack() as ends:
        if _begins_forks(sys.argv[1:], os.environ):
            from cluster.deploy.forks import started

            started.begin()
            ends.callback(started.end_untaken)
        _main()


def _main() -> None:
    write_to_any_terminal()
    try:
        command = _command(sys.argv[1:], os.environ)
        if command in LISTED:
            _list()
        else:
            _register(command)
        if sys.argv[1:2] and sys.argv[1] in ASK_A_ROUTER:
            _find_endpoint(sys.argv[2:])
        try:
            app(prog_name=PROGRAM)  # by which shells ask for completions, too
        finally:
            _flush()
    except CliError as error:
        sys.exit(report(error, "--json" in sys.argv))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except RuntimeError as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # while a class was made (__set_name__)
            sys.exit(INTERRUPTED)
        raise
    except BrokenPipeError:  # whoever read it has left
        sys.stdout = None
        sys.exit(1)
    except OSError as error:
        if error.errno not in UNWRITABLE or error.filename is not None:
            raise
        sys.stdout = None  # it is not tried again
        why = os.strerror(error.errno).lower()
        sys.exit(report(CliError(f"what was to be told cannot be written: {why}"), False))


def _flush() -> None:
    if sys.stdout is not None and not sys.stdout.closed:
        sys.stdout.flush()


if __name__ == "__main__":
    main()
