"""Matrix products whose rows do not depend on each other: a token's bits are the same in any batch and any chunk.

On CPUs torch picks another kernel, and another order of summation, for few rows than for many. oneDNN's inner product
does not, once there are two rows or more (measured in float32 and bfloat16 for widths 24 to 14336, 2 to 2048 rows, one
and two threads). So every product goes there: Linear layers through weights that were reordered once at load, and
weights that layers multiply by themselves (routers, experts) through a tensor type that sends `linear` and `matmul` to
it. Fewer than two rows are padded. But where panels.py has products of our own (bfloat16), Linear layers use those:
they are as even, and faster.

In bfloat16 on a CPU with AMX oneDNN, too, sums in another order for many rows, from 33 rows on. There a product is cut
into blocks of FEW_ROWS, or of more where a weight of that shape was seen, at load, to give the same bits in them.

In float32 oneDNN may take STRIP_ROWS at a time, and sum one to three that are left over by other code: so does torch
2.11's on AVX2, and 2.13's does not. Where a trial shows it, rows are padded to whole strips for each thread, and many
are cut into blocks, too.

Element by element, torch computes the last elements of a tensor by other code than the rest, when their number does not
fill whole vectors, and exp, cos and their like may differ there by a bit. So rows are padded to a multiple that fills
vectors for every width that occurs; for the widths of real models that is 1 or 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from engine.adapters.products import Site, is_linear, site_of
from engine.kernels.build import cpu_flags
from engine.weights import int8, panels

MIN_ROWS = 2
FEW_ROWS = 32  # 2 to 32 rows are summed in one order, with AMX too (widths 512 to 14336, one and two threads)
MORE_ROWS = (512, 256, 192, 128, 64)  # that are summed in that order for some shapes
STRIP_ROWS = 6  # up to 240 rows in whole strips are summed in one order (widths 2 to 32000, one and two threads)
VECTOR = 64  # elements that torch computes at once: two AVX-512 registers of bfloat16
_KEEP_WEIGHT = {
    "chunk",
    "contiguous",
    "flatten",
    "float",
    "narrow",
    "reshape",
    "squeeze",
    "t",
    "to",
    "transpose",
    "type",
}
_KEEP_WEIGHT |= {"__getitem__", "__get__", "unsqueeze", "view", "select", "unbind", "split", "detach", "permute"}


class PackedLinear(nn.Module):
    """x W^T + b with W [out, in] in panels, or in oneDNN's own order; as it is where the CPU has neither. `scales_O`:
    each row of W is so many times whole numbers up to 127, and is kept as those (int8.py). `site`: what adapters
    add."""

    def __init__(
        self,
        weight_ON: torch.Tensor | Sequence[torch.Tensor],
        bias_O: torch.Tensor | None,
        scales_O: torch.Tensor | None = None,
        site: Site | None = None,
    ) -> None:
        """`weight_ON`: or several, whose outputs stand one behind the other."""
        super().__init__()
        self.site = site
        parts = [weight_ON] if isinstance(weight_ON, torch.Tensor) else weight_ON
        self.out_features, self.in_features = sum(map(len, parts)), parts[0].shape[1]
        self.bias = bias_O
        self._dtype = parts[0].dtype
        self.is_in_panels = panels.can_multiply(self.in_features, self._dtype)
        self._is_reordered = not self.is_in_panels and can_pack(self._dtype)
        self.scales = scales_O if self.is_in_panels else None
        if self.scales is not None:
            parts = [int8.whole_numbers(side_by_side(parts), self.scales)]
        if self.is_in_panels:
            self.packed = panels.in_panels(parts)
        elif self._is_reordered:
            self.packed = _reorder(side_by_side(parts).contiguous())
        else:
            self.packed = torch.cat(list(parts))  # a copy of a single one, too, which leaves the file
        self.measure()

    def measure(self) -> None:
        """Again in a process that was forked since, and has other threads than that which packed."""
        if self._is_reordered:
            self._block_rows = block_rows_of(self.in_features, self.out_features, self._dtype, torch.get_num_threads())

    @property
    def weight(self) -> torch.Tensor:
        """Shape and dtype for those who ask; no values."""
        return torch.empty(self.out_features, self.in_features, dtype=self._dtype, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = self._product(x)
        return product if self.site is None else self.site.add(x, product)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_in_panels:
            return panels.multiply(x, self.packed, self.scales, self.bias, self.out_features)
        if self._is_reordered:
            return invariant_linear(x, self.packed, self.bias, self.out_features, self._block_rows)
        return nn.functional.linear(x, self.packed, self.bias)


def side_by_side(weights_ON: Sequence[torch.Tensor]) -> torch.Tensor:
    """One weight, whose outputs are theirs one behind the other; a single one as it is."""
    return weights_ON[0] if len(weights_ON) == 1 else torch.cat(list(weights_ON))


def invariant_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_features: int, block_rows: int = FEW_ROWS
) -> torch.Tensor:
    """[..., in] -> [..., out] by oneDNN's inner product; `weight` is [out, in], reordered or plain."""
    rows = x.numel() // x.shape[-1]
    if rows > FEW_ROWS and is_uneven(x.dtype):
        return _in_blocks(x.reshape(rows, -1), weight, bias, out_features, block_rows).view(*x.shape[:-1], out_features)
    if rows == 0:
        return x.new_empty(*x.shape[:-1], out_features)
    missing = _missing_rows(rows, x.dtype)
    if not missing:
        return _linear(x, weight, bias, "none", [], "")
    padded = nn.functional.pad(x.reshape(rows, -1), (0, 0, 0, missing))
    return _linear(padded, weight, bias, "none", [], "")[:rows].view(*x.shape[:-1], out_features)


def _missing_rows(rows: int, dtype: torch.dtype) -> int:
    if dtype == torch.float32 and is_uneven(dtype):
        return -rows % (STRIP_ROWS * torch.get_num_threads())
    return max(0, MIN_ROWS - rows)


_linear: Callable[..., torch.Tensor] = torch.ops.mkldnn._linear_pointwise.default
_reorder: Callable[..., torch.Tensor] = torch.ops.mkldnn._reorder_linear_weight


def _in_blocks(
    x_TN: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_features: int, block_rows: int
) -> torch.Tensor:
    """Whole blocks first, where there are larger ones; what is left over by FEW_ROWS."""
    many = len(x_TN) // block_rows if block_rows > FEW_ROWS else 0
    blocks = [x_TN[i * block_rows : (i + 1) * block_rows] for i in range(many)]
    rest = x_TN[many * block_rows :].split(FEW_ROWS)
    return torch.cat(
        [
            *(_linear(block, weight, bias, "none", [], "") for block in blocks),
            *(invariant_linear(block, weight, bias, out_features) for block in rest),
        ]
    )


@cache
def block_rows_of(in_features: int, out_features: int, dtype: torch.dtype, threads: int) -> int:
    """The largest block of rows that a product of this shape sums in the order in which it sums FEW_ROWS."""
    if not is_uneven(dtype):
        return FEW_ROWS
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    packed, x_TN = _reorder(weight), torch.randn(MORE_ROWS[0], in_features, generator=generator).to(dtype)
    few = _in_blocks(x_TN, packed, None, out_features, FEW_ROWS)
    even = (rows for rows in MORE_ROWS if torch.equal(few[:rows], _linear(x_TN[:rows], packed, None, "none", [], "")))
    return next(even, FEW_ROWS)


def is_uneven(dtype: torch.dtype) -> bool:
    """Whether oneDNN's order of summation may depend on how many rows there are."""
    return _is_uneven(dtype, torch.get_num_threads())


@cache
def _is_uneven(dtype: torch.dtype, threads: int) -> bool:
    if dtype == torch.bfloat16:
        return "amx_bf16" in cpu_flags().split()
    x_TN = torch.randn(4 * STRIP_ROWS, VECTOR, generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted = _linear(x_TN, x_TN, None, "none", [], "")
    return any(
        not torch.equal(_linear(x_TN[:rows], x_TN, None, "none", [], ""), wanted[:rows])
        for rows in range(MIN_ROWS, len(x_TN))
    )


class InvariantWeight(torch.Tensor):
    """A weight that sends `linear` and `matmul` to the row-invariant product, however a layer slices it first."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            product = _as_linear(func, args, kwargs)
            if product is not None:
                return product
            result = func(*args, **kwargs)
        return _rewrap(result) if getattr(func, "__name__", "") in _KEEP_WEIGHT else result


def _as_linear(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The row-invariant product if `func` is a product with a plain 2-D weight on its right; None otherwise."""
    if func is nn.functional.linear:
        x, weight = args[0], args[1] if len(args) > 1 else kwargs["weight"]
        bias = args[2] if len(args) > 2 else kwargs.get("bias")
    elif func in (torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.mm):
        x, weight, bias = args[0], args[1].mT if args[1].dim() == 2 else args[1], None
    else:
        return None
    if type(x) is InvariantWeight or weight.dim() != 2 or x.dtype != weight.dtype or not can_pack(weight.dtype):
        return None
    plain = weight.as_subclass(torch.Tensor).contiguous()
    return invariant_linear(x.contiguous(), plain, bias, plain.shape[0])


def _rewrap(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result.as_subclass(InvariantWeight) if result.is_floating_point() else result
    if isinstance(result, (tuple, list)):
        return type(result)(_rewrap(r) for r in result)
    return result


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN has products of this dtype on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def pack_linears(model: nn.Module) -> int:
    """Replace every Linear of the model, one at a time, so that memory grows by one weight at most. How many weights
    are left to oneDNN, for they are multiplied by their own modules."""
    linears: list[tuple[nn.Module, str, nn.Module]] = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if is_linear(child)
    ]
    packed: dict[int, PackedLinear] = {}
    for parent, name, child in linears:
        if id(child) not in packed:
            parameters = dict(child.named_parameters(recurse=False))
            weight, bias = parameters["weight"].detach(), parameters.get("bias")
            packed[id(child)] = PackedLinear(
                weight.t() if isinstance(child, Conv1D) else weight,
                None if bias is None else bias.detach().clone(),
                int8.scales_of(child),
                site_of([child]),
            )
        setattr(parent, name, packed[id(child)])
    bare = _wrap_bare_weights(model)
    _leave_the_file(model)
    return bare


def _wrap_bare_weights(model: nn.Module) -> int:
    """Weights that a module multiplies by itself: parameters of two dimensions and more outside known layers."""
    count = 0
    for module in model.modules():
        if isinstance(module, (nn.Embedding, PackedLinear)):
            continue
        for name, parameter in list(module._parameters.items()):
            if parameter is None or parameter.dim() < 2 or not parameter.is_floating_point():
                continue
            del module._parameters[name]
            setattr(module, name, parameter.detach().clone().as_subclass(InvariantWeight))
            count += 1
    return count


def _leave_the_file(model: nn.Module) -> None:
    """Copy what was not packed: it may be a view of the mapped checkpoint, and would keep all of that in memory."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def row_multiple(model: nn.Module) -> int:
    """Pad a step to a multiple of this many rows, and no row's bits depend on where in the step it stands."""
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    widths = {m.out_features for m in model.modules() if isinstance(m, PackedLinear) and m is not head}
    widths |= {b.shape[-1] for name, b in model.named_buffers() if name.endswith("inv_freq")}
    widths |= {width for module in model.modules() if (width := _uneven_router_width(module))}
    return max((VECTOR // math.gcd(width, VECTOR) for width in widths), default=1)


def _uneven_router_width(module: nn.Module) -> int:
    """The width of a module with its own weight that gives a row other bits among few rows than among many; or 0."""
    weight = getattr(module, "weight", None)
    if type(weight) is not InvariantWeight or weight.dim() != 2:
        return 0
    x = torch.randn(1, VECTOR, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    try:
        many = _tensors(module(x))
        uneven = any(
            not torch.equal(a.flatten(0, -2)[:rows], b.flatten(0, -2))
            for rows in (3, 5, 7)
            for a, b in zip(many, _tensors(module(x[:, :rows])), strict=True)
        )
    except Exception:  # it wants other inputs than a router does
        return 0
    return int(weight.shape[0]) if uneven else 0


def _tensors(result: Any) -> list[torch.Tensor]:
    parts = result if isinstance(result, (tuple, list)) else (result,)
    return [t for t in parts if isinstance(t, torch.Tensor) and t.dim() >= 2]
