"""An adapter's weights in memory, and what they add to the products of one step: by csrc/adapters.cpp on a CPU, by
torch elsewhere.

Shapes: T rows of a step, R rank, I in, O out of a Linear.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError

from engine.adapters.files import MAX_RANK, AdapterError, LoraPart, parts_of, read_whole
from engine.adapters.products import Adaptable, Site
from engine.kernels import native
from engine.kernels.build import NativeUnavailable
from engine.kernels.native import DTYPE_CODE
from engine.types import Adapter

WIDTH, GROUP, PANEL = 16, 4, 64  # of csrc/adapters.cpp


class Pair(NamedTuple):
    """As they are, or in the kernels' order."""

    a_RI: torch.Tensor
    b_RO: torch.Tensor
    scale: float


class Rows(NamedTuple):
    """Those of a step that are of one adapter: [first, end)."""

    first: int
    end: int
    weights: AdapterWeights


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class AdapterWeights:
    digest: str
    pairs: Mapping[int, Pair]  # by the Linear's number
    parts: ctypes.Array[_Part] | None  # for csrc/adapters.cpp

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for pair in self.pairs.values() for t in (pair.a_RI, pair.b_RO))


class _Part(ctypes.Structure):
    """KvrelayPart of csrc/kernels.h, field for field, and so below."""

    _fields_ = (
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )


class NativeStep(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("parts", "starts", "rows")),
        ("blocks", ctypes.c_int64),
    )


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether NativeAdapters can be had."""
    if device.type != "cpu" or dtype not in DTYPE_CODE:
        return False
    try:
        library = native.library()
    except NativeUnavailable:
        return False
    assert library.kvrelay_most_rank() == MAX_RANK, "files.py and adapters.cpp disagree"
    return True


def check_fits(path: str, parts: Mapping[str, LoraPart], adaptable: Adaptable) -> None:
    """Raises AdapterError for one of another model."""
    known = {linear.name: linear for linear in adaptable.linears}
    for name, part in sorted(parts.items()):
        linear = known.get(name)
        if linear is None:
            some = ", ".join(sorted({name.rpartition(".")[2] for name in known}))
            raise AdapterError(f"{path} changes {name}, which the model does not have, or which no adapter may "
                               f"change here; those that may are {some}")  # fmt: skip
        if (part.in_features, part.out_features) != (linear.in_features, linear.out_features):
            raise AdapterError(
                f"{path} changes {name} from {part.in_features} to {part.out_features}; "
                f"the model's is from {linear.in_features} to {linear.out_features}"
            )


def load_weights(adapter: Adapter, adaptable: Adaptable, device: torch.device, *, is_native: bool) -> AdapterWeights:
    """Raises AdapterError, also where its files are not those of its digest."""
    path = adapter.path
    raw, stored, digest = read_whole(path)
    if digest != adapter.digest:
        raise AdapterError(f"{path} holds another one than when it was added; remove it, and add it again")
    try:
        tensors = safetensors.torch.load(stored)
    except SafetensorError as error:
        raise AdapterError(f"{path} cannot be read: {' '.join(str(error).split())[:300]}") from None
    parts = parts_of(path, raw, {key: tuple(tensor.shape) for key, tensor in tensors.items()})
    check_fits(path, parts, adaptable)
    if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        raise AdapterError(f"{path} has weights that are no finite numbers")
    pairs: dict[int, Pair] = {}
    for number, linear in enumerate(adaptable.linears):
        if (part := parts.get(linear.name)) is None:
            continue
        a_RI, b_OR = (tensors[f"base_model.model.{linear.name}.lora_{which}.weight"] for which in "AB")
        a_RI, b_RO = (t.to(device, linear.dtype).contiguous() for t in (a_RI, b_OR.t()))
        a, b = _as_read(a_RI, b_RO) if is_native else (a_RI, b_RO)
        pairs[number] = Pair(a, b, part.scale)
    if not is_native:
        return AdapterWeights(digest, pairs, None)
    pairs = _side_by_side(pairs)
    table = (_Part * len(adaptable.linears))()
    for number, pair in pairs.items():
        rank = parts[adaptable.linears[number].name].rank
        table[number] = _Part(pair.a_RI.data_ptr(), pair.b_RO.data_ptr(), rank, pair.scale)
    return AdapterWeights(digest, pairs, table)


def _as_read(a_RI: torch.Tensor, b_RO: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In the order in which csrc/adapters.cpp reads them, flat."""
    whole = a_RI.shape[1] // WIDTH * WIDTH
    blocks = []
    for group_GI in a_RI.split(GROUP):
        blocks += [group_GI[:, :whole].unflatten(1, (-1, WIDTH)).transpose(0, 1).flatten()] if whole else []
        blocks += [group_GI[:, whole:].flatten()]
    outputs = b_RO.shape[1] // PANEL * PANEL
    panels = [b_RO[:, :outputs].unflatten(1, (-1, PANEL)).transpose(0, 1).flatten()] if outputs else []
    return torch.cat(blocks), torch.cat([*panels, b_RO[:, outputs:].flatten()])


def _side_by_side(pairs: Mapping[int, Pair]) -> dict[int, Pair]:
    """The same in one piece of memory for each dtype, in the order in which layers read them."""
    flat: dict[torch.dtype, Iterator[torch.Tensor]] = {}
    for dtype in {pair.a_RI.dtype for pair in pairs.values()}:
        tensors = [t for pair in pairs.values() for t in (pair.a_RI, pair.b_RO) if t.dtype == dtype]
        flat[dtype] = iter(torch.cat(tensors).split([len(t) for t in tensors]))
    return {n: Pair(next(flat[a.dtype]), next(flat[a.dtype]), scale) for n, (a, _, scale) in pairs.items()}


class TorchAdapters:
    """On any device."""

    def __init__(self, rows: Sequence[Rows], count: int) -> None:
        """`count`: of the step's rows, with padding."""
        self._rows = rows
        self._count = count

    def add(self, site: Site, x: torch.Tensor, y: torch.Tensor) -> None:
        x_TI, y_TO = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        _check(site, x, y, self._count)
        for first, end, weights in self._rows:
            begin = 0
            for number, stop in zip(site.numbers, site.ends, strict=True):
                if (pair := weights.pairs.get(number)) is not None:
                    added = x_TI[first:end] @ pair.a_RI.t() @ pair.b_RO
                    y_TO[first:end, begin:stop] += added * pair.scale
                begin = stop


class NativeAdapters:
    """On a CPU, in float32 and bfloat16: a row's bits do not depend on the others."""

    def __init__(self, rows: Sequence[Rows], count: int) -> None:
        """As TorchAdapters."""
        library = native.library()
        self._count = count
        most = library.kvrelay_block_rows()
        blocks = [(first, min(most, end - first), w) for start, end, w in rows for first in range(start, end, most)]
        self._rows = rows
        self._adapt = library.kvrelay_adapt
        self._starts = np.array([first for first, _, _ in blocks], np.int64)
        self._counts = np.array([count for _, count, _ in blocks], np.int64)
        self._parts = np.array([ctypes.addressof(w.parts) for _, _, w in blocks], np.uintp)  # type: ignore[arg-type]
        self.step = NativeStep(self._parts.ctypes.data, self._starts.ctypes.data, self._counts.ctypes.data, len(blocks))

    def add(self, site: Site, x: torch.Tensor, y: torch.Tensor) -> None:
        x = x.contiguous()
        _check(site, x, y, self._count)
        self._adapt(
            *(ctypes.c_void_p(t.data_ptr()) for t in (x, y)), ctypes.c_int64(x.shape[-1]), ctypes.c_int64(y.shape[-1]),
            ctypes.byref(site.native), ctypes.byref(self.step), ctypes.c_int32(DTYPE_CODE[x.dtype]),
            ctypes.c_int32(torch.get_num_threads()),
        )  # fmt: skip


def _check(site: Site, x: torch.Tensor, y: torch.Tensor, count: int) -> None:
    """That x and y are what the Linears of the site were seen with. Raises AdapterError."""
    linear = site.adaptable.linears[site.numbers[0]]
    if x.numel() != count * linear.in_features or y.numel() != count * site.ends[-1]:
        raise AdapterError(f"{linear.name} sees {list(x.shape)} where a step has {count} rows: it cannot be adapted")
    assert x.dtype == y.dtype == linear.dtype, f"{linear.name} is {linear.dtype}: {x.dtype}, {y.dtype}"
    assert y.is_contiguous(), f"what {linear.name} gives is written to as it lies"
