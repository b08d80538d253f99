"""Paged attention as one operator, so that torch.compile sees a single graph where the layers' own code calls it.

A compiled graph holds tensors and numbers only, so the operator finds the pages, the tables and the backend by the
number of the forward pass that is running. `running` gives a forward its number for as long as it runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.attention.forward_pass import ForwardPass

_running: dict[int, ForwardPass] = {}  # engines run in threads of their own, each under its own number


@contextmanager
def running(state: ForwardPass) -> Iterator[None]:
    """While inside, the operator of this engine's number works on `state`."""
    _running[state.number] = state
    try:
        yield
    finally:
        del _running[state.number]


@torch.library.custom_op("kvrelay::paged_attention", mutates_args=("out_THE",))
def paged_attention(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGE: torch.Tensor,
    out_THE: torch.Tensor,
    number: int,
    layer: int,
    scaling: float,
    softcap: float,
    sinks: torch.Tensor | None,
) -> None:
    """Write the rows' K and V into the pages of `layer`, tell who waits for them, attend into `out_THE`."""
    out_THE.copy_(_running[number].serve(layer, q_THD, k_TGD, v_TGE, scaling, softcap, sinks))


@paged_attention.register_fake
def _(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGE: torch.Tensor,
    out_THE: torch.Tensor,
    number: int,
    layer: int,
    scaling: float,
    softcap: float,
    sinks: torch.Tensor | None,
) -> None:
    return
