"""CpuPlatform: every product is row-invariant (engine/weights/linear.py), and a step is done when it returns."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.attention.base import AttentionBackend
from engine.attention.probe import Probe
from engine.attention.registry import make_backend
from engine.fused.cpu import CpuKernels
from engine.fused.recognise import fuse
from engine.host_steps import HostSteps, PipelineSteps
from engine.loading.capacity import DEFAULT_KV_BYTES, page_dtype, page_size
from engine.options import EngineOptions
from engine.paged_model import KvPages, PagedModel
from engine.pages import fp8
from engine.pages.fp8 import KvScale
from engine.types import ModelInfo
from engine.weights import linear, panels
from engine.weights.config import ServedConfig

VECTOR_INPUTS = 64  # of a product as real models have them

logger = logging.getLogger(__name__)


class CpuPlatform:
    device = torch.device("cpu")

    def prepare(
        self, module: PreTrainedModel, probe: Probe, options: EngineOptions, served: ServedConfig
    ) -> PagedModel:
        backend = _attention_backend(options, probe)
        return PagedModel(
            module=module,
            probe=probe,
            backend=backend,
            device=self.device,
            page_size=page_size(options, probe),
            row_multiple=_pack(module, backend, probe, served.dtype),
        )

    def peak_bytes(
        self, model: PagedModel, options: EngineOptions, info: ModelInfo, scales: tuple[KvScale, ...] | None
    ) -> int:
        return 0

    def default_kv_bytes(self, options: EngineOptions, peak_bytes: int, page_bytes: int) -> int:
        return DEFAULT_KV_BYTES

    def steps(
        self, model: PagedModel, pages: KvPages, options: EngineOptions, info: ModelInfo
    ) -> HostSteps | PipelineSteps:
        if model.ranks is not None and model.ranks.num_stages > 1:
            return PipelineSteps(model, model.ranks, pages)
        return HostSteps(model, pages)


def with_own_threads(model: PagedModel) -> PagedModel:
    """One that another process has prepared, which may have had others."""
    if model.row_multiple == 1:  # its rows are of no concern
        return model
    for module in model.module.modules():
        if isinstance(module, linear.PackedLinear):
            module.measure()
    return replace(model, row_multiple=_row_multiple(model.module))


def _row_multiple(module: nn.Module) -> int:
    return max(linear.MIN_ROWS, linear.row_multiple(module))


def _attention_backend(options: EngineOptions, probe: Probe) -> AttentionBackend:
    name, kv_dtype = options.attention, page_dtype(options, probe)
    if kv_dtype != fp8.DTYPE:
        return make_backend(name, kv_dtype)
    if name == "native":
        raise ValueError(
            "attention is 'native', which has no kernels for kv_dtype 'fp8_e4m3'; give int8, or torch or auto"
        )
    return make_backend("torch", kv_dtype)


def _pack(module: PreTrainedModel, backend: AttentionBackend, probe: Probe, dtype: torch.dtype) -> int:
    """Fuse and pack what can be; the multiple to which a step's rows are to be padded."""
    can_pack, has_panels = linear.can_pack(dtype), panels.can_multiply(VECTOR_INPUTS, dtype)
    if not can_pack and not has_panels:
        logger.warning("there are no even %s products for this CPU: a token's last bits may depend on its batch", dtype)
        return 1
    if backend.name == "native":
        count = fuse(module, probe.layer_of, CpuKernels())
        logger.info("%d modules of %s run fused", count, type(module).__name__)
    if linear.pack_linears(module) and not can_pack:
        logger.warning("oneDNN has no %s products on this CPU: behind experts last bits may depend on the batch", dtype)
    logger.info("products: %s", f"our own, by {panels.instructions()}" if has_panels else "oneDNN")
    return _row_multiple(module)
