from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.forked import forked_ranks
from tests.zoo import make_tiny_model

__all__ = ["forked_ranks"]

ModelDir = Callable[[str], Path]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> ModelDir:
    """The directory of a tiny model, made at first use."""

    @cache
    def make(name: str) -> Path:
        return make_tiny_model(name, tmp_path_factory.mktemp("models") / name)

    return make
