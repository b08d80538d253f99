"""FlashInfer's wrappers: each is planned for a step's tables, then runs every layer of its shape.

What FlashInfer ignores without a word is never asked of it: sinks go to XQA, which knows them, or are worked in
afterwards from the log-sum-exp; window and soft cap are named at `plan`; indptr and last_page_len stay on the host for
planning. A wrapper is planned again only after its pinned copy has left the host (`UploadGuard`). In a step that a CUDA
graph replays, one wrapper for each batch size keeps its buffers.

Legend: T rows, H query heads, D head_dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch

from engine.attention.base import AttentionCall
from engine.attention.flashinfer.modules import imported
from engine.attention.flashinfer.shapes import Shape
from engine.attention.tables import PageTables
from engine.upload_guard import UploadGuard

WORKSPACE_BYTES = 512 << 20  # of all wrappers, at least; fa2 splits long contexts through it (workspace.py)
XQA_WORKSPACE_BYTES = 256 << 20  # its first 8 MiB are semaphores that must begin as zeros
KV_LAYOUT = "NHD"
LN2 = math.log(2.0)


@dataclass(frozen=True)
class FlashInfer:
    """FlashInfer on one device, and the scratch memory of its wrappers."""

    module: Any
    device: torch.device
    workspace: torch.Tensor  # shared by all wrappers: kernels use it in the order of the stream

    @classmethod
    def on(cls, device: torch.device, module: Any = None) -> FlashInfer:
        size = WORKSPACE_BYTES if device.type == "cuda" else 1
        workspace = torch.zeros(size, dtype=torch.uint8, device=device)
        return cls(imported() if module is None else module, device, workspace)

    def with_workspace(self, least_bytes: int) -> FlashInfer:
        """The same where there is so much."""
        if least_bytes <= self.workspace.numel():
            return self
        return replace(self, workspace=torch.zeros(least_bytes, dtype=torch.uint8, device=self.device))

    @cached_property
    def xqa_workspace(self) -> torch.Tensor:
        size = XQA_WORKSPACE_BYTES if self.device.type == "cuda" else 16 << 20
        return torch.zeros(size, dtype=torch.uint8, device=self.device)


class Runner(Protocol):
    def plan(self, tables: PageTables) -> None: ...

    def replan(self, tables: PageTables) -> None: ...

    def run(
        self, q_THD: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], out_THD: torch.Tensor, call: AttentionCall
    ) -> None: ...


class Prefill:
    def __init__(self, flashinfer: FlashInfer, shape: Shape, name: str) -> None:
        self._shape = shape
        self._guard = UploadGuard(flashinfer.device)
        self._wrapper = flashinfer.module.BatchPrefillWithPagedKVCacheWrapper(
            float_workspace_buffer=flashinfer.workspace, kv_layout=KV_LAYOUT, backend=name
        )

    def plan(self, tables: PageTables) -> None:
        shape = self._shape
        with self._guard:
            self._wrapper.plan(
                qo_indptr=tables.qo_indptr,
                paged_kv_indptr=tables.kv_indptr,
                paged_kv_indices=tables.on_device("kv_indices"),
                paged_kv_last_page_len=tables.last_page_len,
                num_qo_heads=shape.heads,
                num_kv_heads=shape.kv_heads,
                head_dim_qk=shape.head_dim,
                page_size=shape.page_size,
                causal=True,
                sm_scale=shape.scaling,
                window_left=shape.window_left,
                logits_soft_cap=shape.softcap,
                q_data_type=shape.dtype,
                kv_data_type=shape.kv_dtype,
            )

    def replan(self, tables: PageTables) -> None:
        raise AssertionError("a step with prompts is never replayed")

    def run(
        self, q_THD: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], out_THD: torch.Tensor, call: AttentionCall
    ) -> None:
        _run_wrapper(self._wrapper, q_THD, pages, out_THD, call)


class Decode:
    """The decode wrapper; on a graph's tables it is bound to their buffers for good."""

    def __init__(self, flashinfer: FlashInfer, shape: Shape, use_tensor_cores: bool, static: PageTables | None) -> None:
        self._shape = shape
        self._guard = UploadGuard(flashinfer.device)
        self._fast_plan = flashinfer.module.decode.fast_decode_plan
        buffers: dict[str, Any] = {}
        if static is not None:
            buffers = {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": static.on_device("kv_indptr"),
                "paged_kv_indices_buffer": static.on_device("kv_indices"),
                "paged_kv_last_page_len_buffer": static.on_device("last_page_len"),
            }
        self._wrapper = flashinfer.module.BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer=flashinfer.workspace,
            kv_layout=KV_LAYOUT,
            use_tensor_cores=use_tensor_cores,
            backend="fa2" if use_tensor_cores else "auto",  # else pages in fp8 would make it choose by itself
            **buffers,
        )
        self._indices = None if static is None else static.on_device("kv_indices")

    def plan(self, tables: PageTables) -> None:
        indices = tables.on_device("kv_indices")[: tables.kv_indices.shape[0]]
        with self._guard:
            self._wrapper.plan(
                indptr=tables.kv_indptr, indices=indices, last_page_len=tables.last_page_len, **self._arguments()
            )

    def replan(self, tables: PageTables) -> None:
        """The buffers hold the new tables already; only the plan is new."""
        assert self._indices is not None, "only a graph's wrapper is planned again in place"
        with self._guard:
            self._fast_plan(
                self._wrapper,
                indptr=tables.kv_indptr,
                indices=self._indices[: tables.kv_indices.shape[0]],
                last_page_len=tables.last_page_len,
                global_override_indptr_cpu=tables.kv_indptr,
                **self._arguments(),
            )

    def _arguments(self) -> dict[str, Any]:
        shape = self._shape
        return {
            "num_qo_heads": shape.heads,
            "num_kv_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "page_size": shape.page_size,
            "window_left": shape.window_left,
            "logits_soft_cap": shape.softcap,
            "q_data_type": shape.dtype,
            "kv_data_type": shape.kv_dtype,
            "sm_scale": shape.scaling,
        }

    def run(
        self, q_THD: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], out_THD: torch.Tensor, call: AttentionCall
    ) -> None:
        _run_wrapper(self._wrapper, q_THD, pages, out_THD, call)


class Xqa:
    """XQA needs no plan: it reads block tables and lengths on the device."""

    def __init__(self, flashinfer: FlashInfer, shape: Shape) -> None:
        self._flashinfer = flashinfer
        self._shape = shape
        self._run = flashinfer.module.decode.xqa_batch_decode_with_kv_cache
        self._tables: PageTables | None = None

    def plan(self, tables: PageTables) -> None:
        self._tables = tables

    def replan(self, tables: PageTables) -> None:
        return

    def run(
        self, q_THD: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], out_THD: torch.Tensor, call: AttentionCall
    ) -> None:
        tables = self._tables
        assert tables is not None, "run before plan"
        block_tables = tables.on_device("block_tables")
        self._run(
            query=q_THD.contiguous(),
            kv_cache=pages,
            workspace_buffer=self._flashinfer.xqa_workspace,
            block_tables=block_tables,
            seq_lens=tables.on_device("kv_lens").view(torch.uint32),
            max_seq_len=block_tables.shape[1] * self._shape.page_size,
            bmm1_scale=call.scaling * call.k_scale,
            bmm2_scale=call.v_scale,
            window_left=self._shape.window_left,
            out=out_THD,
            sinks=None if call.sinks is None else call.sinks.float().contiguous(),
            kv_layout=KV_LAYOUT,
        )


def _run_wrapper(
    wrapper: Any,
    q_THD: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor],
    out_THD: torch.Tensor,
    call: AttentionCall,
) -> None:
    if call.sinks is None:
        wrapper.run(q_THD, pages, k_scale=call.k_scale, v_scale=call.v_scale, out=out_THD)
        return
    _, lse_TH = wrapper.run(q_THD, pages, k_scale=call.k_scale, v_scale=call.v_scale, out=out_THD, return_lse=True)
    # One more logit in the softmax: everything shrinks by e^lse / (e^lse + e^sink). FlashInfer's lse is to the base 2.
    out_THD.mul_(torch.sigmoid(lse_TH * LN2 - call.sinks.float()).unsqueeze(-1))
