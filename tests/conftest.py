"""For all tests: property tests draw the same examples each time; tests chosen by a mark import no other module."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("same")

# Kernels are run by Triton's interpreter where there is no GPU. Triton's own library takes that in when it is first
# imported, which any test may do.
HAS_GPU = os.environ.get("KVRELAY_TEST_DEVICE", "").startswith("cuda") or any(
    Path(sign).exists() for sign in ("/proc/driver/nvidia/version", "/dev/nvidiactl")
)
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")

OPTIONS_OF_PLUGINS = {"asyncio_mode": "asyncio", "asyncio_default_fixture_loop_scope": "asyncio", "timeout": "timeout"}


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Where a plugin is missing, as on a machine without a network, its options are no mistake of pyproject.toml's.

    Tests that need it fail there, each with a sentence; --strict-config would stop all the others, too."""
    for name, plugin in OPTIONS_OF_PLUGINS.items():
        if not pluginmanager.hasplugin(plugin):
            parser.addini(name, f"an option of pytest-{plugin}, which is not installed")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m unit`, a module that has no such mark is not imported to learn that: torch and Ray take ten seconds."""
    word = config.option.markexpr
    if word not in ("unit", "alone", "gpu"):
        return None
    is_folder = collection_path.is_dir()
    files = collection_path.rglob("*.py") if is_folder else (collection_path, collection_path.with_name("conftest.py"))
    mark = f"mark.{word}".encode()
    return None if any(mark in file.read_bytes() for file in files if file.is_file()) else True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Where cores are shared, a torch with two threads waits most of its time for the second: 25 times as long."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
