from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvrelay.calibrate.effort import QUICK
from kvrelay.calibrate.measuring import Measuring

pytestmark = pytest.mark.unit

WORKER: Any = SimpleNamespace(
    limits={"max_batch_tokens": "64", "pack_tokens": "32", "max_batch_size": "4"}, total_pages=256, page_size=16
)


class Prober:
    """Prompts that take `seconds`, one after another."""

    model = SimpleNamespace(max_model_len=192)

    def __init__(self, seconds: Sequence[float]) -> None:
        self._seconds = seconds

    def prompt(self, length: int) -> list[int]:
        return [5] * length

    async def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[list[Any], list[Any]]:
        return [SimpleNamespace(seconds=each) for each, _ in zip(self._seconds, prompts, strict=True)], []


@pytest.mark.parametrize(
    ("seconds", "points"),
    [((0.2, 0.1, 0.1), {((24, 0), (24, 0)): [0.1]}), ((0.2, 0.1, 0.2), {})],
    ids=["one step", "two steps"],
)
async def test_prompts_are_a_point_where_they_went_into_one_step(
    seconds: Sequence[float], points: dict[tuple[tuple[int, int], ...], list[float]]
) -> None:
    prober: Any = Prober(seconds)
    pools = {"prefill": [WORKER], "decode": [WORKER]}
    measuring = Measuring(prober, pools, QUICK, 0, lambda *_: None)
    await measuring._together(2, 24, False)
    assert dict(measuring.samples.prefill) == points
