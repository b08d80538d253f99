"""Completion in a real bash: what `complete` registers offers commands, flags, values and a cluster's own names."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvrelay.cli import completing
from kvrelay.cli.cluster import state
from tests.kvrelay.client.scripted import ScriptedServer

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")


@pytest.fixture
def kvrelay(tmp_path: Path) -> dict[str, str]:
    """An environment in which the command is found."""
    script = tmp_path / "kvrelay"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m kvrelay.cli.main "$@"\n')
    script.chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "XDG_STATE_HOME": str(tmp_path)}


def offered(known: dict[str, str], *words: str) -> list[str]:
    """For the last of the words, by the function that `complete` knows for kvrelay."""
    script = (
        'eval "$(_KVRELAY_COMPLETE=source_bash kvrelay)"; f=$(complete -p kvrelay); f=${f##*-F }; f=${f%% *}; '
        f"COMP_WORDS=(kvrelay {shlex.join(words)}); COMP_CWORD={len(words)}; $f kvrelay; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "--norc", "-c", script], env=known, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_commands_flags_and_values(kvrelay: dict[str, str]) -> None:
    assert offered(kvrelay, "dr") == ["drain"]
    assert offered(kvrelay, "bench", "--random-input") == ["--random-input-len"]
    assert offered(kvrelay, "bench", "--backend", "op") == ["openai"]


@pytest.mark.parametrize(("shell", "told"), [("zsh", "#compdef kvrelay"), ("fish", "complete --command kvrelay")])
def test_other_shells_have_a_script_too(kvrelay: dict[str, str], shell: str, told: str) -> None:
    known = kvrelay | {"_KVRELAY_COMPLETE": f"source_{shell}"}
    assert told in subprocess.run(["kvrelay"], env=known, capture_output=True, text=True, check=True).stdout


def test_a_cluster_s_own_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert completing.clusters("") == completing.workers("") == []
    with ScriptedServer() as server:
        here = state.this_process("chat", "foreground")
        state.make_directory()
        state.write(here)
        assert (completing.clusters("c"), completing.workers("")) == (["chat"], [])  # not ready yet
        state.write(replace(here, endpoints=(server.endpoint,)))
        assert completing.clusters("x") == []
        assert completing.workers("de") == ["decode-0"]
        assert (completing.workers("prefill"), completing.pools("")) == ([], ["decode"])
