"""For all tests: property tests draw the same examples each time, and the unit tests import nothing heavy."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("same")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A module without a unit test is not imported to learn that: torch and Ray take ten seconds."""
    if config.option.markexpr != "unit":
        return None
    modules = collection_path.rglob("test_*.py") if collection_path.is_dir() else [collection_path]
    return None if any("mark.unit" in module.read_text() for module in modules) else True
