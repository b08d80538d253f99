"""Which module of a command is imported, and that each is known by the names that it registers."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest
import typer

from kvrelay.cli import main

pytestmark = pytest.mark.unit


def test_each_module_registers_the_commands_that_it_is_known_for() -> None:
    for path in dict.fromkeys(main.COMMANDS.values()):
        app = typer.Typer()
        import_module(f"kvrelay.cli.{path}").register(app)
        callbacks = [each.name or each.callback.__name__ for each in app.registered_commands if each.callback]
        groups = [each.typer_instance.info.name for each in app.registered_groups if each.typer_instance]
        assert {*callbacks, *groups} == {name for name, of in main.COMMANDS.items() if of == path}


@pytest.mark.parametrize(
    ("words", "environment", "wanted"),
    [
        (["status", "--json"], {}, "status"),
        (["--help"], {}, "--help"),  # no command's name: all are registered
        ([], {}, ""),
        ([], {"_KVRELAY_COMPLETE": "complete_bash", "COMP_WORDS": "kvrelay role"}, ""),
        ([], {"_KVRELAY_COMPLETE": "complete_bash", "COMP_WORDS": "kvrelay role "}, "role"),
        ([], {"_KVRELAY_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "kvrelay bench --ra"}, "bench"),
        ([], {"_KVRELAY_COMPLETE": "source_fish"}, ""),
    ],
)
def test_the_command_that_is_meant(words: list[str], environment: dict[str, str], wanted: str) -> None:
    assert main._command(words, environment) == wanted


def test_a_command_imports_none_of_the_others() -> None:
    code = "import sys; from kvrelay.cli import main; main._register('status'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = done.stdout.split()
    assert "kvrelay.cli.cluster.status" in modules
    assert not {"kvrelay.cli.chat", "kvrelay.cli.planning.plan", "aiohttp", "numpy", "ray", "torch"} & set(modules)
