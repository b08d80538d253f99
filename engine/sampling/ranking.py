"""The largest few of each row, exactly as a stable sort of the row would give them, without the sort.

Shapes: R rows, V vocabulary, N wanted of each row.
"""

from __future__ import annotations

import torch

_ID_BITS = 32
_MOST = (1 << _ID_BITS) - 1


def largest(scores_RV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of float32 rows [R, N] values, the largest first, and their ids, of equals the lowest first. NaN has no order.

    torch.topk promises nothing of equals, so it ranks whole numbers that differ: a value's bits above, its id below.
    """
    bits_RV = (scores_RV + 0.0).view(torch.int32).long()  # -0.0 is 0.0
    order_RV = torch.where(bits_RV < 0, bits_RV ^ 0x7FFFFFFF, bits_RV)
    id_V = torch.arange(scores_RV.shape[1], device=scores_RV.device)
    keys_RV = (order_RV << _ID_BITS).add_(_MOST - id_V)
    ids_RN = _MOST - (keys_RV.topk(min(count, scores_RV.shape[1]), dim=-1).values & _MOST)
    return scores_RV.gather(1, ids_RN), ids_RN
