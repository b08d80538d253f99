"""A row's product has the same bits however many rows there are: for widths at which oneDNN orders its sums by that,
and for such as do not fill panels of our own."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.kernels import build
from engine.weights import int8, panels
from engine.weights.linear import PackedLinear, can_pack, invariant_linear

DTYPE = torch.bfloat16
ROWS = (2, 3, 32, 33, 40, 65, 100, 256, 300, 1400)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("in_features", "out_features"), [(704, 256), (896, 1152), (4100, 70), (4128, 70)])
def test_a_row_has_the_same_bits_among_any_number(in_features: int, out_features: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    weight_ON = (torch.randn(out_features, in_features, generator=generator) * 0.05).to(dtype)
    x_TN = torch.randn(max(ROWS), in_features, generator=generator).to(dtype)
    packed = PackedLinear(weight_ON, None)
    products: list[Callable[[torch.Tensor], torch.Tensor]] = [packed]
    if can_pack(dtype):
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


# Weights in int8


def whole_weight(out_features: int, in_features: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a Linear as int8.quantise leaves it: its weight in bfloat16, and the scales."""
    made = torch.nn.Linear(in_features, out_features, bias=False)
    with torch.no_grad():
        made.weight.normal_(generator=torch.Generator().manual_seed(4))
        made.weight[:, ::7] *= 5
        made.weight[0] = 0
    made = made.to(DTYPE)
    assert int8.quantise(made) == 1
    scales = int8.scales_of(made)
    assert scales is not None
    return made.weight.detach(), scales


@pytest.mark.parametrize(("in_features", "out_features"), [(704, 256), (4128, 70), (64, 1), (2816, 1000)])
def test_a_product_of_int8_is_that_of_its_whole_numbers_for_any_number_of_rows(
    in_features: int, out_features: int
) -> None:
    weight_ON, scales_O = whole_weight(out_features, in_features)
    generator = torch.Generator().manual_seed(5)
    x_TN = torch.randn(max(ROWS), in_features, generator=generator).to(DTYPE)
    bias_O = torch.randn(out_features, generator=generator).to(DTYPE)
    whole_ON = int8.whole_numbers(weight_ON, scales_O)
    assert int(whole_ON[1:].abs().amax(1).min() if out_features > 1 else int8.MOST) == int8.MOST
    packed = PackedLinear(weight_ON, bias_O, scales_O)
    got = packed(x_TN)
    wanted = (x_TN.double() @ whole_ON.double().T) * scales_O.double() + bias_O.double()
    assert (got.double() - wanted).abs().max() <= 2**-8 * wanted.abs().max()
    assert [n for n in (1, 2, 6, 7, 36, 37, 95, 96, 97, *ROWS) if not torch.equal(packed(x_TN[:n]), got[:n])] == []
    assert packed.packed.element_size() == (1 if packed.is_in_panels else 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_panels_of_several_weights_are_those_of_one_that_holds_them_all(dtype: torch.dtype) -> None:
    if not panels.can_multiply(64, DTYPE):
        pytest.skip("there are no products of our own here")
    generator = torch.Generator().manual_seed(7)
    parts = [torch.randint(-99, 99, (rows, 96), generator=generator).to(dtype) for rows in (1, 70, 33)]
    joined = panels.in_panels(parts)
    assert torch.equal(joined, panels.in_panels([torch.cat(parts)]))
    assert joined[-1].count_nonzero() <= joined[-1].numel() * (104 % joined.shape[2]) / joined.shape[2]
    if dtype == DTYPE:
        rows = joined.transpose(1, 2).reshape(-1, 96)  # [panels, outputs, pairs, 2]
        assert torch.equal(rows[:104], torch.cat(parts))


@pytest.mark.parametrize("without", ["", "avx512vbmi", "avx512bf16", "avx512f"])
def test_other_instructions_give_the_same_product(
    without: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a CPU that lacks some would compute it; by those that round as these do, to the bit."""
    if not panels.can_multiply(64, DTYPE):
        pytest.skip("there are no products of our own here")
    weight_ON, scales_O = whole_weight(130, 704)
    x_TN = torch.randn(100, 704, generator=torch.Generator().manual_seed(6)).to(DTYPE)
    wanted = PackedLinear(weight_ON, None, scales_O)(x_TN)
    flags = [f"-mno-{without}"] if without else []
    flags += ["-mno-amx-tile"] if without and "amx_tile" in build.cpu_flags() else []
    with build.building([shutil.which("g++") or "c++"], tmp_path) as builder:
        builder.link(flags, [build.PRODUCTS, build.SOURCES / "panels.cpp"], tmp_path / "other.so")
    other = ctypes.CDLL(str(tmp_path / "other.so"))
    panels.declare(other)
    monkeypatch.setattr(panels, "_library", lambda: (other, other.kvrelay_product_width()))
    packed = PackedLinear(weight_ON, None, scales_O)
    got = packed(x_TN)
    assert (got.double() - wanted.double()).abs().max() <= 2**-7 * wanted.abs().max()
    assert [n for n in (1, 5, 37) if not torch.equal(packed(x_TN[:n]), got[:n])] == []
    exact = PackedLinear(int8.whole_numbers(weight_ON, scales_O).to(DTYPE), None)(x_TN)
    assert torch.equal(got[:, :1], torch.zeros_like(got[:, :1]))
    scaled = exact.double() * scales_O.double()
    assert (got.double() - scaled).abs().max() <= 2**-7 * scaled.abs().max()
