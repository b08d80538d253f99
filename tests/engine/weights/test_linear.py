"""A row's product has the same bits however many rows there are: for widths at which oneDNN orders its sums by that,
and for such as do not fill panels of our own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine.weights.linear import PackedLinear, can_pack, invariant_linear

DTYPE = torch.bfloat16  # in float32 the order is one
ROWS = (2, 32, 33, 40, 65, 100, 256, 300, 1400)


@pytest.mark.parametrize(("in_features", "out_features"), [(704, 256), (896, 1152), (4100, 70), (4128, 70)])
def test_a_row_has_the_same_bits_among_any_number(in_features: int, out_features: int) -> None:
    generator = torch.Generator().manual_seed(1)
    weight_ON = (torch.randn(out_features, in_features, generator=generator) * 0.05).to(DTYPE)
    x_TN = torch.randn(max(ROWS), in_features, generator=generator).to(DTYPE)
    packed = PackedLinear(weight_ON, None)
    products: list[Callable[[torch.Tensor], torch.Tensor]] = [packed]
    if can_pack(DTYPE):
        products.append(lambda x: invariant_linear(x, weight_ON, None, out_features))
    for product in products:
        wanted = product(x_TN)
        assert [n for n in ROWS if not torch.equal(product(x_TN[:n]), wanted[:n])] == []
        assert torch.equal(product(x_TN[None, :100])[0], wanted[:100])
        assert torch.equal(product(x_TN[7:8]), wanted[7:8])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("in_features", "out_features"), [(2, 1), (24, 65), (63, 64), (96, 70), (4100, 70)])
def test_it_is_the_product(in_features: int, out_features: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    weight_ON = torch.randn(out_features, in_features, generator=generator).to(dtype)
    bias_O = torch.randn(out_features, generator=generator).to(dtype)
    x_TN = torch.randn(7, in_features, generator=generator).to(dtype)
    wanted = x_TN.double() @ weight_ON.double().T + bias_O.double()
    error = (PackedLinear(weight_ON, bias_O)(x_TN).double() - wanted).abs().max()
    assert error <= {torch.float32: 1e-5, torch.bfloat16: 2**-8}[dtype] * wanted.abs().max()


def test_threads_change_no_bit() -> None:
    generator = torch.Generator().manual_seed(3)
    packed = PackedLinear(torch.randn(200, 4128, generator=generator).to(DTYPE), None)
    x_TN = torch.randn(100, 4128, generator=generator).to(DTYPE)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(packed(x_TN))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)
