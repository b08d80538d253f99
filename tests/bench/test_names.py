"""What `python -m bench` offers is there."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from bench.__main__ import NAMES


@pytest.mark.unit
def test_every_benchmark_offered_is_a_module() -> None:
    assert [name for name in NAMES if find_spec(f"bench.{name}") is None] == []
