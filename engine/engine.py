"""Engine owns one model, its KV pages and the forward step. It knows no role, no queue and no clock.

load: config -> weights -> own eager logits -> probe of each layer's KV -> pages -> parity check -> ready
      on a GPU the pages come last: they take what weights and a step's peak leave of the memory
step: chunks -> packed rows -> the model's forward, whose attention goes through the pages -> sampled tokens
      `begin` queues a step on a GPU and does not wait for it (gpu_steps.py)

One thread calls `step`. Page numbers come from the caller: the engine allocates and frees nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from engine import device, parity
from engine import loading as prepare
from engine.attention import hooks
from engine.attention.base import AttentionBackend, StepMeta, build_meta
from engine.attention.flashinfer.backend import FlashInferBackend
from engine.attention.forward_pass import ForwardPass
from engine.attention.probe import Probe
from engine.errors import UnsupportedModel
from engine.gpu.graphs import Capture, DecodeGraphs, cuda_capture, sizes_up_to
from engine.gpu.staging import on_device
from engine.gpu.steps import GpuSteps
from engine.options import EngineOptions
from engine.pages import fp8 as kv_fp8
from engine.pages.fp8 import KvScale
from engine.pages.layout import KvLayout
from engine.pages.memory import KvMemory, LayerPages
from engine.parallel.leader import Ranks
from engine.pending import DoneStep, PendingStep
from engine.sampling.host import NonFiniteLogits, sample
from engine.types import PENDING, Chunk, ModelInfo, SampledToken, SampleSpec, Step
from engine.weights import config as config_of
from engine.weights import loader

logger = logging.getLogger(__name__)

MIN_SHARE_FOR_FLOAT32 = 0.5  # of rows within tolerance: with fewer, the kernels are wrong, not the ties
Progress = Callable[[str, float], None]


def _silent(stage: str, fraction: float) -> None:
    return


class Engine:
    acts_as_gpu = False  # a test's, which runs what a GPU would run on a CPU

    def __init__(
        self,
        model: PreTrainedModel,
        info: ModelInfo,
        backend: AttentionBackend,
        probe: Probe,
        row_multiple: int,
        options: EngineOptions,
        at: torch.device,
    ) -> None:
        self.info = info
        self.device = at
        self.backend = backend
        self.memory: KvMemory
        self.layout: KvLayout  # of the pages that requests may be given
        self._model = model
        self._probe = probe
        self._row_multiple = row_multiple
        self._options = options
        self._scales: tuple[KvScale, ...] | None = None
        self._steps: GpuSteps | None = None
        self._last_tokens: dict[str, int] = {}
        self._ranks: Ranks | None = None

    @classmethod
    def load(cls, options: EngineOptions, progress: Progress = _silent) -> Engine:
        """Load, check and return a ready engine.

        `progress` is called with a stage ("weights", "kernels", "parity check", "ready") and a fraction 0 .. 1.
        Raises UnsupportedModel for a model that cannot be loaded or served, ValueError for an option out of range.
        """
        options.validate()
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        at = device.resolve(options.device)
        with torch.inference_mode(), device.current(at):
            return cls._load(options, at, progress)

    @classmethod
    def _load(cls, options: EngineOptions, at: torch.device, progress: Progress) -> Engine:
        if options.tensor_parallel == 1:
            return cls._load_beside(None, options, at, progress)
        ranks = Ranks.started(options, at)
        try:
            return cls._load_beside(ranks, ranks.options, at, progress)
        except BaseException:
            ranks.close()
            raise

    @classmethod
    def _load_beside(cls, ranks: Ranks | None, options: EngineOptions, at: torch.device, progress: Progress) -> Engine:
        progress("weights", 0.0)
        config = config_of.load_config(options.model)
        dtype = config_of.resolve_dtype(options.dtype, config)
        config_of.check_config(config)
        max_len = config_of.resolve_max_len(options.max_model_len, config)
        config_of.check_ropes(config, max_len)
        model = loader.load_model(options.model, config, dtype, at)
        progress("weights", 1.0)

        reference = None
        if options.parity_check:  # the model's own word, before its weights are repacked
            reference = parity.reference_logits(model, config.get_text_config().vocab_size, max_len)
        probe = loader.probe_model(model, max_len)
        loader.set_attention(model, hooks.SERVE)
        info = loader.describe(model, options.model, dtype, max_len, len(probe.layers))

        progress("kernels", 0.0)
        if ranks is not None:
            ranks.cut(model, probe, max_len)
        backend = prepare.attention_backend(options, probe, at)
        row_multiple = 1
        if at.type == "cuda" or cls.acts_as_gpu:
            prepare.fuse_for_gpu(model, backend, probe, dtype, max_len)
        else:
            row_multiple = prepare.pack_for_cpu(model, backend, probe, dtype)
        engine = cls(model, info, backend, probe, row_multiple, options, at)
        if ranks is not None:
            ranks.join()
            engine._ranks = ranks
        if not engine.is_gpu:
            engine._allocate(peak_bytes=0)
        progress("kernels", 1.0)

        if reference is not None:
            progress("parity check", 0.0)
            engine._check_parity_or_in_float32(reference)
        engine._calibrate(reference)
        progress("parity check", 1.0)
        if engine.is_gpu:
            engine._allocate(engine._peak_bytes())
            engine._steps = engine._make_steps()
        progress("ready", 1.0)
        return engine

    def step(self, step: Step) -> list[SampledToken]:
        """Run every chunk's tokens; return one token for each chunk that has `sample`, in the chunks' order.

        A row whose logits are not finite brings a token with an `error`; the others are not to blame.
        """
        if not step.chunks:
            return []
        if self._steps is not None:
            return self.begin(step).result()
        sampled: list[tuple[str, SampleSpec]] = []
        rows: list[int] = []
        row = -1
        for chunk in step.chunks:
            row += len(chunk.token_ids)
            if chunk.sample is not None:
                rows.append(row)
                sampled.append((chunk.request_id, chunk.sample))
        with torch.inference_mode():
            logits = self._forward(step.chunks, rows, step.on_layer)
            if not sampled:
                return []
            return _draw(logits, sampled)

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda" or self.acts_as_gpu

    @property
    def can_overlap(self) -> bool:
        """Whether `begin` returns before the step is done, so that it pays to begin the next one meanwhile."""
        return self._steps is not None

    def begin(self, step: Step) -> PendingStep:
        """Begin a step; its tokens come from `result()` of what is returned. One more may be begun before that.

        A chunk of it may name PENDING tokens: those that the step begun before it draws. On a CPU the step is done
        when this returns.
        """
        if not step.chunks:
            return DoneStep([])
        if self._steps is not None:
            with torch.inference_mode(), device.current(self.device):
                return self._steps.begin(step)
        tokens = self.step(replace(step, chunks=[self._with_last_token(chunk) for chunk in step.chunks]))
        self._last_tokens = {token.request_id: token.token_id for token in tokens}
        return DoneStep(tokens)

    def _with_last_token(self, chunk: Chunk) -> Chunk:
        if PENDING not in chunk.token_ids:
            return chunk
        last = self._last_tokens[chunk.request_id]
        return replace(chunk, token_ids=[last if token == PENDING else token for token in chunk.token_ids])

    def _forward(
        self, chunks: Sequence[Chunk], rows: list[int] | None, on_layer: Callable[[int], None] | None
    ) -> torch.Tensor:
        """Logits [rows, vocab] of the packed chunks; of every row when `rows` is None."""
        meta = build_meta(chunks, self._options.page_size, self._row_multiple)
        if self.is_gpu:
            meta = on_device(meta, self.device, with_tables=self.backend.name == "flashinfer")
        return self._run(
            meta, None if rows is None else torch.tensor(rows, dtype=torch.long, device=self.device), on_layer
        )

    def _run(self, meta: StepMeta, rows: torch.Tensor | None, on_layer: Callable[[int], None] | None) -> torch.Tensor:
        if self._ranks is not None:
            return self._ranks.run(self.memory, meta, rows, on_layer, self._run_over)
        return self._run_over(self.memory, meta, rows, on_layer)

    def _run_over(
        self, memory: LayerPages, meta: StepMeta, rows: torch.Tensor | None, on_layer: Callable[[int], None] | None
    ) -> torch.Tensor:
        state = ForwardPass(meta, memory, self.backend, self._probe, on_layer, self._scales)
        return loader.run_packed(self._model, meta.token_ids, meta.positions, rows, state)

    # Ranks

    def check(self) -> None:
        """Raise EngineBroken when no step can be run any more: one of its other processes is lost."""
        if self._ranks is not None:
            self._ranks.check()

    def close(self) -> None:
        """End the engine's other processes, where it has any. A second call does nothing."""
        if self._ranks is not None:
            self._ranks.close()

    # Pages

    def _allocate(self, peak_bytes: int) -> None:
        """The pages, and on a GPU those that are the engine's own behind them."""
        options, dtype = self._options, prepare.page_dtype(self._options, self._probe)
        one_page = prepare.layout(options.page_size, dtype, self._probe, 1)
        pages = prepare.num_pages(options, one_page, self.device, peak_bytes)
        self.layout = replace(one_page, num_pages=pages)
        own = prepare.RESERVED_PAGES if self.is_gpu else 0
        with torch.inference_mode(False):  # transports write into the pages from outside inference mode
            self.memory = KvMemory(replace(one_page, num_pages=pages + own), str(self.device))

    @contextmanager
    def _other_memory(self, dtype: torch.dtype, pages: int, scales: tuple[KvScale, ...] | None) -> Iterator[KvMemory]:
        """For a while: a small memory of its own, in which nothing was written."""
        before = getattr(self, "memory", None), self._scales
        self.memory = KvMemory(prepare.layout(self._options.page_size, dtype, self._probe, pages), str(self.device))
        self._scales = scales
        try:
            yield self.memory
        finally:
            self.memory.close()
            memory, self._scales = before
            if memory is None:
                del self.memory
            else:
                self.memory = memory

    def _peak_bytes(self) -> int:
        """What a large step needs of a GPU's memory beyond what stands there before it."""
        page_size = self._options.page_size
        tokens = min(prepare.PROFILE_TOKENS, self.info.max_model_len)
        pages = -(-tokens // page_size)
        chunk = Chunk(request_id="", token_ids=[0] * tokens, start=0, block_table=range(pages))
        with self._other_memory(prepare.page_dtype(self._options, self._probe), pages, self._scales):
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            self._forward([chunk], [tokens - 1], None)
            torch.cuda.synchronize(self.device)
            return int(torch.cuda.max_memory_allocated(self.device) - before)

    def _make_steps(self) -> GpuSteps:
        with_tables = isinstance(self.backend, FlashInferBackend)
        graphs = self._make_graphs() if with_tables and self._options.cuda_graphs else None
        return GpuSteps(
            device=self.device,
            page_size=self._options.page_size,
            forward=self._run,
            with_tables=with_tables,
            graphs=graphs,
        )

    def _make_graphs(self) -> DecodeGraphs | None:
        assert isinstance(self.backend, FlashInferBackend)
        try:
            return DecodeGraphs(
                device=self.device,
                sizes=sizes_up_to(self._options.max_graph_batch),
                page_size=self._options.page_size,
                reserved_page=self.layout.num_pages,
                max_pages=-(-self.info.max_model_len // self._options.page_size),
                backend=self.backend,
                run=lambda meta: self._run(meta, None, None),
                capture=self._capture(),
            )
        except RuntimeError as error:  # a model's own code may wait for the device, which no graph can hold
            logger.warning("decode steps run without CUDA graphs: %s", " ".join(str(error).split())[:300])
            torch.cuda.synchronize(self.device)
            return None

    def _capture(self) -> Capture:
        return cuda_capture(self.device)

    # Checks at load

    def _check_parity_or_in_float32(self, reference: parity.Reference) -> None:
        """Rows that differ in bfloat16 may be ties that rounding decides (routed experts): float32 settles it."""
        name, dtype = self.info.architecture, self._probe.layers[0].dtype
        try:
            error = self._check_parity(reference, dtype, None)
        except parity.ParityMismatch as mismatch:
            if self.info.dtype == "float32" or mismatch.share_good < MIN_SHARE_FOR_FLOAT32:
                raise
            logger.info("%s; checked again in float32", mismatch)
            attention = "auto" if self._options.attention == "flashinfer" else self._options.attention
            exact = replace(self._options, dtype="float32", num_pages=1, kv_bytes=None, kv_dtype="auto")
            Engine._load(replace(exact, attention=attention, cuda_graphs=False), self.device, _silent).close()
            return
        logger.info("parity check of %s: largest relative error of logits %.2g", name, error)

    def _check_parity(
        self, reference: parity.Reference, dtype: torch.dtype, scales: tuple[KvScale, ...] | None
    ) -> float:
        """Run the check in a memory of its own, filled with NaN: what nobody wrote must never be read."""
        page_size = self._options.page_size
        with self._other_memory(dtype, parity.pages_needed(page_size), scales) as memory:
            for layer in range(memory.layout.num_layers):
                _poison(memory.k(layer))
                _poison(memory.v(layer))
            return parity.check(self._model, reference, lambda chunks: self._forward(chunks, None, None), page_size)

    def _calibrate(self, reference: parity.Reference | None) -> None:
        """Measure the scales of pages in fp8, and what they cost. Raises UnsupportedModel when it is too much."""
        if self._options.kv_dtype != "fp8_e4m3":
            return
        chunks, pages = kv_fp8.prompts(self.info.vocab_size, self.info.max_model_len, self._options.page_size)
        with self._other_memory(self._probe.layers[0].dtype, pages, None) as memory:
            self._forward(chunks, [0], None)
            layers = range(memory.layout.num_layers)
            self._scales = scales = kv_fp8.scales_of([(memory.k(i), memory.v(i)) for i in layers])
        self._scales = scales
        self.info = replace(self.info, fingerprint=kv_fp8.with_scales(self.info.fingerprint, scales))
        if reference is None:
            return
        lenient = replace(reference, tolerance=parity.fp8_tolerance(reference))
        try:
            error = self._check_parity(lenient, kv_fp8.DTYPE, scales)
        except parity.ParityMismatch as mismatch:
            raise UnsupportedModel(f"kv_dtype is 'fp8_e4m3', but {mismatch}; give kv_dtype: auto") from mismatch
        logger.info("KV in fp8: largest relative error of logits %.2g", error)


def _poison(pages: torch.Tensor) -> None:
    if pages.dtype == kv_fp8.DTYPE:
        pages.view(torch.uint8).fill_(kv_fp8.NAN_BYTE)
    else:
        pages.fill_(float("nan"))


def _draw(logits: torch.Tensor, wanted: Sequence[tuple[str, SampleSpec]]) -> list[SampledToken]:
    """A token for each (request id, spec), from the logits' row of the same index."""
    try:
        drawn = sample(logits, [spec for _, spec in wanted])
    except NonFiniteLogits as error:
        bad = set(error.rows)
        good = [row for row in range(len(wanted)) if row not in bad]
        tokens = {row: SampledToken(request_id=wanted[row][0], token_id=-1, error=str(error)) for row in bad}
        tokens |= dict(zip(good, _draw(logits[good], [wanted[row] for row in good]) if good else [], strict=True))
        return [tokens[row] for row in range(len(wanted))]
    return [
        SampledToken(request_id=request_id, token_id=token_id, logprob=logprob, top_logprobs=top)
        for (request_id, _), (token_id, logprob, top) in zip(wanted, drawn, strict=True)
    ]
