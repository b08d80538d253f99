"""What configs/ray/*.yaml hands to `ray up` is what Ray's own schema takes."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import ray
import yaml

FILES = sorted((Path(__file__).parents[2] / "configs" / "ray").glob("*.yaml"))
SCHEMA = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_ray_up_takes_it(path: Path) -> None:
    jsonschema.validate(yaml.safe_load(path.read_text()), SCHEMA)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_each_role_finds_a_host(path: Path) -> None:
    """The resources that configs/two-hosts.yaml asks for are announced by a node each."""
    text = path.read_text()
    assert text.count('"prefill_host": 1') == 1
    assert text.count('"decode_host": 1') == 1
