"""All layers of a decoder in one call of engine/kernels/csrc/decoder.cpp, where all their products are in panels.

A step of few rows is then not a hundred and more short calls, each of which makes ready what is the same in every step
and may wait for the interpreter's lock. The kernels are those that layers.py calls, and so are a row's bits.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine.adapters.products import NativeSite
from engine.adapters.weights import NativeAdapters
from engine.attention.forward_pass import ForwardPass
from engine.attention.native_backend import NO_MEMORY, AttentionArgs, NativeBackend, layer_args
from engine.fused.cpu import Rotary, layer_rotary
from engine.fused.kernels import NormWeight, Rotation
from engine.fused.layers import Layer, Mlp, Norm
from engine.kernels import native
from engine.weights.linear import PackedLinear

NO_MEMORY_CODE = 1  # of kvrelay_decode; what else is not 0 came of `on_layer`


class _Norm(ctypes.Structure):
    """KvrelayNorm of csrc/decoder.cpp, field for field, and so below."""

    _fields_ = (("weight", ctypes.c_void_p), ("eps", ctypes.c_float), ("plus_one", ctypes.c_int32))


class _Linear(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("panels", "scales", "bias")),
        *((name, ctypes.c_int64) for name in ("inputs", "outputs")),
        ("site", NativeSite),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Norm) for name in ("before", "middle")),
        *((name, _Linear) for name in ("qkv", "out", "gate_up", "down")),
        ("rotary", Rotary),
        ("attention", AttentionArgs),
    )


_OnLayer = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32)


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("total", "normed", "scratch", "cos", "sin")),
        *((name, ctypes.c_void_p) for name in ("slots", "query_starts", "starts", "block_tables")),
        *((name, ctypes.c_int64) for name in ("rows", "written", "sequences", "table_stride")),
        ("threads", ctypes.c_int32),
        ("adapters", ctypes.c_void_p),
        ("on_layer", _OnLayer),
    )


class LayersInOneCall:
    def __init__(self, layers: Sequence[Layer], norm: Norm) -> None:
        self._layers = layers
        self._norm = norm
        self._first = layers[0].attention.layer  # of a pipeline's later stages not 0
        self._memory: Callable[[], Any] = lambda: None  # for which the arguments were made
        self._args: ctypes.Array[_Layer] | None = None  # None: not in one call
        self._scratch_width = 0

    def serves(self, state: ForwardPass) -> bool:
        """Whether a pass can go this way."""
        if not isinstance(state.backend, NativeBackend) or state.scales is not None or state.meta.masses:
            return False
        if self._memory() is not state.memory:
            self._make_args(state)
        return self._args is not None

    def __call__(self, total: torch.Tensor, rotation: Rotation, state: ForwardPass) -> torch.Tensor:
        """The last norm of what the hidden states `total` [1, T, N] became behind the layers; they are overwritten by
        it."""
        assert isinstance(rotation, tuple), "CPU layers rotate by the model's own cosines"
        meta, normed = state.meta, torch.empty_like(total)
        scratch = total.new_empty(meta.num_rows * self._scratch_width)
        cos, sin = (x.contiguous() for x in rotation)
        told, on_layer = _told(state.on_layer, self._first)
        step = _Step(
            total=total.data_ptr(),
            normed=normed.data_ptr(),
            scratch=scratch.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            slots=meta.slots.data_ptr(),
            query_starts=meta.query_starts.data_ptr(),
            starts=meta.starts.data_ptr(),
            block_tables=meta.block_tables.data_ptr(),
            rows=meta.num_rows,
            written=meta.slots.shape[0],
            sequences=meta.num_sequences,
            table_stride=meta.block_tables.stride(0),
            threads=torch.get_num_threads(),
            adapters=self._adapters(),
            on_layer=on_layer,
        )
        code = self._library.kvrelay_decode(
            self._args, ctypes.c_int64(len(self._layers)), ctypes.byref(_norm(self._norm.weight)), ctypes.byref(step)
        )
        if told:
            raise told[0]
        if code == NO_MEMORY_CODE:
            raise MemoryError(NO_MEMORY)
        return normed

    def _adapters(self) -> int | None:
        """The address of what the step's adapters add, where it has any."""
        qkv: Any = self._layers[0].attention.qkv
        step = qkv.site.adaptable.step if qkv.site is not None else None
        if step is None:
            return None
        assert isinstance(step, NativeAdapters), "products in panels are adapted by the kernels beside them"
        return ctypes.addressof(step.step)

    def _make_args(self, state: ForwardPass) -> None:
        """The arguments that are the same in every step over these pages."""
        self._memory = weakref.ref(state.memory)
        self._args = None
        if not all(
            layer.attention.layer == i and _is_in_panels(layer) for i, layer in enumerate(self._layers, self._first)
        ):
            return
        self._library = native.library()
        self._library.kvrelay_scratch.restype = ctypes.c_int64
        self._args = (_Layer * len(self._layers))(*(_layer_args(layer, state) for layer in self._layers))
        self._scratch_width = self._library.kvrelay_scratch(self._args, ctypes.c_int64(len(self._layers)))


def _is_in_panels(layer: Layer) -> bool:
    if not isinstance(layer.mlp, Mlp):
        return False
    linears = (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down)
    return all(isinstance(linear, PackedLinear) and linear.is_in_panels for linear in linears)


def _layer_args(layer: Layer, state: ForwardPass) -> _Layer:
    assert isinstance(layer.input_norm, Norm)
    assert isinstance(layer.mlp, Mlp)
    attention = layer.attention
    heads, number = attention.heads, attention.layer
    k_pages, v_pages = state.memory.k(number), state.memory.v(number)
    call = state.call(number, attention.scaling)
    attend = layer_args(heads.heads, k_pages, v_pages, call, torch.bfloat16)
    attend.q_row_stride, attend.q_head_stride = heads.heads * heads.head_dim, heads.head_dim
    return _Layer(
        before=_norm(layer.input_norm.weight),
        middle=_norm(layer.middle_norm.weight),
        qkv=_linear(attention.qkv),
        out=_linear(attention.out),
        gate_up=_linear(layer.mlp.gate_up),
        down=_linear(layer.mlp.down),
        rotary=layer_rotary(heads, k_pages, v_pages, torch.bfloat16),
        attention=attend,
    )


def _norm(norm: NormWeight) -> _Norm:
    return _Norm(norm.weight.data_ptr(), norm.eps, norm.plus_one)


def _linear(linear: Any) -> _Linear:
    scales, bias = (None if tensor is None else tensor.data_ptr() for tensor in (linear.scales, linear.bias))
    site = NativeSite() if linear.site is None else linear.site.native
    return _Linear(linear.packed.data_ptr(), scales, bias, linear.in_features, linear.out_features, site)


def _told(on_layer: Callable[[int], None] | None, first: int) -> tuple[list[BaseException], Any]:
    """`on_layer` as C may call it, which counts from `first`, and where its error will lie."""
    errors: list[BaseException] = []
    if on_layer is None:
        return errors, _OnLayer()

    def tell(layer: int) -> int:
        try:
            on_layer(first + layer)
        except BaseException as error:  # none may pass through C: it is raised behind the call
            errors.append(error)
        return len(errors)

    return errors, _OnLayer(tell)
