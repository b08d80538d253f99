"""The functions that transformers calls in place of its own attention and masks, under two names.

Under PROBE a short forward learns the model (probe.py). Under SERVE each call writes its K and V into the pages, says
so, and attends over the pages. All state travels in the forward's keyword argument `kvrelay`.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from engine.attention.forward_pass import ForwardPass
from engine.attention.held import held_by
from engine.attention.probe import LAYER, probe_attention, probe_mask

SERVE = "kvrelay"
PROBE = "kvrelay_probe"


def install() -> None:
    """Make both names known to transformers; doing it twice changes nothing."""
    AttentionInterface.register(SERVE, serve_attention)
    AttentionInterface.register(PROBE, probe_attention)
    AttentionMaskInterface.register(SERVE, _serve_mask)
    AttentionMaskInterface.register(PROBE, probe_mask)


def _serve_mask(*args: Any, **kwargs: Any) -> None:
    """No mask: causality and windows are the backend's, from positions."""
    return


def serve_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    kvrelay: ForwardPass | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, H, T, D], key [1, G, T, D], value [1, G, T, E] -> [1, T, H, E]."""
    if kvrelay is None:
        kvrelay = held_by(module)
        assert isinstance(kvrelay, ForwardPass), "no pass runs"
    layer = getattr(module, LAYER)
    scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    q_THD, k_TGD, v_TGE = (x[0].transpose(0, 1) for x in (query, key, value))
    out_THE = kvrelay.serve(layer, q_THD, k_TGD, v_TGE, scaling, softcap or 0.0, s_aux, slopes)
    return out_THE.unsqueeze(0), None
