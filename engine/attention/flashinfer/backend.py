"""The `flashinfer` backend: FlashInfer's kernels over the same pages and tables as the reference.

    prefill    every step with a sequence of more than one row: the paged prefill wrapper, fa2 or fa3
    decode     one row each: the decode wrapper on tensor or CUDA cores, or XQA
    append     FlashInfer's page append, of rows that are already what the pages hold

Which kernel is taken is measured (choice.py); how each is planned and run, wrappers.py says.

Legend: T rows, G key/value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from engine.attention.base import AttentionCall, StepMeta
from engine.attention.flashinfer.shapes import KernelChoice, Shape, shape_of
from engine.attention.flashinfer.wrappers import KV_LAYOUT, Decode, FlashInfer, Prefill, Runner, Xqa
from engine.attention.tables import PageTables


class FlashInferBackend:
    name = "flashinfer"

    def __init__(self, flashinfer: FlashInfer, kernels: Mapping[Shape, KernelChoice] | None = None) -> None:
        """A shape that `kernels` does not name is served by the default choice."""
        self.flashinfer = flashinfer
        self.kernels = dict(kernels or {})
        self._runners: dict[tuple[str, Shape], tuple[Runner, list[PageTables]]] = {}
        self._static: dict[int, dict[Shape, Runner]] = {}  # by the identity of a graph's tables

    def write(
        self, k_TGD: torch.Tensor, v_TGD: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, meta: StepMeta
    ) -> None:
        tables = _tables(meta)
        rows = tables.num_rows
        self.flashinfer.module.append_paged_kv_cache(
            append_key=_dense(k_TGD[:rows].to(k_pages.dtype)),
            append_value=_dense(v_TGD[:rows].to(v_pages.dtype)),
            batch_indices=tables.on_device("batch_indices"),
            positions=tables.on_device("positions"),
            paged_kv_cache=(k_pages, v_pages),
            kv_indices=tables.on_device("kv_indices"),
            kv_indptr=tables.on_device("kv_indptr"),
            kv_last_page_len=tables.on_device("last_page_len"),
            kv_layout=KV_LAYOUT,
        )

    def attend(
        self, q_THD: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, meta: StepMeta, call: AttentionCall
    ) -> torch.Tensor:
        tables = _tables(meta)
        rows = tables.num_rows
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        if rows < q_THD.shape[0]:
            out_THD[rows:] = 0
        runner = self._runner(shape_of(q_THD, k_pages, call), tables)
        runner.run(_dense(q_THD[:rows]), (k_pages, v_pages), out_THD[:rows], call)
        return out_THD

    def with_choice(self, shape: Shape, choice: KernelChoice) -> FlashInferBackend:
        """For one shape, to try a kernel: it shares no semaphores with those that serve."""
        return FlashInferBackend(replace(self.flashinfer), {shape: choice})

    @property
    def reads_block_tables(self) -> bool:
        """Whether some kernel reads them: XQA alone."""
        return any("xqa" in kernels.decode_kernels for kernels in self.kernels.values())

    def replan(self, static: PageTables, now: PageTables) -> None:
        """Before a graph is replayed: plan its wrappers for `now`, whose arrays its buffers already hold."""
        for runner in self._static[id(static)].values():
            runner.replan(now)

    def _runner(self, shape: Shape, tables: PageTables) -> Runner:
        """The kernel for this step, planned."""
        kernels = self.kernels.get(shape, KernelChoice())
        if tables.is_static:
            runners = self._static.setdefault(id(tables), {})
            if shape not in runners:  # in the run that warms up: nothing is planned while a graph is captured
                runners[shape] = self._make(kernels.decode_for(tables.num_sequences), shape, tables)
                runners[shape].plan(tables)
            return runners[shape]
        name = kernels.decode_for(tables.num_sequences, tables.longest) if tables.is_decode else kernels.prefill
        if (name, shape) not in self._runners:
            self._runners[name, shape] = (self._make(name, shape, None), [])
        runner, planned_for = self._runners[name, shape]
        if not planned_for or planned_for[0] is not tables:
            runner.plan(tables)
            planned_for[:] = [tables]
        return runner

    def _make(self, name: str, shape: Shape, static: PageTables | None) -> Runner:
        if name == "xqa":
            return Xqa(self.flashinfer, shape)
        if name in ("tensor", "cores"):
            return Decode(self.flashinfer, shape, name == "tensor", static)
        return Prefill(self.flashinfer, shape, name)


def _tables(meta: StepMeta) -> PageTables:
    assert meta.tables is not None, "the step's tables were not made for FlashInfer"
    return meta.tables


def _dense(x: torch.Tensor) -> torch.Tensor:
    """Each head's elements side by side, which is all that the kernels ask of strides."""
    return x if x.stride(-1) == 1 else x.contiguous()
