"""ForwardPass is what one forward pass over the pages carries to every layer's attention: where its rows stand, which
pages they read and write, whom to tell of a layer. It lives as long as the pass, in the forward's keyword argument
`kvrelay`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.attention.base import AttentionBackend, AttentionCall, StepMeta
from engine.attention.probe import Probe
from engine.attention.torch_backend import attention_to_keys
from engine.pages import fp8, int8_rows
from engine.pages.fp8 import KvScale
from engine.pages.memory import LayerPages
from engine.state.states import States


@dataclass(slots=True)
class ForwardPass:
    """One forward pass over the pages."""

    meta: StepMeta
    memory: LayerPages
    backend: AttentionBackend
    probe: Probe
    on_layer: Callable[[int], None] | None
    scales: Sequence[KvScale] | None = None  # of pages in fp8
    states: States | None = None  # what layers keep beside KV; None: nothing

    def write(self, layer: int, k_TGD: torch.Tensor, v_TGE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Put the rows' K and V into the layer's pages, tell who waits for them, and return the pages."""
        k_pages, v_pages = self.memory.k(layer), self.memory.v(layer)
        if self.scales is not None:
            scale = self.scales[layer]
            k_TGD, v_TGE = fp8.quantise(k_TGD, scale.k), fp8.quantise(v_TGE, scale.v)
        elif k_pages.dtype == int8_rows.DTYPE:
            k_TGD, v_TGE = int8_rows.quantise(k_TGD), int8_rows.quantise(v_TGE)
        self.backend.write(k_TGD, v_TGE, k_pages, v_pages, self.meta)
        self.tell(layer)
        return k_pages, v_pages

    def tell(self, layer: int) -> None:
        """Who waits for the layer: what it keeps is in the pages."""
        if self.on_layer is not None:
            self.on_layer(layer)

    def call(
        self,
        layer: int,
        scaling: float,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        slopes: torch.Tensor | None = None,
    ) -> AttentionCall:
        """What the layer's attention is, its window or chunk and the pages' scales included."""
        scale = KvScale() if self.scales is None else self.scales[layer]
        probed = self.probe.attention(layer)
        return AttentionCall(
            scaling, probed.window, softcap, sinks, scale.k, scale.v, chunk=probed.chunk, slopes=slopes
        )

    def serve(
        self,
        layer: int,
        q_THD: torch.Tensor,
        k_TGD: torch.Tensor,
        v_TGE: torch.Tensor,
        scaling: float,
        softcap: float,
        sinks: torch.Tensor | None,
        slopes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write, tell, attend: [T, H, E]."""
        k_pages, v_pages = self.write(layer, k_TGD, v_TGE)
        return self.attend(q_THD, k_pages, v_pages, self.call(layer, scaling, softcap, sinks, slopes))

    def attend(
        self, q_THD: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        """[T, H, E] of the rows, whose K and V stand in the pages."""
        for sequence, mass in self.meta.masses:
            mass.add(attention_to_keys(q_THD, k_pages, self.meta, sequence, call))
        return self.backend.attend(q_THD, k_pages, v_pages, self.meta, call)
