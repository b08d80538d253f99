"""The fused layers: joined projections, and one pass over memory where torch has many.

Each stands in a module's place as its `forward`. recognise.py says which modules may have one; which kernels run, and
how products are kept, is the machine's (kernels.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPast

from engine.attention.forward_pass import ForwardPass
from engine.fused.kernels import Heads, Kernels, MakeRotation, NormWeight, OneCall, Rotation
from engine.weights.stage import PassLeaves


@dataclass(frozen=True, slots=True)
class Norm:
    kernels: Kernels
    weight: NormWeight
    own: Callable[[torch.Tensor], torch.Tensor]  # the module's, for rows in another dtype than its weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernels.norm(x, self.weight) if x.dtype == self.weight.weight.dtype else self.own(x)

    def after_adding(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(x + y, the norm of x + y); neither x nor y is read after."""
        assert x.dtype == self.weight.weight.dtype, "the layers that are recognised add and norm in one dtype"
        return self.kernels.add_norm(x, y, self.weight)


@dataclass(frozen=True, slots=True)
class Mlp:
    """down(silu(gate(x)) * up(x)) with gate and up joined."""

    kernels: Kernels
    gate_up: Callable[[torch.Tensor], torch.Tensor]
    down: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.kernels.silu_mul(self.gate_up(x)))


@dataclass(frozen=True, slots=True)
class Attention:
    """Joined q, k, v; the norms of heads, the rotation and the writing of pages; attention; out."""

    kernels: Kernels
    qkv: Callable[[torch.Tensor], torch.Tensor]
    out: Callable[[torch.Tensor], torch.Tensor]
    heads: Heads
    layer: int
    scaling: float

    def __call__(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Rotation,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        *,
        kvrelay: ForwardPass,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        q_THD = self.kernels.rotate_and_write(
            self.qkv(hidden_states), position_embeddings, self.heads, self.layer, kvrelay
        )
        memory, call = kvrelay.memory, kvrelay.call(self.layer, self.scaling)
        attended = kvrelay.attend(q_THD, memory.k(self.layer), memory.v(self.layer), call)
        return self.out(attended.view(1, q_THD.shape[0], -1)), None


@dataclass(frozen=True, slots=True)
class Layer:
    """Llama's decoder layer: norm, attention, add, norm, MLP, add."""

    input_norm: Callable[[torch.Tensor], torch.Tensor]
    attention: Attention
    middle_norm: Norm
    mlp: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        attended, _ = self.attention(self.input_norm(hidden_states), *args, **kwargs)
        hidden_states, normed = self.middle_norm.after_adding(hidden_states, attended)
        return hidden_states + self.mlp(normed)


@dataclass(frozen=True, slots=True)
class Decoder:
    """Llama's whole model: a layer's last addition is made by the next one's norm."""

    embed: Callable[[torch.Tensor | None], torch.Tensor]  # or what came from the pipeline stage before
    layers: tuple[Layer, ...]
    norm: Norm
    rotation: MakeRotation
    in_one_call: OneCall  # where it serves
    leaves: bool = False  # for the next pipeline stage, behind its layers

    def __call__(
        self, input_ids: torch.Tensor | None = None, *args: Any, kvrelay: ForwardPass, **kwargs: Any
    ) -> BaseModelOutputWithPast:
        total = self.embed(input_ids)
        rotation = self.rotation(total, kvrelay.meta.positions)
        if self.in_one_call.serves(kvrelay):
            normed = self.in_one_call(total, rotation, kvrelay)
            return self._end(total, normed)
        normed = self.layers[0].input_norm(total)
        for at, layer in enumerate(self.layers, 1):
            attended, _ = layer.attention(normed, rotation, kvrelay=kvrelay)
            total, normed = layer.middle_norm.after_adding(total, attended)
            following = self.layers[at].input_norm if at < len(self.layers) else self.norm
            assert isinstance(following, Norm)
            total, normed = following.after_adding(total, layer.mlp(normed))
        return self._end(total, normed)

    def _end(self, total: torch.Tensor, normed: torch.Tensor) -> BaseModelOutputWithPast:
        if self.leaves:
            raise PassLeaves(total)
        return BaseModelOutputWithPast(last_hidden_state=normed)
