"""Experts of a mixture, of which each token goes to a few: in which form their products are computed, and what stands
in the place of all of them where this process has a run of them only.

On CPUs each expert's product is computed by itself, which our kernels make row-invariant ("eager"). On a GPU they are
one product of all (transformers' grouped_mm), for which no host waits, so that a graph can hold it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.errors import UnsupportedModel

EAGER = "eager"
ALIGNED_BYTES = 16  # that a row of each weight of a grouped product must fill


def choose_form(model: PreTrainedModel, device: torch.device) -> None:
    """The one for `device`, of a model that was loaded on the host and moved there."""
    if device.type == "cpu" or not _has_aligned_rows(model):
        return
    model.set_experts_implementation(model.get_correct_experts_implementation(None))


def _has_aligned_rows(model: PreTrainedModel) -> bool:
    """Whether a cut by width has left rows as a grouped product wants them."""
    weights = (weight for name, weight in model.named_parameters() if ".experts." in name and weight.dim() > 2)
    return not any(weight.shape[-1] * weight.element_size() % ALIGNED_BYTES for weight in weights)


class OwnExperts(nn.Module):
    """A run of a layer's experts: what they add to each token, which is all that it gets of them here."""

    def __init__(self, experts: Any, run: slice) -> None:
        """`experts`: transformers' module, whose weights are of all of them until here. Raises UnsupportedModel."""
        super().__init__()
        if not hasattr(experts, "is_transposed"):  # whose calls are not transformers' common ones
            raise UnsupportedModel(
                f"{type(experts).__name__} keeps its experts in a form that cannot be shared out whole; "
                "leave expert_parallel out"
            )
        for name, weight in list(experts.named_parameters(recurse=False)):
            if weight.dim() > 1:  # [experts, ...]; of fewer dimensions is what all have in common
                part = weight[run].detach().clone(memory_format=torch.contiguous_format)
                setattr(experts, name, nn.Parameter(part, requires_grad=False))
        self.experts = experts
        self._first, self._count = run.start, run.stop - run.start
        experts.num_experts = self._count
        experts._is_expert_parallel = True  # the numbers of others' experts are not looked for among the weights

    def forward(self, hidden_TN: torch.Tensor, index_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        own_TK = index_TK - self._first
        is_own_TK = (own_TK >= 0) & (own_TK < self._count)
        if self.experts.config._experts_implementation == EAGER:
            return self._of_own_pairs(hidden_TN, own_TK, weights_TK, is_own_TK)
        own_TK = own_TK.masked_fill(~is_own_TK, self._count)  # behind the last, where a grouped product ends
        added: torch.Tensor = self.experts(hidden_TN, own_TK, weights_TK.masked_fill(~is_own_TK, 0.0))
        return added

    def _of_own_pairs(
        self, hidden_TN: torch.Tensor, own_TK: torch.Tensor, weights_TK: torch.Tensor, is_own_TK: torch.Tensor
    ) -> torch.Tensor:
        """Each pair of a token and an expert that is here, as a row of its own; a token's rows are added in their
        order, so that its bits do not depend on the others."""
        rows_P, places_P = is_own_TK.nonzero(as_tuple=True)
        of_pairs_PN = self.experts(
            hidden_TN[rows_P], own_TK[rows_P, places_P][:, None], weights_TK[rows_P, places_P][:, None]
        )
        return torch.zeros_like(hidden_TN).index_add_(0, rows_P, of_pairs_PN)
