"""An adapter's weights in memory, and what they add to the products of one step: by csrc/adapters.cpp on a CPU, by
torch elsewhere.

Shapes: T rows of a step, R rank, I in, O out of a Linear.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from engine.adapters.files import WEIGHTS, AdapterError, AdapterFiles, LoraPart
from engine.adapters.products import Adaptable, Site
from engine.kernels import native
from engine.kernels.native import DTYPE_CODE

LANES, GROUP, PANEL = 16, 4, 64  # of csrc/adapters.cpp


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


@dataclass(frozen=True, slots=True)
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
        native.library()
    except native.NativeUnavailable:
        return False
    return True


def check_fits(path: str, parts: Mapping[str, LoraPart], adaptable: Adaptable) -> None:
    """Raises AdapterError for one of another model."""
    known = {linear.name: linear for linear in adaptable.linears}
    for name, part in parts.items():
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


def load_weights(files: AdapterFiles, adaptable: Adaptable, device: torch.device, *, is_native: bool) -> AdapterWeights:
    """Raises AdapterError."""
    check_fits(files.path, files.parts, adaptable)
    pairs: dict[int, Pair] = {}
    try:
        with safe_open(str(Path(files.path) / WEIGHTS), framework="pt", device="cpu") as file:
            for number, linear in enumerate(adaptable.linears):
                if (part := files.parts.get(linear.name)) is not None:
                    a_RI, b_OR = (
                        file.get_tensor(f"base_model.model.{linear.name}.lora_{which}.weight") for which in "AB"
                    )
                    a_RI, b_RO = (t.to(device, linear.dtype).contiguous() for t in (a_RI, b_OR.t()))
                    pairs[number] = Pair(a_RI, b_RO, part.scale)
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{files.path} cannot be read: {' '.join(str(error).split())[:300]}") from None
    if not all(bool(t.isfinite().all()) for pair in pairs.values() for t in (pair.a_RI, pair.b_RO)):
        raise AdapterError(f"{files.path} has weights that are no finite numbers")
    parts = None
    if is_native:
        parts = (_Part * len(adaptable.linears))()
        pairs = {number: Pair(*_as_read(pair.a_RI, pair.b_RO), pair.scale) for number, pair in pairs.items()}
        for number, pair in pairs.items():
            rank = files.parts[adaptable.linears[number].name].rank
            parts[number] = _Part(pair.a_RI.data_ptr(), pair.b_RO.data_ptr(), rank, pair.scale)
    return AdapterWeights(files.digest, pairs, parts)


def _as_read(a_RI: torch.Tensor, b_RO: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In the order in which csrc/adapters.cpp reads them, flat."""
    blocks = [part.flatten() for group in a_RI.split(GROUP) for part in group.split(LANES, dim=1)]
    panels = [panel.flatten() for panel in b_RO.split(PANEL, dim=1)]
    return torch.cat(blocks), torch.cat(panels)


class TorchAdapters:
    """On any device."""

    def __init__(self, rows: Sequence[Rows]) -> None:
        self._rows = rows

    def add(self, site: Site, x: torch.Tensor, y: torch.Tensor) -> None:
        x_TI, y_TO = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        _check_rows(len(x_TI), self._rows, site)
        for first, end, weights in self._rows:
            begin = 0
            for number, stop in zip(site.numbers, site.ends, strict=True):
                if (pair := weights.pairs.get(number)) is not None:
                    added = x_TI[first:end] @ pair.a_RI.t() @ pair.b_RO
                    y_TO[first:end, begin:stop] += added * pair.scale
                begin = stop


class NativeAdapters:
    """On a CPU, in float32 and bfloat16: a row's bits do not depend on the others."""

    def __init__(self, rows: Sequence[Rows]) -> None:
        library = native.library()
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
        _check_rows(x.numel() // x.shape[-1], self._rows, site)
        self._adapt(
            *(ctypes.c_void_p(t.data_ptr()) for t in (x, y)), ctypes.c_int64(x.shape[-1]), ctypes.c_int64(y.shape[-1]),
            ctypes.byref(site.native), ctypes.byref(self.step), ctypes.c_int32(DTYPE_CODE[x.dtype]),
            ctypes.c_int32(torch.get_num_threads()),
        )  # fmt: skip


def _check_rows(count: int, rows: Sequence[Rows], site: Site) -> None:
    if count < rows[-1].end:
        name = site.adaptable.linears[site.numbers[0]].name
        raise AdapterError(f"{name} sees {count} of a step's rows: no adapter can be served there")
