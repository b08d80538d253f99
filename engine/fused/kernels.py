"""What a fused layer asks of the machine's kernels: products with joined weights, norms, the rotation, SiLU.

Shapes: T tokens, N width, H query heads, G key/value heads, D head_dim, I width of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from engine.adapters.products import Site
from engine.attention.forward_pass import ForwardPass


@dataclass(frozen=True, slots=True)
class NormWeight:
    """x / rms(x) * weight, or * (1 + weight)."""

    weight: torch.Tensor
    eps: float
    plus_one: bool


@dataclass(frozen=True, slots=True)
class Heads:
    """How an attention's joined projection is cut, and the norms of its heads where it has them."""

    heads: int
    kv_heads: int
    head_dim: int
    q_norm: NormWeight | None
    k_norm: NormWeight | None


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Cosine and sine of every position, made once at load, and which of them this step's rows want."""

    cos_sin: torch.Tensor  # float32 [positions, D]: D/2 cosines, then D/2 sines
    positions: torch.Tensor  # int64 [T]


Rotation = tuple[torch.Tensor, torch.Tensor] | RopeTable  # cos and sin [1, T, D] as transformers makes them, or a table
MakeRotation = Callable[[torch.Tensor, torch.Tensor], Rotation]  # of hidden states [1, T, N] and positions [T]


class OneCall(Protocol):
    """A whole decoder's layers at once (one_call.py)."""

    def serves(self, state: ForwardPass) -> bool: ...

    def __call__(self, total: torch.Tensor, rotation: Rotation, state: ForwardPass) -> torch.Tensor: ...


class Kernels(Protocol):
    def linear(
        self,
        weights_ON: Sequence[torch.Tensor],
        bias_O: torch.Tensor | None,
        scales_O: torch.Tensor | None,
        site: Site | None,
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """x W^T + b over weights one behind the other, which the caller gives up; of int8 where they have scales
        (engine/weights/int8.py). `site`: what adapters add."""

    def norm(self, x: torch.Tensor, norm: NormWeight) -> torch.Tensor: ...

    def add_norm(self, x: torch.Tensor, y: torch.Tensor, norm: NormWeight) -> tuple[torch.Tensor, torch.Tensor]:
        """(x + y, the norm of x + y). May work in place: neither x nor y is to be read after."""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[..., 2 I] -> silu(first half) * second half: [..., I]"""

    def rotate_and_write(
        self, qkv: torch.Tensor, rotation: Rotation, heads: Heads, layer: int, state: ForwardPass
    ) -> torch.Tensor:
        """From [1, T, (H + 2 G) D]: the heads' norms, the rotation, K and V into the layer's pages; q [T, H, D]."""

    def rotation(self, rotary: nn.Module, like: torch.Tensor, dim: int, max_len: int) -> MakeRotation | None:
        """How a whole model's rows are turned, heads of `dim` at positions below `max_len`; None if not as Llama's.

        `rotary` is the model's module, `like` one of its vectors [N].
        """
