"""A row's product has the same bits however many rows there are, for widths at which oneDNN orders its sums by that."""

from __future__ import annotations

import pytest
import torch

from engine.weights.linear import PackedLinear, invariant_linear

DTYPE = torch.bfloat16  # in float32 the order is one
ROWS = (2, 32, 33, 40, 65, 100, 256, 300)


@pytest.mark.parametrize(("in_features", "out_features"), [(704, 256), (896, 1152)])
def test_a_row_has_the_same_bits_among_any_number(in_features: int, out_features: int) -> None:
    generator = torch.Generator().manual_seed(1)
    weight_ON = (torch.randn(out_features, in_features, generator=generator) * 0.05).to(DTYPE)
    x_TN = torch.randn(max(ROWS), in_features, generator=generator).to(DTYPE)
    packed = PackedLinear(weight_ON, None)
    for product in (packed, lambda x: invariant_linear(x, weight_ON, None, out_features)):
        wanted = product(x_TN)
        assert [n for n in ROWS if not torch.equal(product(x_TN[:n]), wanted[:n])] == []
        assert torch.equal(product(x_TN[None, :100])[0], wanted[:100])
        assert torch.equal(product(x_TN[7:8]), wanted[7:8])
