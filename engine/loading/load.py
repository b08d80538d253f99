"""load() makes of a model's name all that an engine runs, checked and ready. What it returns is whole.

    config -> weights -> own eager logits -> probe of each layer's KV -> kernels -> parity check -> pages -> steps
              '------------------------------- Prepared -------------------------------------'

The pages come last: on a GPU they take what weights and a step's peak leave of the memory. What comes before is
the same in all processes that load by the same options: one may do it for those that are forked of it (ready_made.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from transformers import PreTrainedModel

from engine import device as devices
from engine.adapters.products import hook_linears, numbered
from engine.adapters.store import Adapters
from engine.adapters.weights import has_kernels
from engine.attention import hooks
from engine.loading import capacity, checks, parity, ready_made
from engine.loading.cpu import CpuPlatform, with_own_threads
from engine.loading.gpu import GpuPlatform
from engine.loading.platform import OWN_PAGES, Platform
from engine.loading.ready_made import Prepared
from engine.options import EngineOptions
from engine.paged_model import KvPages, PagedModel
from engine.pages import fp8
from engine.pages.fp8 import KvScale
from engine.pages.layout import KvLayout
from engine.parallel.leader import StartedTeam
from engine.pending import Steps
from engine.process import end_team
from engine.types import ModelInfo
from engine.weights import int8, linear, loader, panels, ropes
from engine.weights.config import DTYPES, ServedConfig, served_config

logger = logging.getLogger(__name__)

MIN_SHARE_FOR_FLOAT32 = 0.5  # of rows within tolerance: with fewer, the kernels are wrong, not the ties
Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    info: ModelInfo
    model: PagedModel
    pages: KvPages
    layout: KvLayout  # of the pages that requests may be given
    steps: Steps
    adapters: Adapters
    source: str  # a directory, or a name on the hub


def silent(stage: str, fraction: float) -> None:
    return


def load(
    options: EngineOptions,
    progress: Progress = silent,
    platform: Platform | None = None,
    *,
    page_bytes_beside: int = 0,
) -> LoadedModel:
    """`progress` is called with a stage ("weights", "kernels", "parity check", "ready") and a fraction 0 .. 1. The
    thread that loads need not be the one that computes: no threads of its own are left. `page_bytes_beside`: what
    another model needs for each page, of the same memory.

    Raises UnsupportedModel for a model that cannot be loaded or served, ValueError for an option out of range.
    """
    with _computing(options, platform) as where:
        if options.threads not in (None, torch.get_num_threads()):  # to say so makes a thread that stays
            torch.set_num_threads(options.threads)
        return _load(options, where, progress, page_bytes_beside)


@contextmanager
def _computing(options: EngineOptions, platform: Platform | None = None) -> Iterator[Platform]:
    options.validate()
    if platform is None:
        platform = platform_on(devices.resolve(options.device))
    try:
        with torch.inference_mode(), devices.current(platform.device):
            yield platform
    finally:
        end_team()


def prepare_for_forks(options: EngineOptions) -> None:
    """What each process that is forked of this one would do to load by these options, but for the pages: they share the
    weights, which nobody writes to. Of one process on a CPU, by as many threads as torch has here. Raises as `load`
    does; no thread of its own is left.
    Without native kernels nothing is kept: whoever loads later may be able to build them."""
    key = ready_made.key_of(options)
    with ready_made.kept_log() as log, _computing(options) as platform:
        prepared = _prepare(None, options, platform, silent)
    if prepared.model.backend.name == "native":
        ready_made.put(key, prepared, log)


def load_both(
    options: EngineOptions, progress: Progress = silent, platform: Platform | None = None
) -> tuple[LoadedModel, LoadedModel | None]:
    """Also the options' speculative_model, with as many pages as the other has: kv_bytes are of both."""
    if not options.speculative_model:
        return load(options, progress, platform), None
    alone = replace(
        options,
        model=options.speculative_model,
        tensor_parallel=1,
        expert_parallel=False,
        rank_cpus=(),
        max_model_len=None,
    )
    own, wanted = (served_config(each).config.get_text_config().vocab_size for each in (alone, options))
    if own != wanted:
        raise ValueError(
            f"speculative_model is {alone.model!r}, which has {own} tokens; {options.model!r} has {wanted}: "
            "give one with the same"
        )
    small = replace(alone, num_pages=1, kv_bytes=None, kv_dtype="auto", cuda_graphs=False)
    draft = load(small, silent, platform)
    loaded = load(options, progress, platform, page_bytes_beside=draft.layout.page_bytes())
    draft.pages.memory.close()
    layout, pages = _pages_of(draft.model, draft.layout, loaded.layout.num_pages, None)
    if platform is None:
        platform = platform_on(draft.model.device)
    with torch.inference_mode(), devices.current(platform.device):
        steps = platform.steps(draft.model, pages, alone, draft.info)
    return loaded, replace(draft, layout=layout, pages=pages, steps=steps)


def platform_on(device: torch.device) -> Platform:
    return GpuPlatform(device) if device.type == "cuda" else CpuPlatform()


def _load(options: EngineOptions, platform: Platform, progress: Progress, page_bytes_beside: int = 0) -> LoadedModel:
    if options.num_processes == 1:
        return _load_beside(None, options, platform, progress, page_bytes_beside)
    team = StartedTeam.of(options, platform.device)
    try:
        return _load_beside(team, team.options, platform, progress, page_bytes_beside)
    except BaseException:
        team.close()
        raise


def _load_beside(
    team: StartedTeam | None,
    options: EngineOptions,
    platform: Platform,
    progress: Progress,
    page_bytes_beside: int,
) -> LoadedModel:
    ready = ready_made.take(options) if team is None else None
    if ready is None:
        ready = _prepare(team, options, platform, progress)
    else:
        ready = replace(ready, model=with_own_threads(ready.model))
    model, reference = ready.model, ready.reference
    info, scales = _with_scales(model, ready.info, reference, options)
    progress("parity check", 1.0)
    layout, pages = _allocate(model, info, scales, options, platform, page_bytes_beside)
    make_steps = partial(platform.steps, model, pages, options, info)
    steps = make_steps() if model.ranks is None else model.ranks.make_steps(info, make_steps)
    adapters = Adapters(
        ready.adaptable,
        device=platform.device,
        row_multiple=model.row_multiple,
        is_native=has_kernels(platform.device, DTYPES[info.dtype]),
        most=options.max_adapters,
        why_none=_why_no_adapters(options),
    )
    progress("ready", 1.0)
    return LoadedModel(
        info=info, model=model, pages=pages, layout=layout, steps=steps, adapters=adapters, source=options.model
    )


def _prepare(team: StartedTeam | None, options: EngineOptions, platform: Platform, progress: Progress) -> Prepared:
    progress("weights", 0.0)
    served = served_config(options)
    loads_on = platform.device if team is None else torch.device("cpu")  # where it is mapped, and cut
    module = loader.load_model(options.model, served.config, served.dtype, loads_on)
    ropes.adopt(module, served.rope)
    progress("weights", 1.0)

    reference = None
    if options.parity_check:  # the model's own word, before its weights are repacked
        reference = parity.reference_logits(module, served.config.get_text_config().vocab_size, served.max_len)
    if options.quantization == "int8":
        reference = _in_int8(module, reference, served, platform)
    with numbered(module, loader.PROBE_TOKENS) as adaptable:
        probe = loader.probe_model(module, served.max_len)
    if probe.has_states:
        _check_with_states(type(module).__name__, options)
    loader.set_attention(module, hooks.SERVE)
    info = loader.describe(
        module,
        options.model,
        served.dtype,
        served.max_len,
        len(probe.layers),
        served.rope,
        has_usual_sampling=options.generation_config == "auto",
    )

    progress("kernels", 0.0)
    cut = team.cut(module, probe) if team is not None else None
    model = platform.prepare(module, probe if cut is None else cut.probe, options, served)
    hook_linears(module)
    if team is not None and cut is not None:
        joined = team.join(cut, len(probe.layers))
        model = replace(model, probe=probe, ranks=joined, passing=joined.passing, mirror=joined.mirror)
    progress("kernels", 1.0)

    if reference is not None:
        progress("parity check", 0.0)
        _check_parity_or_in_float32(model, info, reference, options, platform)
    return Prepared(info=info, model=model, reference=reference, adaptable=adaptable)


def _why_no_adapters(options: EngineOptions) -> str:
    for key in ("tensor_parallel", "pipeline_parallel"):
        if (degree := getattr(options, key)) > 1:
            return f"its workers have {key} {degree}; give 1"
    return ""


def _check_with_states(name: str, options: EngineOptions) -> None:
    """Raise ValueError for an option that layers with a state beside KV cannot have."""
    for key, served, why in (
        ("tensor_parallel", (1,), "is not cut"),
        ("pipeline_parallel", (1,), "is not cut"),
        ("kv_dtype", ("auto", "int8"), "has no scales"),
        ("speculative_model", ("",), "cannot be taken back to before a guess"),
    ):
        if (value := getattr(options, key)) not in served:
            raise ValueError(f"{key} is {value!r}, but {name} keeps a state beside KV, which {why}; leave it out")


def _in_int8(
    module: PreTrainedModel, reference: parity.Reference | None, served: ServedConfig, platform: Platform
) -> parity.Reference | None:
    """The module says from now on what its weights in int8 say; and the reference, which is held against those, too."""
    if platform.device.type != "cpu" or not panels.can_multiply(linear.VECTOR, served.dtype):
        raise ValueError(
            f"quantization is 'int8', which is for bfloat16 on CPUs with a C++ compiler, not {served.dtype} on "
            f"{platform.device}; leave it out"
        )
    count = int8.quantise(module)
    if reference is None:
        logger.info("weights of %d linear layers are in int8", count)
        return None
    again = parity.reference_logits(module, served.config.get_text_config().vocab_size, served.max_len)
    error, same = parity.difference(again, reference)
    logger.info(
        "weights of %d linear layers are in int8: logits differ from those in %s by %.1f%% (median), "
        "the likeliest token is the same at %.0f%% of positions",
        *(count, str(served.dtype).removeprefix("torch."), 100 * error, 100 * same),
    )
    return again


def _check_parity_or_in_float32(
    model: PagedModel, info: ModelInfo, reference: parity.Reference, options: EngineOptions, platform: Platform
) -> None:
    """Rows that differ in bfloat16 may be ties that rounding decides (routed experts): float32 settles it."""
    try:
        error = checks.check_parity(model, reference, model.probe.kv_dtype)
    except parity.ParityMismatch as mismatch:
        if info.dtype == "float32" or mismatch.share_good < MIN_SHARE_FOR_FLOAT32:
            raise
        logger.info("%s; checked again in float32", mismatch)
        attention = "auto" if options.attention == "flashinfer" else options.attention
        exact = replace(
            options,
            dtype="float32",
            quantization="none",
            num_pages=1,
            kv_bytes=None,
            kv_dtype="auto",
            cuda_graphs=False,
        )
        again = _load(replace(exact, attention=attention), platform, silent)
        if again.model.ranks is not None:
            again.model.ranks.close()
        return
    logger.info("parity check of %s: largest relative error of logits %.2g", info.architecture, error)


def _with_scales(
    model: PagedModel, info: ModelInfo, reference: parity.Reference | None, options: EngineOptions
) -> tuple[ModelInfo, tuple[KvScale, ...] | None]:
    """The scales of pages in fp8, which the fingerprint holds, too. Raises UnsupportedModel when narrow pages cost too
    much."""
    if options.kv_dtype == "auto":
        return info, None
    scales = checks.fp8_scales(model, info) if options.kv_dtype == "fp8_e4m3" else None
    if reference is not None:
        dtype = capacity.page_dtype(options, model.probe)
        checks.check_narrow(model, reference, options.kv_dtype, dtype, scales)
    return info if scales is None else replace(info, fingerprint=fp8.with_scales(info.fingerprint, scales)), scales


def _allocate(
    model: PagedModel,
    info: ModelInfo,
    scales: tuple[KvScale, ...] | None,
    options: EngineOptions,
    platform: Platform,
    page_bytes_beside: int,
) -> tuple[KvLayout, KvPages]:
    """The pages, those that are the engine's own behind them; and the layout of the requests' pages."""
    peak_bytes = platform.peak_bytes(model, options, info, scales)
    one_page = model.layout(capacity.page_dtype(options, model.probe), 1)
    page_bytes = model.page_bytes(one_page) + page_bytes_beside
    count = capacity.num_pages(
        options, page_bytes, lambda: _default_kv_bytes(model, one_page, options, platform, peak_bytes, page_bytes)
    )
    return _pages_of(model, one_page, count, scales)


def _default_kv_bytes(
    model: PagedModel, one_page: KvLayout, options: EngineOptions, platform: Platform, peak_bytes: int, page_bytes: int
) -> int:
    """Of all processes together: on GPUs each has its own memory, and the page numbers are the same everywhere."""
    if model.ranks is None or not model.is_on_gpu:
        return platform.default_kv_bytes(options, peak_bytes, page_bytes)
    own = page_bytes - model.page_bytes(one_page) + model.ranks.shares[0].of(one_page).page_bytes()
    here = platform.default_kv_bytes(options, peak_bytes, own) // own
    return min(here, model.ranks.least_pages(one_page, peak_bytes)) * page_bytes


def _pages_of(
    model: PagedModel, layout: KvLayout, count: int, scales: tuple[KvScale, ...] | None
) -> tuple[KvLayout, KvPages]:
    with torch.inference_mode(False):  # transports write into the pages from outside inference mode
        memory = model.allocate(replace(layout, num_pages=count + OWN_PAGES))
    return replace(layout, num_pages=count), KvPages(memory, scales)
