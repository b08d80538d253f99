"""Kernels of a GPU: FlashInfer's, and plain torch where FlashInfer is missing or the dtype is not its own.

Both run wherever torch does, which is how their layers are tested without a GPU. They round where the layers' own torch
code rounds, to within a bit or two of the last place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from engine.adapters.products import AdaptedProduct, Site
from engine.attention.forward_pass import ForwardPass
from engine.fused.kernels import Heads, MakeRotation, NormWeight, RopeTable, Rotation
from engine.weights.linear import side_by_side
from engine.weights.ropes import TurnedByLength

RotateAndWrite = Callable[..., torch.Tensor]  # rotary_kernel.rotate_and_write, or its like


class TorchKernels:
    def __init__(self, rotate_and_write: RotateAndWrite | None = None) -> None:
        """`rotate_and_write`: one kernel for both, taken for a table's rotation over pages in the rows' dtype."""
        self._rotate_and_write = rotate_and_write

    def linear(
        self,
        weights_ON: Sequence[torch.Tensor],
        bias_O: torch.Tensor | None,
        scales_O: torch.Tensor | None,
        site: Site | None,
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        assert scales_O is None, "weights in int8 are for CPUs"
        product = partial(functional.linear, weight=side_by_side(weights_ON), bias=bias_O)
        return product if site is None else AdaptedProduct(product, site)

    def norm(self, x: torch.Tensor, norm: NormWeight) -> torch.Tensor:
        exact = x.float()
        exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + norm.eps)
        if norm.plus_one:
            return (exact * (1.0 + norm.weight.float())).to(x.dtype)
        return norm.weight * exact.to(x.dtype)

    def add_norm(self, x: torch.Tensor, y: torch.Tensor, norm: NormWeight) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + y
        return total, self.norm(total, norm)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def rotate_and_write(
        self, qkv: torch.Tensor, rotation: Rotation, heads: Heads, layer: int, state: ForwardPass
    ) -> torch.Tensor:
        dim = heads.head_dim
        rows = qkv.view(-1, qkv.shape[-1])
        widths = [heads.heads * dim, heads.kv_heads * dim, heads.kv_heads * dim]
        q, k, v = torch.split(rows, widths, dim=-1)
        if heads.q_norm is not None and heads.k_norm is not None:
            q = self.norm(_by_head(q, dim), heads.q_norm).flatten(1)
            k = self.norm(_by_head(k, dim), heads.k_norm).flatten(1)
        k_pages, v_pages, v_TGD = state.memory.k(layer), state.memory.v(layer), _by_head(v, dim)
        run = self._rotate_and_write
        if run is None or not isinstance(rotation, RopeTable) or k_pages.dtype != qkv.dtype:
            q_THD, k_TGD = self.rotate(q, k, rotation, dim)
            state.write(layer, k_TGD, v_TGD)
            return q_THD
        q_THD = run(_by_head(q, dim), _by_head(k, dim), v_TGD, rotation, k_pages, v_pages, state.meta.slots)
        state.tell(layer)
        return q_THD

    def rotation(self, rotary: nn.Module, like: torch.Tensor, dim: int, max_len: int) -> MakeRotation | None:
        """By a table of every position, in float32."""
        if isinstance(rotary.forward, TurnedByLength):
            return None
        positions = torch.arange(max_len, device=like.device)[None]
        cos, sin = rotary(torch.zeros(1, max_len, 1, dtype=torch.float32, device=like.device), positions)
        half = dim // 2
        if cos.dtype != torch.float32 or cos.shape[-1] != dim or not torch.equal(cos[..., :half], cos[..., half:]):
            return None
        table = torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1).contiguous()
        return lambda _, positions_T: RopeTable(table, positions_T)

    def rotate(
        self, q: torch.Tensor, k: torch.Tensor, rotation: Rotation, dim: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, H D], [T, G D] -> [T, H, D], [T, G, D]: Llama's rotation, by halves."""
        cos_T1D, sin_T1D = _cos_sin(rotation, q.dtype)
        assert cos_T1D.shape[-1] == dim, "a rotation of part of the head is not what the source says"

        def rotated(x: torch.Tensor) -> torch.Tensor:
            x = _by_head(x, dim)
            low, high = x.chunk(2, dim=-1)
            return x * cos_T1D + torch.cat((-high, low), dim=-1) * sin_T1D

        return rotated(q), rotated(k)


class FlashInferKernels(TorchKernels):
    """Half precision only."""

    def __init__(self, flashinfer: Any, rotate_and_write: RotateAndWrite | None = None) -> None:
        """`flashinfer`: the package, or what stands in for it."""
        super().__init__(rotate_and_write)
        self._library = flashinfer

    def norm(self, x: torch.Tensor, norm: NormWeight) -> torch.Tensor:
        run = self._library.gemma_rmsnorm if norm.plus_one else self._library.rmsnorm
        rows = x if x.dim() == 3 and x.shape[0] != 1 else x.reshape(-1, x.shape[-1])
        result: torch.Tensor = run(input=rows, weight=norm.weight, eps=norm.eps)
        return result.view(x.shape)

    def add_norm(self, x: torch.Tensor, y: torch.Tensor, norm: NormWeight) -> tuple[torch.Tensor, torch.Tensor]:
        run = self._library.gemma_fused_add_rmsnorm if norm.plus_one else self._library.fused_add_rmsnorm
        total, out = x.contiguous(), y.contiguous()
        width = total.shape[-1]
        run(input=out.view(-1, width), residual=total.view(-1, width), weight=norm.weight, eps=norm.eps)
        return total, out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        if gate_up.shape[-1] * gate_up.element_size() % 16:
            return super().silu_mul(gate_up)
        result: torch.Tensor = self._library.silu_and_mul(input=gate_up)
        return result

    def rotate(
        self, q: torch.Tensor, k: torch.Tensor, rotation: Rotation, dim: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not isinstance(rotation, RopeTable):
            return super().rotate(q, k, rotation, dim)
        q, k = self._library.apply_rope_with_cos_sin_cache(
            positions=rotation.positions, query=q, key=k, head_size=dim, cos_sin_cache=rotation.cos_sin
        )
        return _by_head(q, dim), _by_head(k, dim)


def _by_head(x: torch.Tensor, dim: int) -> torch.Tensor:
    """[T, H D] -> [T, H, D]"""
    return x.view(x.shape[0], -1, dim)


def _cos_sin(rotation: Rotation, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Both [T, 1, D], in `dtype`."""
    if isinstance(rotation, RopeTable):
        halves = rotation.cos_sin[rotation.positions].to(dtype).chunk(2, dim=-1)
        cos, sin = (torch.cat((half, half), dim=-1) for half in halves)
        return cos.unsqueeze(1), sin.unsqueeze(1)
    cos, sin = rotation
    return cos[0].unsqueeze(1), sin[0].unsqueeze(1)
