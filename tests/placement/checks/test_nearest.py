"""The measured steps that a plan is shown beside are of its GPU, its size and its phases."""

from __future__ import annotations

import pytest

from placement.checks.nearest import nearest
from placement.latency.hardware import load_hardware
from placement.latency.model_files import load_shape
from placement.plan import Near
from tests.kvrelay.plan.plan_fixture import apart, together

pytestmark = pytest.mark.unit


def found(model: str, hardware: str, *, pair: bool = False, prompt: float = 500.0) -> tuple[Near, ...]:
    candidate = apart((4, 1), (8, 1)) if pair else together(1, 2)
    return nearest(load_shape(model), load_hardware(hardware), candidate, prompt)


def test_the_nearest_are_of_the_same_gpu_size_and_precision() -> None:
    for near in found("llama-3.1-8b", "h100-sxm"):
        assert near.case.startswith("llama-2-7b fp16, NVIDIA H100")
        assert "TP 1" in near.case
        assert abs(near.error) < 0.2


def test_each_pool_has_those_of_its_phase_and_degree() -> None:
    nears = found("llama-3.1-70b", "h200-sxm", pair=True)
    assert {(near.phase, near.case.split("TP ")[1][0]) for near in nears} == {("prefill", "4"), ("decode", "8")}
    assert all("llama-2-70b" in near.case for near in nears)


def test_a_gpu_that_nobody_measured_has_those_of_others() -> None:
    assert all("B200" not in near.case for near in found("llama-3.1-8b", "b200-sxm"))
    assert len(found("llama-3.1-8b", "b200-sxm")) == 6


def test_long_prompts_are_shown_beside_long_ones() -> None:
    assert all("x 2,048+" in near.case for near in found("llama-3.1-8b", "h100-sxm", prompt=4000))
