"""Engine owns one model, its KV pages and the forward step. It knows no role, no queue and no clock.

load: config -> weights -> own eager logits -> probe of each layer's KV -> pages -> parity check -> ready
step: chunks -> packed rows -> the model's forward, whose attention goes through the pages -> sampled tokens

One thread calls `step`. Page numbers come from the caller: the engine allocates and frees nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from engine import device, fuse, linear, loader, parity
from engine.attention import hooks
from engine.attention.base import AttentionBackend, build_meta
from engine.attention.hooks import UnsupportedModel
from engine.attention.registry import make_backend
from engine.sampling import NonFiniteLogits, sample
from engine.types import Chunk, ModelInfo, SampledToken, SampleSpec, Step
from kv_transfer.layout import KvLayout
from kv_transfer.memory import KvMemory

__all__ = ["Engine", "EngineOptions", "UnsupportedModel"]

logger = logging.getLogger(__name__)

DEFAULT_KV_BYTES = 1 << 30
MIN_SHARE_FOR_FLOAT32 = 0.5  # of rows within tolerance: with fewer, the kernels are wrong, not the ties
Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    model: str  # a Hugging Face directory or hub name
    dtype: str = "auto"  # auto | float32 | bfloat16
    page_size: int = 16  # tokens
    num_pages: int | None = None  # or kv_bytes; 1 GiB of pages when neither is given
    kv_bytes: int | None = None
    max_model_len: int | None = None  # None: the config's max_position_embeddings
    attention: str = "auto"  # auto | torch | native (CPU) | flashinfer (GPU)
    threads: int | None = None  # None: torch's own choice
    parity_check: bool = True
    device: str = "auto"  # auto | cpu | cuda | cuda:N; auto is the current GPU where there is one
    kv_dtype: str = "auto"  # auto: as the model computes | fp8_e4m3: scaled, half the bytes to hold and to relay
    gpu_memory_utilization: float = 0.9  # share of a GPU's memory for all of it, where no page count is given
    cuda_graphs: bool = True  # decode steps replay captured graphs
    max_graph_batch: int = 128  # requests of the largest graph; larger decode steps run without one

    def validate(self) -> None:
        """Raise ValueError for the first option that is out of range."""
        for key in ("page_size", "num_pages", "kv_bytes", "threads", "max_graph_batch"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"{key} is {value}; give a whole number of 1 or more")
        if self.num_pages is not None and self.kv_bytes is not None:
            raise ValueError(f"num_pages is {self.num_pages} and kv_bytes is {self.kv_bytes}; give one of the two")
        device.check_name(self.device)
        if self.kv_dtype not in device.KV_DTYPES:
            raise ValueError(f"kv_dtype is {self.kv_dtype!r}; give one of {', '.join(device.KV_DTYPES)}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            share = self.gpu_memory_utilization
            raise ValueError(f"gpu_memory_utilization is {share:g}; give a share above 0 and up to 1")


def _silent(stage: str, fraction: float) -> None:
    return


class Engine:
    def __init__(
        self,
        model: PreTrainedModel,
        info: ModelInfo,
        memory: KvMemory,
        backend: AttentionBackend,
        probe: hooks.Probe,
        row_multiple: int,
    ) -> None:
        self.info = info
        self.memory = memory
        self.layout = memory.layout
        self.backend = backend
        self._model = model
        self._probe = probe
        self._row_multiple = row_multiple

    @classmethod
    def load(cls, options: EngineOptions, progress: Progress = _silent) -> Engine:
        """Load, check and return a ready engine.

        `progress` is called with a stage ("weights", "kernels", "parity check", "ready") and a fraction 0 .. 1.
        Raises UnsupportedModel for a model that cannot be loaded or served, ValueError for an option out of range.
        """
        options.validate()
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        with torch.inference_mode():
            return cls._load(options, progress)

    @classmethod
    def _load(cls, options: EngineOptions, progress: Progress) -> Engine:
        progress("weights", 0.0)
        device.resolve(options.device)
        config = loader.load_config(options.model)
        dtype = loader.resolve_dtype(options.dtype, config)
        loader.check_config(config)
        max_len = loader.resolve_max_len(options.max_model_len, config)
        loader.check_ropes(config, max_len)
        model = loader.load_model(options.model, config, dtype)
        progress("weights", 1.0)

        reference = None
        if options.parity_check:  # the model's own word, before its weights are repacked
            reference = parity.reference_logits(model, config.get_text_config().vocab_size, max_len)
        probe = loader.probe_model(model, max_len)
        loader.set_attention(model, hooks.SERVE)
        info = loader.describe(model, options.model, dtype, max_len, len(probe.layers))

        progress("kernels", 0.0)
        backend = make_backend(options.attention, probe.layers[0].dtype)
        row_multiple = _prepare_weights(model, backend, probe, dtype)
        with torch.inference_mode(False):  # transports write into the pages from outside inference mode
            memory = KvMemory(_layout(options, probe))
        engine = cls(model, info, memory, backend, probe, row_multiple)
        progress("kernels", 1.0)

        if reference is not None:
            progress("parity check", 0.0)
            engine._check_parity_or_in_float32(reference, options)
            progress("parity check", 1.0)
        progress("ready", 1.0)
        return engine

    def step(self, step: Step) -> list[SampledToken]:
        """Run every chunk's tokens; return one token for each chunk that has `sample`, in the chunks' order.

        A row whose logits are not finite brings a token with an `error`; the others are not to blame.
        """
        if not step.chunks:
            return []
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

    def _forward(
        self, chunks: Sequence[Chunk], rows: list[int] | None, on_layer: Callable[[int], None] | None
    ) -> torch.Tensor:
        """Logits [rows, vocab] of the packed chunks; of every row when `rows` is None."""
        meta = build_meta(chunks, self.layout.page_size, self._row_multiple)
        state = hooks.Forward(meta=meta, memory=self.memory, backend=self.backend, probe=self._probe, on_layer=on_layer)
        keep = None if rows is None else torch.tensor(rows, dtype=torch.long)
        return loader.run_packed(self._model, meta.token_ids, meta.positions, keep, state)

    def _check_parity_or_in_float32(self, reference: parity.Reference, options: EngineOptions) -> None:
        """Rows that differ in bfloat16 may be ties that rounding decides (routed experts): float32 settles it."""
        name = self.info.architecture
        try:
            error = self._check_parity(reference)
        except parity.ParityMismatch as mismatch:
            if self.info.dtype == "float32" or mismatch.share_good < MIN_SHARE_FOR_FLOAT32:
                raise
            logger.info("%s; checked again in float32", mismatch)
            Engine._load(replace(options, dtype="float32", num_pages=1, kv_bytes=None), _silent)
            return
        logger.info("parity check of %s: largest relative error of logits %.2g", name, error)

    def _check_parity(self, reference: parity.Reference) -> float:
        """Run the check in a small memory of its own, filled with NaN: what nobody wrote must never be read."""
        page_size = self.layout.page_size
        layout = KvLayout(page_size, self.layout.dtype, self.layout.layers, parity.pages_needed(page_size))
        served, self.memory = self.memory, KvMemory(layout)
        for layer in range(layout.num_layers):
            self.memory.k(layer).fill_(float("nan"))
            self.memory.v(layer).fill_(float("nan"))
        try:
            return parity.check(self._model, reference, lambda chunks: self._forward(chunks, None, None), page_size)
        finally:
            self.memory.close()
            self.memory = served


def _prepare_weights(model: PreTrainedModel, backend: AttentionBackend, probe: hooks.Probe, dtype: torch.dtype) -> int:
    """Fuse and pack what can be; the multiple to which a step's rows are to be padded."""
    if not linear.can_pack(dtype):
        logger.warning("oneDNN has no %s products on this CPU: a token's last bits may depend on its batch", dtype)
        return 1
    if backend.name == "native":
        count = fuse.fuse(model, probe.layer_of)
        logger.info("%d modules of %s run fused", count, type(model).__name__)
    linear.pack_linears(model)
    return max(linear.MIN_ROWS, linear.row_multiple(model))


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


def _layout(options: EngineOptions, probe: hooks.Probe) -> KvLayout:
    """As many pages as were asked for, or as fit in kv_bytes."""
    dtype = str(probe.layers[0].dtype).removeprefix("torch.")
    layers = tuple(layer.kv for layer in probe.layers)
    if options.num_pages is not None:
        return KvLayout(options.page_size, dtype, layers, options.num_pages)
    kv_bytes = options.kv_bytes if options.kv_bytes is not None else DEFAULT_KV_BYTES
    page_bytes = KvLayout(options.page_size, dtype, layers, 1).page_bytes()
    if kv_bytes < page_bytes:
        raise ValueError(f"kv_bytes is {kv_bytes}, less than one page; give at least {page_bytes}")
    return KvLayout(options.page_size, dtype, layers, kv_bytes // page_bytes)
