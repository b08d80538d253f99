"""The `flashinfer` backend: FlashInfer's kernels over the same pages and tables as the reference.

    prefill    every step with a sequence of more than one row: the paged prefill wrapper, fa2 or fa3
    decode     one row each: the decode wrapper on tensor or CUDA cores, or XQA
    append     FlashInfer's page append, of rows that are already what the pages hold

Which kernel is taken is measured (flashinfer_choice.py). What FlashInfer ignores without a word is never asked of it:
sinks go to XQA, which knows them, or are worked in afterwards from the log-sum-exp; window and soft cap are named at
`plan`; indptr and last_page_len stay on the host for planning. A wrapper is planned again only after its pinned copy
has left the host (`Fence`). In a step that a CUDA graph replays, one wrapper for each batch size keeps its buffers.

Legend: T rows, S sequences, H query heads, G key/value heads, D head_dim, P pages.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from engine.attention.base import AttentionCall, StepMeta
from engine.attention.tables import PageTables
from engine.gpu.fence import Fence

WORKSPACE_BYTES = 512 << 20  # of all wrappers; fa2 splits long contexts through it
XQA_WORKSPACE_BYTES = 256 << 20  # its first 8 MiB are semaphores that must begin as zeros
HEAD_DIMS = (64, 128, 256)
GROUPS_ON_CUDA_CORES = (1, 2, 3, 4, 8)
XQA_PAGE_SIZES = (16, 32, 64, 128)
HALF = (torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn
KV_LAYOUT = "NHD"
LN2 = math.log(2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What one plan is made for: layers that agree in it share a wrapper."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    scaling: float
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    dtype: torch.dtype = torch.bfloat16  # of queries and output
    kv_dtype: torch.dtype = torch.bfloat16

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def window_left(self) -> int:
        """FlashInfer counts the keys before the row's own; -1: all."""
        return self.window - 1 if self.window else -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Which kernel serves a shape."""

    prefill: str = "fa2"  # fa2 | fa3
    decode: str = "tensor"  # tensor | cores | xqa


def why_not(heads: int, kv_heads: int, k_dim: int, v_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> str:
    """Why FlashInfer cannot serve such a layer, in a sentence; empty when it can."""
    if k_dim != v_dim:
        return f"its keys are {k_dim} wide and its values {v_dim}, and FlashInfer's paged kernels want one width"
    if k_dim not in HEAD_DIMS:
        return f"its heads are {k_dim} wide, and FlashInfer has kernels for {', '.join(map(str, HEAD_DIMS))}"
    if dtype not in HALF:
        return f"it computes in {str(dtype).removeprefix('torch.')}, and FlashInfer's kernels want bfloat16 or float16"
    if kv_dtype not in (dtype, FP8):
        return f"its pages are in {str(kv_dtype).removeprefix('torch.')} and its queries in another"
    if heads % kv_heads:
        return f"its {heads} query heads do not share {kv_heads} KV heads evenly"
    return ""


def prefill_candidates(shape: Shape, capability: tuple[int, int]) -> tuple[str, ...]:
    """fa3 is Hopper's, and wants keys of the queries' dtype."""
    return ("fa2", "fa3") if capability[0] == 9 and shape.kv_dtype == shape.dtype else ("fa2",)


def decode_candidates(shape: Shape, capability: tuple[int, int]) -> tuple[str, ...]:
    """XQA has no soft cap, fixed page sizes, and runs from Hopper on; CUDA cores have some group sizes only. Over pages
    in fp8 XQA rounds queries and weights to fp8, too, which nobody asked for."""
    if shape.kv_dtype != shape.dtype:
        return ("tensor",)
    names = ["tensor"]
    if shape.group in GROUPS_ON_CUDA_CORES:
        names.append("cores")
    if capability[0] in (9, 10, 12) and not shape.softcap and shape.page_size in XQA_PAGE_SIZES:
        names.append("xqa")
    return tuple(names)


class _Runner(Protocol):
    def plan(self, tables: PageTables) -> None: ...

    def replan(self, tables: PageTables) -> None: ...

    def run(
        self, q_THD: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], out_THD: torch.Tensor, call: AttentionCall
    ) -> None: ...


class FlashInferBackend:
    name = "flashinfer"

    def __init__(
        self,
        device: torch.device,
        library: Any = None,
        kernels: dict[Shape, Kernels] | None = None,
        workspace: torch.Tensor | None = None,
    ) -> None:
        self.device = device
        self.library = _imported() if library is None else library
        self.kernels = dict(kernels or {})
        if workspace is None:
            size = WORKSPACE_BYTES if device.type == "cuda" else 1
            workspace = torch.zeros(size, dtype=torch.uint8, device=device)
        self.workspace = workspace  # shared by all wrappers: kernels use it in the order of the stream
        self._xqa_workspace: torch.Tensor | None = None
        self._runners: dict[tuple[str, Shape], tuple[_Runner, list[PageTables]]] = {}
        self._static: dict[int, dict[Shape, _Runner]] = {}  # by the identity of a graph's tables

    def write(
        self, k_TGD: torch.Tensor, v_TGD: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, meta: StepMeta
    ) -> None:
        tables = _tables(meta)
        rows = tables.num_rows
        self.library.append_paged_kv_cache(
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

    @property
    def reads_block_tables(self) -> bool:
        """Whether some kernel reads them: XQA alone."""
        return any(kernels.decode == "xqa" for kernels in self.kernels.values())

    def replan(self, static: PageTables, now: PageTables) -> None:
        """Before a graph is replayed: plan its wrappers for `now`, whose arrays its buffers already hold."""
        for runner in self._static[id(static)].values():
            runner.replan(now)

    def _runner(self, shape: Shape, tables: PageTables) -> _Runner:
        """The kernel for this step, planned."""
        if tables.is_static:
            runners = self._static.setdefault(id(tables), {})
            if shape not in runners:  # in the run that warms up: nothing is planned while a graph is captured
                runners[shape] = self._make(self.decode_kernel(shape), shape, tables)
                runners[shape].plan(tables)
            return runners[shape]
        name = self.decode_kernel(shape) if tables.is_decode else self.kernels.get(shape, Kernels()).prefill
        if (name, shape) not in self._runners:
            self._runners[name, shape] = (self._make(name, shape, None), [])
        runner, planned_for = self._runners[name, shape]
        if not planned_for or planned_for[0] is not tables:
            runner.plan(tables)
            planned_for[:] = [tables]
        return runner

    def decode_kernel(self, shape: Shape) -> str:
        return self.kernels.get(shape, Kernels()).decode

    def _make(self, name: str, shape: Shape, static: PageTables | None) -> _Runner:
        if name == "xqa":
            return _Xqa(self, shape)
        if name in ("tensor", "cores"):
            return _Decode(self, shape, name == "tensor", static)
        return _Prefill(self, shape, name)

    @property
    def xqa_workspace(self) -> torch.Tensor:
        if self._xqa_workspace is None:
            size = XQA_WORKSPACE_BYTES if self.device.type == "cuda" else 16 << 20
            self._xqa_workspace = torch.zeros(size, dtype=torch.uint8, device=self.device)
        return self._xqa_workspace


def _imported() -> Any:
    """FlashInfer with its norms in CUDA: built once and kept, where those in CuTe are compiled at every start."""
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")  # read at import
    return importlib.import_module("flashinfer")


class _Prefill:
    def __init__(self, backend: FlashInferBackend, shape: Shape, name: str) -> None:
        self._shape = shape
        self._fence = Fence(backend.device)
        self._wrapper = backend.library.BatchPrefillWithPagedKVCacheWrapper(
            float_workspace_buffer=backend.workspace, kv_layout=KV_LAYOUT, backend=name
        )

    def plan(self, tables: PageTables) -> None:
        shape = self._shape
        with self._fence:
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


class _Decode:
    """The decode wrapper; on a graph's tables it is bound to their buffers for good."""

    def __init__(
        self, backend: FlashInferBackend, shape: Shape, use_tensor_cores: bool, static: PageTables | None
    ) -> None:
        self._shape = shape
        self._fence = Fence(backend.device)
        self._fast_plan = backend.library.decode.fast_decode_plan
        buffers: dict[str, Any] = {}
        if static is not None:
            buffers = {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": static.on_device("kv_indptr"),
                "paged_kv_indices_buffer": static.on_device("kv_indices"),
                "paged_kv_last_page_len_buffer": static.on_device("last_page_len"),
            }
        self._wrapper = backend.library.BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer=backend.workspace,
            kv_layout=KV_LAYOUT,
            use_tensor_cores=use_tensor_cores,
            backend="fa2" if use_tensor_cores else "auto",  # else pages in fp8 would make it choose by itself
            **buffers,
        )
        self._indices = None if static is None else static.on_device("kv_indices")

    def plan(self, tables: PageTables) -> None:
        indices = tables.on_device("kv_indices")[: tables.kv_indices.shape[0]]
        with self._fence:
            self._wrapper.plan(
                indptr=tables.kv_indptr, indices=indices, last_page_len=tables.last_page_len, **self._arguments()
            )

    def replan(self, tables: PageTables) -> None:
        """The buffers hold the new tables already; only the plan is new."""
        assert self._indices is not None, "only a graph's wrapper is planned again in place"
        with self._fence:
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


class _Xqa:
    """XQA needs no plan: it reads block tables and lengths on the device."""

    def __init__(self, backend: FlashInferBackend, shape: Shape) -> None:
        self._backend = backend
        self._shape = shape
        self._run = backend.library.decode.xqa_batch_decode_with_kv_cache
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
            workspace_buffer=self._backend.xqa_workspace,
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


def shape_of(q_THD: torch.Tensor, k_pages: torch.Tensor, call: AttentionCall) -> Shape:
    return Shape(
        heads=q_THD.shape[1],
        kv_heads=k_pages.shape[2],
        head_dim=q_THD.shape[2],
        page_size=k_pages.shape[1],
        scaling=call.scaling,
        window=call.window,
        softcap=call.softcap,
        sinks=call.sinks is not None,
        dtype=q_THD.dtype,
        kv_dtype=k_pages.dtype,
    )


def _tables(meta: StepMeta) -> PageTables:
    assert meta.tables is not None, "the step's tables were not made for FlashInfer"
    return meta.tables


def _dense(x: torch.Tensor) -> torch.Tensor:
    """Each head's elements side by side, which is all that the kernels ask of strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


def distinct(shapes: Iterable[Shape]) -> list[Shape]:
    """Each once, in order."""
    return list(dict.fromkeys(shapes))


def with_kernels(backend: FlashInferBackend, shape: Shape, **names: str) -> FlashInferBackend:
    """The same library, device and workspace, with these kernels for one shape: what is measured and tested."""
    kernels = {shape: replace(Kernels(), **names)}
    return FlashInferBackend(backend.device, backend.library, kernels, backend.workspace)
