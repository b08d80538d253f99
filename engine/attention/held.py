"""Held is where a model's modules find the state of the pass that runs, where keyword arguments do not reach them."""

from __future__ import annotations

from typing import Any

from torch import nn

HELD = "kvrelay_held"  # attribute of every module of a model


class Held:
    """One thread runs a model."""

    def __init__(self) -> None:
        self.state: Any = None  # a Probe or a ForwardPass; None: no pass runs


def hold(model: nn.Module) -> Held:
    """The model's own, made at the first call."""
    held: Held | None = getattr(model, HELD, None)
    if held is None:
        held = Held()
        for module in model.modules():
            object.__setattr__(module, HELD, held)
    return held


def held_by(module: nn.Module) -> Any:
    held: Held | None = getattr(module, HELD, None)
    return None if held is None else held.state
