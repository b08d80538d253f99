"""The `native` backend: the C++ kernels of engine/kernels/csrc, on CPU tensors in float32 or bfloat16.

A row's bits depend on its own request only; csrc/paged_attention.cpp says what that rests on.
"""

from __future__ import annotations

import ctypes

import torch

from engine.attention.base import AttentionCall, StepMeta
from engine.kernels import native
from engine.kernels.native import DTYPE_CODE
from engine.pages import int8_rows

NO_MEMORY = "paged attention could not allocate its scratch memory"


class AttentionArgs(ctypes.Structure):
    """KvrelayAttention of csrc/kernels.h, field for field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "out", "k_pages", "v_pages", "sinks", "slopes")),
        *((name, ctypes.c_void_p) for name in ("query_starts", "starts", "block_tables")),
        *((name, ctypes.c_int64) for name in ("q_row_stride", "q_head_stride", "table_stride")),
        *((name, ctypes.c_int64) for name in ("k_token_stride", "v_token_stride")),
        *((name, ctypes.c_int64) for name in ("sequences", "heads", "kv_heads", "k_dim", "v_dim", "page_size")),
        *((name, ctypes.c_float) for name in ("scaling", "softcap")),
        *((name, ctypes.c_int32) for name in ("window", "chunk", "dtype", "int8", "threads")),
    )


class NativeBackend:
    name = "native"

    def __init__(self) -> None:
        library = native.library()
        self._attend = library.kvrelay_attend
        self._attend.argtypes = (ctypes.POINTER(AttentionArgs),)
        self._attend.restype = ctypes.c_int
        self._write = library.kvrelay_write
        self._write.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p) + (
            ctypes.c_int64,
        ) * 4
        self._write.restype = None

    def write(
        self, k_TGD: torch.Tensor, v_TGE: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, meta: StepMeta
    ) -> None:
        self._write_one(k_TGD, k_pages, meta)
        self._write_one(v_TGE, v_pages, meta)

    def _write_one(self, rows_TGD: torch.Tensor, pages: torch.Tensor, meta: StepMeta) -> None:
        rows_TGD = _with_dense_rows(rows_TGD, pages.dtype)
        row_stride, head_stride, _ = rows_TGD.stride()
        size = rows_TGD.element_size()
        self._write(
            rows_TGD.data_ptr(),
            row_stride * size,
            head_stride * size,
            pages.data_ptr(),
            meta.slots.data_ptr(),
            meta.slots.shape[0],
            pages.shape[2],
            pages.shape[3] * size,
            pages.stride(1) * size,
        )

    def attend(
        self, q_THD: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, meta: StepMeta, call: AttentionCall
    ) -> torch.Tensor:
        dtype = q_THD.dtype
        q_THD = _with_dense_rows(q_THD, dtype if k_pages.dtype == int8_rows.DTYPE else k_pages.dtype)
        rows, heads, _ = q_THD.shape
        args = layer_args(heads, k_pages, v_pages, call, q_THD.dtype)
        out_THE = q_THD.new_empty(rows, heads, args.v_dim)
        if rows > meta.slots.shape[0]:
            out_THE[meta.slots.shape[0] :] = 0
        sinks = None if call.sinks is None else call.sinks.to(torch.float32).contiguous()
        args.q, args.out = q_THD.data_ptr(), out_THE.data_ptr()
        args.sinks = None if sinks is None else sinks.data_ptr()
        args.slopes = None if call.slopes is None else call.slopes.data_ptr()
        args.query_starts, args.starts = meta.query_starts.data_ptr(), meta.starts.data_ptr()
        args.block_tables, args.table_stride = meta.block_tables.data_ptr(), meta.block_tables.stride(0)
        args.q_row_stride, args.q_head_stride, _ = q_THD.stride()
        args.sequences, args.threads = meta.num_sequences, torch.get_num_threads()
        if self._attend(args):
            raise MemoryError(NO_MEMORY)
        return out_THE if out_THE.dtype == dtype else out_THE.to(dtype)


def layer_args(
    heads: int, k_pages: torch.Tensor, v_pages: torch.Tensor, call: AttentionCall, dtype: torch.dtype
) -> AttentionArgs:
    """What a layer's steps have in common, but for sinks and slopes. `dtype`: of queries."""
    return AttentionArgs(
        k_pages=k_pages.data_ptr(),
        v_pages=v_pages.data_ptr(),
        k_token_stride=k_pages.stride(1),
        v_token_stride=v_pages.stride(1),
        heads=heads,
        kv_heads=k_pages.shape[2],
        k_dim=int8_rows.width_of(k_pages),
        v_dim=int8_rows.width_of(v_pages),
        page_size=k_pages.shape[1],
        scaling=call.scaling,
        softcap=call.softcap,
        window=call.window,
        chunk=call.chunk,
        dtype=DTYPE_CODE[dtype],
        int8=k_pages.dtype == int8_rows.DTYPE,
    )


def _with_dense_rows(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same values in `dtype`, each head's elements side by side; nearly always the tensor itself."""
    if rows.dtype != dtype:
        rows = rows.to(dtype)
    return rows if rows.stride(-1) == 1 else rows.contiguous()
