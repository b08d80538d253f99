from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.zoo import make_tiny_model

ModelDir = Callable[[str], Path]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> ModelDir:
    """The directory of a tiny model, made at first use."""

    @cache
    def make(name: str) -> Path:
        return make_tiny_model(name, tmp_path_factory.mktemp("models") / name)

    return make


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
