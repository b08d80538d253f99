"""A weight in panels of outputs, for the products of engine/kernels/csrc/products.cpp: bfloat16, by the fastest
instructions that the CPU has (engine/kernels/build.py measures where that is in doubt).

Where rows are few they read weights at nine tenths of the measured memory bandwidth (30 of 33 GB/s on a two-core AMD
EPYC, 1 to 8 rows), where oneDNN's inner product reached 12 to 24 GB/s; with many rows both compute as fast. By AMX's
tiles 128 rows and more take half as long as in oneDNN's blocks of 32 (which keep its order of summation), 1 to 16 rows
of a layer's product 0.7 to 0.8 times as long (40 to 48 GB/s beside 29 to 39, on a two-core Intel Xeon). By AVX2 alone,
which multiplies in float32, one row is read at 17 of 25 GB/s, and 32 and more rows take as long as a plain matmul of
float32 (120 to 141 of 147 GFLOP/s, on a two-core AMD EPYC). A row's bits are the same among any number of rows.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from functools import cache

import torch

from engine.kernels import native
from engine.kernels.build import NativeUnavailable


@cache
def _library() -> tuple[ctypes.CDLL, int] | None:
    """With the outputs of a panel; None where there are no such products."""
    try:
        library = native.library()
    except NativeUnavailable:
        return None
    declare(library)
    width: int = library.kvrelay_product_width()
    return (library, width) if width else None


def declare(library: ctypes.CDLL) -> None:
    pointer, size, code = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    library.kvrelay_product.argtypes = (pointer,) * 5 + (size,) * 3 + (code,)
    library.kvrelay_fill_panels.argtypes = (pointer, pointer, size, pointer, size, size, code, code)
    library.kvrelay_product.restype = library.kvrelay_fill_panels.restype = None


def can_multiply(in_features: int, dtype: torch.dtype) -> bool:
    if dtype != torch.bfloat16 or (found := _library()) is None:
        return False
    return in_features % found[0].kvrelay_product_inputs() == 0  # type: ignore[no-any-return]


def instructions() -> str:
    """Which multiply."""
    library, _ = _found()
    library.kvrelay_product_instructions.restype = ctypes.c_char_p
    name: bytes = library.kvrelay_product_instructions()
    return name.decode()


def in_panels(weights_ON: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of weights one behind the other: [panels, in / 2, outputs of a panel, 2], in bfloat16 or int8 as they are; what
    the last panel lacks is 0."""
    library, width = _found()
    parts = [weight.contiguous() for weight in weights_ON]
    pairs, dtype = parts[0].shape[1] // 2, parts[0].dtype
    ends = list(itertools.accumulate(map(len, parts)))
    panels = torch.empty(-(-ends[-1] // width), pairs, width, 2, dtype=dtype)
    library.kvrelay_fill_panels(
        (ctypes.c_void_p * len(parts))(*(part.data_ptr() for part in parts)), (ctypes.c_int64 * len(parts))(*ends),
        len(parts), panels.data_ptr(), pairs, width, 2 * panels.element_size(), torch.get_num_threads(),
    )  # fmt: skip
    if dtype == torch.int8 and library.kvrelay_product_turns():
        panels = _by_turns(panels.view(torch.int16).squeeze(-1)).view(dtype).view(panels.shape)
    return panels


def _by_turns(panels: torch.Tensor) -> torch.Tensor:
    """Of each two vectors of 16 pairs 4 of the one, 4 of the other, and so on: as products.cpp looks them up."""
    vectors = panels.view(*panels.shape[:-1], -1, 2, 4, 4)
    return vectors.transpose(-3, -2).reshape(panels.shape)


def multiply(
    x: torch.Tensor,
    panels: torch.Tensor,
    scales_O: torch.Tensor | None,
    bias_O: torch.Tensor | None,
    out_features: int,
) -> torch.Tensor:
    """[..., in] -> [..., out]. Panels of int8 have scales, in float32."""
    library, _ = _found()
    x = x.contiguous()
    in_features = x.shape[-1]
    scales, bias = (None if tensor is None else tensor.data_ptr() for tensor in (scales_O, bias_O))
    to = x.new_empty(*x.shape[:-1], out_features)
    library.kvrelay_product(
        x.data_ptr(), panels.data_ptr(), scales, bias, to.data_ptr(),
        x.numel() // in_features, in_features, out_features, torch.get_num_threads(),
    )  # fmt: skip
    return to


def _found() -> tuple[ctypes.CDLL, int]:
    found = _library()
    assert found is not None, "ask can_multiply first"
    return found
