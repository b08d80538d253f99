"""keep_largest puts at 0, in place, the weights of ids outside top-k and outside the nucleus of what is left.

Of equals the lowest ids are kept, as in engine/sampling/host.py. On a GPU no row is sorted: a threshold is found by
bisection (selection_kernel.py). Elsewhere rows are sorted, which is what the kernel is held against.

Shapes: R rows, S of them to be narrowed, V vocabulary.
"""

from __future__ import annotations

import torch

from engine.sampling.host import TOP_P_SLACK


def keep_largest(
    scores_RV: torch.Tensor,
    weights_RV: torch.Tensor,
    rows_S: torch.Tensor,
    top_k_S: torch.Tensor,
    top_p_S: torch.Tensor,
) -> None:
    """`weights_RV`, float64, grow with `scores_RV`, float32. A `top_p` of inf keeps all that top-k does."""
    if weights_RV.device.type == "cuda":
        from engine.sampling.selection_kernel import narrow  # Triton comes with torch's CUDA builds

        narrow(scores_RV, weights_RV, rows_S, top_k_S, top_p_S)
        return
    ordered_SV, ids_SV = scores_RV[rows_S].sort(dim=-1, descending=True, stable=True)
    weights_SV = weights_RV[rows_S].gather(1, ids_SV)
    rank_V = torch.arange(ordered_SV.shape[1], device=ordered_SV.device)
    weights_SV.masked_fill_(rank_V >= top_k_S[:, None], 0.0)
    reached_SV = weights_SV.cumsum(dim=-1)
    before_SV = torch.nn.functional.pad(reached_SV[:, :-1], (1, 0))
    wanted_S1 = top_p_S[:, None] * reached_SV[:, -1:] * (1.0 - TOP_P_SLACK)
    weights_SV.masked_fill_(before_SV >= wanted_S1, 0.0)
    weights_RV.index_copy_(0, rows_S, torch.zeros_like(weights_SV).scatter_(1, ids_SV, weights_SV))
