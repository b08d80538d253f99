"""GpuPlatform: layers of known architectures run FlashInfer's kernels over joined weights, the others run as
transformers wrote them; pages take what weights and a step's peak leave of the memory; decode steps are CUDA graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch
from transformers import PreTrainedModel

from engine.attention.base import AttentionBackend
from engine.attention.flashinfer import choice as flashinfer_choice
from engine.attention.flashinfer.backend import FlashInferBackend
from engine.attention.flashinfer.shapes import HALF, Shape, distinct, why_not
from engine.attention.flashinfer.timing import Limits, Stopwatch, seconds_of
from engine.attention.probe import LayerProbe, Probe
from engine.attention.registry import make_backend
from engine.device import Capture
from engine.errors import in_short
from engine.fused import rotary_choice
from engine.fused.gpu import TorchKernels
from engine.fused.kernels import Kernels
from engine.fused.recognise import fuse
from engine.gpu.graphs import DecodeGraphs, cuda_capture, sizes_up_to
from engine.gpu.products import with_faster_products
from engine.gpu.staging import Uploader, on_device
from engine.gpu.steps import GpuSteps
from engine.gpu.together import Together
from engine.loading.capacity import checked_free, graph_bytes, kv_budget, page_dtype, page_size
from engine.loading.platform import OWN_PAGES
from engine.options import EngineOptions
from engine.paged_model import KvPages, PagedModel
from engine.pages.fp8 import KvScale
from engine.pages.prompts import prompts_in_pages
from engine.sampling.device import draw, largest_draw
from engine.types import ModelInfo
from engine.weights.config import ServedConfig

logger = logging.getLogger(__name__)

PROFILE_TOKENS = 8192  # of the step whose memory is measured, where no larger one is computed
CONTEXT_BYTES = 600 << 20  # of CUDA and its libraries, for each process; torch does not count it
WORKSPACES_BYTES = 1 << 30  # FlashInfer's


class GpuPlatform:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def prepare(
        self, module: PreTrainedModel, probe: Probe, options: EngineOptions, served: ServedConfig
    ) -> PagedModel:
        backend = self.attention_backend(options, probe, served.max_len)
        count = fuse(module, probe.layer_of, self.fused_kernels(backend, served.dtype), served.max_len)
        logger.info("%d modules of %s run fused", count, type(module).__name__)
        return PagedModel(
            module=module,
            probe=probe,
            backend=backend,
            device=self.device,
            page_size=page_size(options, probe),
            place=partial(on_device, device=self.device, with_tables=backend.name == "flashinfer"),
        )

    def attention_backend(self, options: EngineOptions, probe: Probe, max_len: int) -> AttentionBackend:
        """As asked for; `auto` is FlashInfer where it can serve every layer. Raises ValueError with a sentence."""
        if options.kv_dtype == "int8":
            raise ValueError("kv_dtype is 'int8', which is for CPUs; give fp8_e4m3 or auto")
        kv_dtype = page_dtype(options, probe)
        backend = make_backend(options.attention, kv_dtype, self.device)
        if not isinstance(backend, FlashInferBackend):
            return backend
        if not probe.attentions:
            return make_backend("torch", kv_dtype, self.device)
        if reason := why_not_layer(probe, kv_dtype):
            if options.attention == "flashinfer":
                raise ValueError(f"attention is 'flashinfer', but it cannot serve {reason}; give auto")
            logger.warning("attention runs on torch, many times slower, and steps without CUDA graphs; %s", reason)
            return make_backend("torch", kv_dtype, self.device)
        pages = None if options.num_pages == 1 else options.num_pages  # a draft model's, which gets the target's later
        limits = Limits(sequences=options.max_graph_batch, keys=max_len, pages=pages)
        stopwatch = Stopwatch.on(self.device, self.capture())
        shapes = shapes_of(probe, page_size(options, probe), kv_dtype)
        return flashinfer_choice.measured(backend, shapes, limits, stopwatch)

    def fused_kernels(self, backend: AttentionBackend, dtype: torch.dtype) -> Kernels:
        """FlashInfer's, or plain torch where it is missing or the dtype is not its own."""
        if isinstance(backend, FlashInferBackend) and dtype in HALF:
            return rotary_choice.chosen(backend, Stopwatch.on(self.device, self.capture()))
        return TorchKernels()

    def peak_bytes(
        self, model: PagedModel, options: EngineOptions, info: ModelInfo, scales: tuple[KvScale, ...] | None
    ) -> int:
        tokens = max(min(PROFILE_TOKENS, info.max_model_len), options.max_step_tokens)
        longest = info.max_model_len
        lengths = [min(longest, tokens - start) for start in range(0, tokens, longest)]
        chunks, pages = prompts_in_pages([[0] * length for length in lengths], model.page_size)
        try:
            with model.scratch_pages(page_dtype(options, model.probe), pages, scales) as scratch:
                logits_1V, forward_bytes = self._measured(lambda: model.forward(scratch, chunks, [tokens - 1]))
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"a step of {tokens} tokens does not fit on the GPU; give a smaller max_batch_tokens or model: "
                f"{in_short(error)}"
            ) from error
        rows = options.max_graph_batch
        _, draw_bytes = self._measured(lambda: self._drawn(logits_1V.repeat(rows, 1)))
        peak_bytes = max(forward_bytes, draw_bytes)  # one is over when the other begins
        if not options.cuda_graphs:
            return peak_bytes
        shapes = shapes_of(model.probe, model.page_size, page_dtype(options, model.probe))
        return peak_bytes + graph_bytes(sizes_up_to(rows), logits_1V.nbytes, len(shapes))

    def _measured(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, int]:
        """What it makes, and the bytes that it took at its peak beyond what stood there before."""
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        made = run()
        torch.cuda.synchronize(self.device)
        return made, int(torch.cuda.max_memory_allocated(self.device) - before)

    def _drawn(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """By the largest draw of so many rows, whose kernel is built here and not in a request's step."""
        plan = largest_draw(logits_RV.shape[0])
        return draw(logits_RV, plan, Uploader(self.device)(plan.arrays)).ids

    def default_kv_bytes(self, options: EngineOptions, peak_bytes: int, page_bytes: int) -> int:
        """Of this process's own share: who else is on the GPU has one too, and may just be filling it."""
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        budget = kv_budget(
            total_bytes=total,
            used_bytes=torch.cuda.memory_reserved(self.device) + CONTEXT_BYTES,
            peak_bytes=peak_bytes,
            utilization=options.gpu_memory_utilization,
            reserve_bytes=WORKSPACES_BYTES,
        )
        budget = checked_free(budget, free_bytes=free, utilization=options.gpu_memory_utilization)
        return budget - OWN_PAGES * page_bytes

    def steps(self, model: PagedModel, pages: KvPages, options: EngineOptions, info: ModelInfo) -> GpuSteps:
        has_flashinfer = isinstance(model.backend, FlashInferBackend)
        can_capture = has_flashinfer and not model.probe.has_states  # those are cut as a step's rows are
        return GpuSteps(
            device=self.device,
            page_size=model.page_size,
            run=partial(model.run, pages),
            with_tables=has_flashinfer,
            graphs=self._graphs(model, pages, options, info) if can_capture and options.cuda_graphs else None,
            mirror=model.mirror,
        )

    def _graphs(
        self, model: PagedModel, pages: KvPages, options: EngineOptions, info: ModelInfo
    ) -> DecodeGraphs | None:
        assert isinstance(model.backend, FlashInferBackend)
        together = Together(model.mirror)
        graphs = DecodeGraphs(
            device=self.device,
            sizes=sizes_up_to(options.max_graph_batch),
            page_size=model.page_size,
            reserved_page=pages.memory.layout.num_pages - OWN_PAGES,
            max_pages=-(-info.max_model_len // model.page_size),
            backend=model.backend,
            run=together.computed(lambda meta: model.run(pages, meta, None)),
            capture=self.capture_steps(together),
            has_rope_lengths=info.rope is not None,
        )
        return graphs if graphs.sizes else None

    def capture(self) -> Capture:
        return cuda_capture(self.device)

    def capture_steps(self, together: Together) -> Capture:
        """Of decode steps, most of whose time is products."""
        return with_faster_products(together.capture(self.capture()), together.computed(seconds_of))


def why_not_layer(probe: Probe, kv_dtype: torch.dtype) -> str:
    """The first layer that FlashInfer cannot serve, and why: "layer 3: ..."; empty where it can serve all."""
    for number, layer in enumerate(probe.layers):
        if not isinstance(layer, LayerProbe):
            continue
        reason = why_not(layer.num_heads, layer.kv.kv_heads, layer.kv.k_dim, layer.kv.v_dim, layer.dtype, kv_dtype)
        if layer.chunk:
            reason = "it attends in chunks, which FlashInfer does not know"
        if layer.has_slopes:
            reason = "its scores fall by ALiBi's slopes, which FlashInfer has as fixed ones only"
        if reason:
            return f"layer {number}: {reason}"
    return ""


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
        for kind in dict.fromkeys((kv_dtype, probe.kv_dtype))
        for layer in probe.attentions
    )
