"""What is made of a loaded model before it serves: fused layers, packed or joined weights, kernels, KV pages.

On a CPU every product is row-invariant (engine/weights/linear.py). On a GPU layers of known architectures run
FlashInfer's kernels over joined weights; the others run as transformers wrote them.
"""

from __future__ import annotations

import logging

import torch
from transformers import PreTrainedModel

from engine import device as devices
from engine.attention.base import AttentionBackend
from engine.attention.flashinfer import choice as flashinfer_choice
from engine.attention.flashinfer.backend import FlashInferBackend
from engine.attention.flashinfer.shapes import HALF, Shape, distinct, why_not
from engine.attention.probe import Probe
from engine.attention.registry import make_backend
from engine.fused.cpu import CpuKernels
from engine.fused.gpu import FlashInferKernels, TorchKernels
from engine.fused.recognise import fuse
from engine.options import EngineOptions
from engine.pages import fp8 as kv_fp8
from engine.pages.layout import KvLayout
from engine.weights import linear

logger = logging.getLogger(__name__)

DEFAULT_KV_BYTES = 1 << 30
RESERVED_PAGES = 1  # of a GPU's pages, after the last that requests are given: where a graph's dummy rows stand
PROFILE_TOKENS = 8192  # of the step whose memory is measured
CONTEXT_BYTES = 600 << 20  # of CUDA and its libraries, for each process; torch does not count it
WORKSPACES_BYTES = 1 << 30  # FlashInfer's
GRAPH_BYTES = 1 << 30  # captured graphs and what their wrappers keep


def attention_backend(options: EngineOptions, probe: Probe, device: torch.device) -> AttentionBackend:
    """As asked for; `auto` on a GPU is FlashInfer where it can serve every layer. Raises ValueError with a sentence."""
    name, kv_dtype = options.attention, page_dtype(options, probe)
    if kv_dtype == kv_fp8.DTYPE and device.type == "cpu":
        if name == "native":
            raise ValueError("attention is 'native', which has no kernels for kv_dtype 'fp8_e4m3'; give torch or auto")
        name = "torch"
    backend = make_backend(name, kv_dtype, device)
    if not isinstance(backend, FlashInferBackend):
        return backend
    for number, layer in enumerate(probe.layers):
        reason = why_not(layer.num_heads, layer.kv.kv_heads, layer.kv.k_dim, layer.kv.v_dim, layer.dtype, kv_dtype)
        if not reason:
            continue
        if name == "flashinfer":
            raise ValueError(f"attention is 'flashinfer', but it cannot serve layer {number}: {reason}; give auto")
        logger.warning("attention runs on the torch backend, many times slower; layer %d: %s", number, reason)
        return make_backend("torch", kv_dtype, device)
    return flashinfer_choice.measured(backend, shapes_of(probe, options.page_size, kv_dtype))


def shapes_of(probe: Probe, page_size: int, kv_dtype: torch.dtype) -> list[Shape]:
    """Of the model's layers, each once; with pages in the model's own dtype, too, for the parity check."""
    return distinct(
        Shape(
            heads=layer.num_heads,
            kv_heads=layer.kv.kv_heads,
            head_dim=layer.kv.k_dim,
            page_size=page_size,
            scaling=layer.scaling,
            window=layer.window,
            softcap=layer.softcap,
            sinks=layer.has_sinks,
            dtype=layer.dtype,
            kv_dtype=kind,
        )
        for kind in dict.fromkeys((kv_dtype, probe.layers[0].dtype))
        for layer in probe.layers
    )


def fuse_for_gpu(
    model: PreTrainedModel, backend: AttentionBackend, probe: Probe, dtype: torch.dtype, max_len: int
) -> None:
    """Run the layers that are recognised on joined weights and FlashInfer's kernels, or plain torch without them."""
    kernels = TorchKernels()
    if isinstance(backend, FlashInferBackend) and dtype in HALF:
        kernels = FlashInferKernels(backend.flashinfer.module)
    count = fuse(model, probe.layer_of, kernels, max_len)
    logger.info("%d modules of %s run fused", count, type(model).__name__)


def pack_for_cpu(model: PreTrainedModel, backend: AttentionBackend, probe: Probe, dtype: torch.dtype) -> int:
    """Fuse and pack what can be; the multiple to which a step's rows are to be padded."""
    if not linear.can_pack(dtype):
        logger.warning("oneDNN has no %s products on this CPU: a token's last bits may depend on its batch", dtype)
        return 1
    if backend.name == "native":
        count = fuse(model, probe.layer_of, CpuKernels())
        logger.info("%d modules of %s run fused", count, type(model).__name__)
    linear.pack_linears(model)
    return max(linear.MIN_ROWS, linear.row_multiple(model))


def page_dtype(options: EngineOptions, probe: Probe) -> torch.dtype:
    return kv_fp8.DTYPE if options.kv_dtype == "fp8_e4m3" else probe.layers[0].dtype


def layout(page_size: int, dtype: torch.dtype, probe: Probe, num_pages: int) -> KvLayout:
    layers = tuple(layer.kv for layer in probe.layers)
    return KvLayout(page_size, str(dtype).removeprefix("torch."), layers, num_pages)


def num_pages(options: EngineOptions, one_page: KvLayout, device: torch.device, peak_bytes: int) -> int:
    """As many as were asked for, or as fit in kv_bytes; on a GPU, where neither is given, in its share of memory."""
    if options.num_pages is not None:
        return options.num_pages
    page_bytes = one_page.page_bytes()
    kv_bytes = options.kv_bytes if options.kv_bytes is not None else DEFAULT_KV_BYTES
    if options.kv_bytes is None and device.type == "cuda":
        kv_bytes = _gpu_kv_bytes(options, device, peak_bytes) - RESERVED_PAGES * page_bytes
    if kv_bytes < page_bytes:
        raise ValueError(f"kv_bytes is {kv_bytes}, less than one page; give at least {page_bytes}")
    return kv_bytes // page_bytes


def _gpu_kv_bytes(options: EngineOptions, device: torch.device, peak_bytes: int) -> int:
    """Of this process's own share: who else is on the GPU has one too, and may just be filling it."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    budget = devices.kv_budget(
        total_bytes=total,
        used_bytes=torch.cuda.memory_reserved(device) + CONTEXT_BYTES,
        peak_bytes=peak_bytes,
        utilization=options.gpu_memory_utilization,
        reserve_bytes=WORKSPACES_BYTES + (GRAPH_BYTES if options.cuda_graphs else 0),
    )
    return devices.checked_free(budget, free_bytes=free, utilization=options.gpu_memory_utilization)
