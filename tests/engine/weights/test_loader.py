"""What a model's fingerprint holds: all that a checkpoint does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.weights.loader import _fingerprint

pytestmark = pytest.mark.unit


class Routed(torch.nn.Module):
    """With a router's bias, which a checkpoint holds though it is no parameter, and frequencies, which it does not."""

    def __init__(self, bias: float = 0.0, frequency: float = 1.0, weight: float = 1.0) -> None:
        super().__init__()
        self.config = SimpleNamespace(to_dict=dict)
        self.gate = torch.nn.Parameter(torch.full((2, 3), weight))
        self.register_buffer("e_score_correction_bias", torch.full((3,), bias))
        self.register_buffer("inv_freq", torch.full((4,), frequency), persistent=False)
        self.register_buffer("num_steps", torch.tensor(7))


def fingerprint(**settings: Any) -> str:
    model: Any = Routed(**settings)
    return _fingerprint(model)


def test_it_tells_weights_and_kept_buffers_apart_and_nothing_else() -> None:
    assert fingerprint() == fingerprint(frequency=2.0)  # computed from the config, on each machine
    assert len({fingerprint(), fingerprint(weight=2.0), fingerprint(bias=1.0)}) == 3
