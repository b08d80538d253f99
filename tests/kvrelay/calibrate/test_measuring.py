from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvrelay.calibrate.effort import QUICK, Effort
from kvrelay.calibrate.measuring import Measuring
from kvrelay.calibrate.probes import LEAST_STEPS, _decode_sample

pytestmark = pytest.mark.unit

LIMITS = {"max_batch_tokens": "64", "pack_tokens": "32", "max_batch_size": "4"}
WORKER: Any = SimpleNamespace(role="prefill", limits=LIMITS, total_pages=256, page_size=16)
MIXED: Any = SimpleNamespace(role="mixed", limits=LIMITS | {"chunk_tokens": "64"}, total_pages=256, page_size=16)


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


class Beside(Prober):
    """Steps of both, each of which takes a millisecond for each token and each request."""

    async def remember(self, prompts: Sequence[Sequence[int]]) -> None: ...

    async def decode_beside_prefill(
        self, prompts: Sequence[Sequence[int]], steps: int, prompt_len: int, feeders: int
    ) -> tuple[list[Any], list[Any]]:
        assert feeders == 1, "two prompts would share a step"
        seconds = 1e-3 * (prompt_len + len(prompts))
        return [SimpleNamespace(context_tokens=100 * len(prompts))], [SimpleNamespace(seconds=seconds)] * 3


async def test_steps_of_both_are_looked_at_by_batch_and_chunk_and_checked_between() -> None:
    prober: Any = Beside(())
    measuring = Measuring(prober, {"prefill": [MIXED], "decode": [MIXED]}, Effort(), 0, lambda *_: None)
    for task in measuring._mixed_tasks():
        await task()
    asked = sorted(measuring.samples.mixed)
    assert asked == [(1, 16, False), (1, 63, False), (4, 15, False), (4, 36, True), (4, 60, False)]
    assert all(size + length <= 64 for size, length, _ in asked)  # one step holds them
    assert measuring.samples.mixed[4, 60, False] == [(1e-3 * 64, 400)] * 3


class Steps(Prober):
    """Steps of `step_s` each."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self.asked: list[int] = []

    async def decode(self, prompts: Sequence[Sequence[int]], steps: int) -> list[Any]:
        self.asked.append(steps)
        return [SimpleNamespace(batch_size=len(prompts), begun_s=1.0, ended_s=1.0 + steps * self._step_s)]


@pytest.mark.parametrize(("step_s", "asked"), [(0.02, [32]), (0.002, [32, 128])], ids=["long steps", "short steps"])
async def test_steps_are_counted_for_longer_than_a_client_may_be_late(step_s: float, asked: list[int]) -> None:
    prober: Any = Steps(step_s)
    measuring = Measuring(prober, {"prefill": [WORKER], "decode": [WORKER]}, Effort(), 0, lambda *_: None)
    await measuring._decode([[5] * 16], 16, False)
    assert prober.asked == asked
    (sample,) = measuring.samples.decode[1, 16, False]
    assert sample.ended_s - sample.begun_s == pytest.approx(asked[-1] * step_s)


def test_steps_are_timed_where_each_brings_a_message() -> None:
    def answer(*token_times_s: float) -> Any:
        return SimpleNamespace(output_len=34, input_len=16, token_times_s=list(token_times_s))

    steady = answer(*(0.1 * i for i in range(2 + LEAST_STEPS)))
    sample = _decode_sample([steady, steady])
    assert sample is not None
    assert sample.seconds == pytest.approx(0.1)
    for once in ([answer(1.0)], [answer(0.05), steady]):
        assert _decode_sample(once) is None, "all of its tokens came at once"
