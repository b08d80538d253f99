"""Every row of Splitwise's simulator that is known; half a minute."""

from __future__ import annotations

from typing import Any

import pytest

from tests.placement.papers.test_splitwise import CASES, FEW, check_row, code_requests, name_of

__all__ = ["code_requests"]  # the fixture


@pytest.mark.parametrize("row", [row for row in CASES["rows"] if row not in FEW], ids=name_of)
def test_row(row: dict[str, Any], code_requests: list[list[float]]) -> None:
    check_row(row, code_requests)
