"""The generated stubs are what proto/ says, and every field of the wire is explained."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[1]
PROTOS = sorted((ROOT / "proto/kvrelay/v1").glob("*.proto"))
FIELD = re.compile(r"^\s+(?:optional |repeated )?(?:map<[\w, ]+>|[\w.]+) \w+ = \d+;")
VALUE = re.compile(r"^\s+[A-Z_]+ = \d+;")


def test_the_stubs_are_not_stale(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}"]
    command += [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run([*command, *map(str, PROTOS)], check=True, cwd=ROOT)
    made = {path.name: path.read_text() for path in (tmp_path / "kvrelay/v1").iterdir()}
    kept = {path.name: path.read_text() for path in (ROOT / "kvrelay/v1").glob("*_pb2*")}
    stale = sorted(name for name in made.keys() | kept.keys() if made.get(name) != kept.get(name))
    assert not stale, f"run `make proto`: {', '.join(stale)}"


def test_no_older_grpc_or_protobuf_is_allowed_than_the_stubs_were_made_with() -> None:
    """They refuse to be imported by one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = map(Requirement, [*project["dependencies"], *project["optional-dependencies"]["dev"]])
    floors = {each.name: str(each.specifier) for each in needed if each.name.startswith(("grpcio", "protobuf"))}
    text = "".join(path.read_text() for path in (ROOT / "kvrelay/v1").glob("*_pb2*.py"))
    [grpc] = set(re.findall(r"^GRPC_GENERATED_VERSION = '(.+)'$", text, re.MULTILINE))
    [protobuf] = set(re.findall(r"^# Protobuf Python Version: (.+)$", text, re.MULTILINE))
    assert floors.pop("protobuf") == f">={protobuf}"
    assert len(floors) == 4
    assert set(floors.values()) == {f">={grpc}"}


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.name)
def test_every_field_and_value_has_a_comment(path: Path) -> None:
    lines = path.read_text().splitlines()
    bare = [
        f"{path.name}:{number + 1}: {line.strip()}"
        for number, line in enumerate(lines)
        if (FIELD.match(line) or VALUE.match(line)) and not lines[number - 1].strip().startswith("//")
    ]
    assert not bare, "\n".join(bare)
