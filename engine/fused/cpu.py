"""The C++ kernels of engine/kernels/csrc/fused.cpp, and oneDNN's packed products."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import nn

from engine.adapters.products import Site
from engine.attention.forward_pass import ForwardPass
from engine.fused.kernels import Heads, MakeRotation, NormWeight, Rotation
from engine.kernels import native
from engine.kernels.native import DTYPE_CODE
from engine.pages import int8_rows
from engine.weights.linear import PackedLinear


class Rotary(ctypes.Structure):
    """KvrelayRotary of csrc/kernels.h, field for field."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("qkv", "cos", "sin", "q_norm", "k_norm", "q", "k_pages", "v_pages", "slots")
        ),
        *((name, ctypes.c_int64) for name in ("rows", "written", "heads", "kv_heads", "dim", "token_stride")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("plus_one", "dtype", "int8", "threads")),
    )


def layer_rotary(heads: Heads, k_pages: torch.Tensor, v_pages: torch.Tensor, dtype: torch.dtype) -> Rotary:
    """What a layer's steps have in common. `dtype`: of what is turned."""
    return Rotary(
        q_norm=None if heads.q_norm is None else heads.q_norm.weight.data_ptr(),
        k_norm=None if heads.k_norm is None else heads.k_norm.weight.data_ptr(),
        k_pages=k_pages.data_ptr(),
        v_pages=v_pages.data_ptr(),
        heads=heads.heads,
        kv_heads=heads.kv_heads,
        dim=heads.head_dim,
        token_stride=k_pages.stride(1),
        eps=0.0 if heads.q_norm is None else heads.q_norm.eps,
        plus_one=heads.q_norm is not None and heads.q_norm.plus_one,
        dtype=DTYPE_CODE[dtype],
        int8=k_pages.dtype == int8_rows.DTYPE,
    )


class CpuKernels:
    def __init__(self) -> None:
        library = native.library()
        pointer, size, code = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
        self._rotate_and_write = library.kvrelay_rotate_and_write
        self._rotate_and_write.argtypes = (ctypes.POINTER(Rotary),)
        self._rms_norm = library.kvrelay_rms_norm
        self._rms_norm.argtypes = (pointer,) * 3 + (size,) * 2 + (ctypes.c_float,) + (code,) * 3
        self._add_norm = library.kvrelay_add_norm
        self._add_norm.argtypes = (pointer,) * 5 + (size,) * 2 + (ctypes.c_float,) + (code,) * 3
        self._silu_mul = library.kvrelay_silu_mul
        self._silu_mul.argtypes = (pointer,) * 2 + (size,) * 2 + (code,) * 2
        for function in (self._rotate_and_write, self._rms_norm, self._add_norm, self._silu_mul):
            function.restype = None

    def linear(
        self,
        weights_ON: Sequence[torch.Tensor],
        bias_O: torch.Tensor | None,
        scales_O: torch.Tensor | None,
        site: Site | None,
    ) -> PackedLinear:
        return PackedLinear(weights_ON, bias_O, scales_O, site)

    def norm(self, x: torch.Tensor, norm: NormWeight) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        n = norm.weight.shape[0]
        self._rms_norm(
            x.data_ptr(), norm.weight.data_ptr(), out.data_ptr(), x.numel() // n, n, norm.eps, norm.plus_one,
            DTYPE_CODE[x.dtype], torch.get_num_threads(),
        )  # fmt: skip
        return out

    def add_norm(self, x: torch.Tensor, y: torch.Tensor, norm: NormWeight) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = x.contiguous(), y.contiguous()
        total, out = torch.empty_like(x), torch.empty_like(x)
        n = norm.weight.shape[0]
        self._add_norm(
            x.data_ptr(), y.data_ptr(), norm.weight.data_ptr(), total.data_ptr(), out.data_ptr(), x.numel() // n, n,
            norm.eps, norm.plus_one, DTYPE_CODE[x.dtype], torch.get_num_threads(),
        )  # fmt: skip
        return total, out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        hidden = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
        self._silu_mul(
            gate_up.data_ptr(), hidden.data_ptr(), hidden.numel() // hidden.shape[-1], hidden.shape[-1],
            DTYPE_CODE[gate_up.dtype], torch.get_num_threads(),
        )  # fmt: skip
        return hidden

    def rotate_and_write(
        self, qkv: torch.Tensor, rotation: Rotation, heads: Heads, layer: int, state: ForwardPass
    ) -> torch.Tensor:
        assert isinstance(rotation, tuple), "CPU layers rotate by the model's own cosines"
        assert state.scales is None, "this kernel writes pages in the model's own dtype, or in int8"
        meta, memory = state.meta, state.memory
        cos, sin = (x.contiguous() for x in rotation)
        assert cos.shape[-1] == heads.head_dim, "a rotation of part of the head is not what the source says"
        q_THD = qkv.new_empty(meta.num_rows, heads.heads, heads.head_dim)
        args = layer_rotary(heads, memory.k(layer), memory.v(layer), qkv.dtype)
        args.qkv, args.q, args.cos, args.sin = qkv.data_ptr(), q_THD.data_ptr(), cos.data_ptr(), sin.data_ptr()
        args.slots, args.written, args.rows = meta.slots.data_ptr(), meta.slots.shape[0], meta.num_rows
        args.threads = torch.get_num_threads()
        self._rotate_and_write(args)
        state.tell(layer)
        return q_THD

    def rotation(self, rotary: nn.Module, like: torch.Tensor, dim: int, max_len: int) -> MakeRotation | None:
        """The model's own."""

        def rotation(x: torch.Tensor, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            cos, sin = rotary(x, positions_T[None])
            return cos, sin

        cos, _ = rotation(like.view(1, 1, -1), torch.zeros(1, dtype=torch.long))
        return rotation if cos.shape[-1] == dim and cos.dtype == like.dtype else None
