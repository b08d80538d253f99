"""Steps of an engine whose GPU computes nothing: no operator mixes devices, and no step waits while it is begun."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.attention import hooks
from engine.attention.flashinfer.backend import FlashInferBackend
from engine.attention.flashinfer.wrappers import FlashInfer
from engine.attention.probe import Probe
from engine.attention.torch_backend import TorchBackend
from engine.device import Capture
from engine.engine import Engine
from engine.gpu.together import Together
from engine.loading import load as loading
from engine.loading.gpu import GpuPlatform
from engine.options import EngineOptions
from engine.paged_model import PagedModel
from engine.parallel import sharding
from engine.parallel.meetings import connect, nobody
from engine.parallel.shard import Shard
from engine.types import PENDING, Adapter, Chunk, SampleSpec, SamplingParams, Step
from engine.weights import experts
from engine.weights.config import ServedConfig
from engine.weights.loader import set_attention
from tests.adapters import adapter_at, make_adapter
from tests.engine.attention import fake_flashinfer
from tests.engine.gpu.fake_cuda import GPU, FakeGpu, Waits, fake_gpu, is_on_gpu, move
from tests.engine.rehearsal import RehearsedGpu, rehearse, run_again
from tests.engine.sampling.test_device import WAYS, spec
from tests.zoo import make_tiny_model

ROWS = 3
OPTIONS: dict[str, Any] = {"num_pages": 64, "dtype": "float32", "device": "cpu", "max_graph_batch": 4}


def library(gpu: FakeGpu) -> Any:
    """FlashInfer's names: it plans by tables in pinned memory, and runs over what stands on the GPU."""

    def need(is_good: bool, what: str) -> None:
        if not is_good:
            raise Waits(what)

    def on_gpu(*given: Any) -> None:
        need(all(is_on_gpu(x) for x in given if isinstance(x, torch.Tensor)), "a kernel's argument on the host")

    class Wrapper:
        def __init__(self, use_cuda_graph: bool = False, **_: object) -> None:
            self._plans_at_load = use_cuda_graph

        def plan(self, **given: Any) -> None:
            if self._plans_at_load:
                return
            tables = [x for key, x in given.items() if isinstance(x, torch.Tensor) and not key.endswith("indices")]
            need(all(not is_on_gpu(x) and gpu.is_pinned(x) for x in tables), "tables that a plan waits for")

        def run(self, q: Any, pages: Any, *, out: Any, return_lse: bool = False, **_: object) -> Any:
            on_gpu(q, *pages, out)
            return (out.zero_(), q.new_zeros(q.shape[:2], dtype=torch.float32)) if return_lse else out.zero_()

    def fast_decode_plan(wrapper: Wrapper, **given: Any) -> None:
        need(not is_on_gpu(given["global_override_indptr_cpu"]), "a plan that reads the GPU")

    def xqa(**given: Any) -> None:
        on_gpu(*given.values(), *given["kv_cache"])
        given["out"].zero_()

    return SimpleNamespace(
        **{name: value for name, value in vars(fake_flashinfer).items() if not name.startswith("_")}
        | {
            "BatchPrefillWithPagedKVCacheWrapper": Wrapper,
            "BatchDecodeWithPagedKVCacheWrapper": Wrapper,
            "append_paged_kv_cache": lambda **given: on_gpu(*given.values(), *given["paged_kv_cache"]),
            "decode": SimpleNamespace(fast_decode_plan=fast_decode_plan, xqa_batch_decode_with_kv_cache=xqa),
        }
    )


class Captured(GpuPlatform):
    def capture_steps(self, together: Together) -> Capture:
        return run_again


def on_fake_gpu(engine: Engine, gpu: FakeGpu, options: EngineOptions, *, decode: str) -> Engine:
    """`decode`: FlashInfer's kernel, or torch for the reference."""
    move(engine.model, gpu.moved)
    move(engine.pages, gpu.moved)
    kernels = engine.backend.kernels if isinstance(engine.backend, FlashInferBackend) else {}
    backend: Any = TorchBackend()
    if decode != "torch":
        backend = FlashInferBackend(FlashInfer(library(gpu), GPU, torch.empty(1, device=GPU)), kernels)
    object.__setattr__(engine.model, "backend", backend)
    engine.backend, engine.device = backend, GPU
    engine.steps = Captured(GPU).steps(engine.model, engine.pages, options, engine.info)
    return engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu")


@pytest.fixture(scope="module")
def adapter(folder: Path) -> Adapter:
    return adapter_at(make_adapter(make_tiny_model("llama", folder / "base"), "everywhere", folder / "adapter"))


@pytest.fixture(scope="module", params=["tensor", "xqa", "torch"])
def engine(request: pytest.FixtureRequest, folder: Path, adapter: Adapter) -> Iterator[Engine]:
    model = str(make_tiny_model("llama", folder / request.param))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "has_kernels", lambda *_: False)  # those of a CPU
        loaded = rehearse(model, decode="tensor" if request.param == "torch" else request.param, **OPTIONS)
    weights = loaded.adapters.load(adapter)
    with fake_gpu(folder) as gpu:
        move(weights, gpu.moved)
        yield on_fake_gpu(loaded, gpu, EngineOptions(model=model, **OPTIONS), decode=request.param)


def chunk(row: int, start: int, ids: list[int], own: SampleSpec | None = None, **more: Any) -> Chunk:
    own = own or SampleSpec(params=SamplingParams(temperature=0.0), position=start + len(ids))
    return Chunk(
        request_id=str(row), token_ids=ids, start=start, block_table=(2 * row, 2 * row + 1), sample=own, **more
    )


def begin(engine: Engine, *chunks: Chunk, **more: Any) -> None:
    engine.begin(Step(chunks=list(chunks), **more))


def test_prompts_and_the_steps_behind_them(engine: Engine) -> None:
    steps: Any = engine.steps
    assert (steps.graphs is None) == (engine.backend.name == "torch")
    begin(engine, *(chunk(row, 0, [5, 6, 7]) for row in range(ROWS)))
    begin(engine, *(chunk(row, 3, [PENDING]) for row in range(ROWS)))
    begin(engine, *(chunk(row, 4, [PENDING]) for row in range(ROWS)))
    begin(engine, chunk(0, 5, [PENDING]), chunk(4, 0, [9, 9], None))
    begin(engine, *(chunk(row, 7, [3]) for row in range(6)))  # more than the largest graph holds


def test_draws_of_every_way(engine: Engine) -> None:
    ways: list[dict[str, Any]] = [dict(way) for way in WAYS.values()]  # type: ignore[call-overload]
    specs = [
        spec(row, **{key: _within(value) for key, value in way.items()})
        for row, way in enumerate(ways)
        if "form" not in way  # is of another vocabulary
    ]
    begin(engine, *(chunk(row, 4, [5, 6], own) for row, own in enumerate(specs)))
    for first in range(0, len(specs), ROWS):  # in graphs, where there are some
        some = enumerate(specs[first : first + ROWS])
        begin(engine, *(chunk(row, 4, [5], own) for row, own in some), chunk(9, 4, [5]))


def _within(value: Any) -> Any:
    """Token ids of the small model's vocabulary."""
    if isinstance(value, tuple) and value and isinstance(value[0], int):
        return tuple(sorted({token % 90 for token in value}))
    return tuple((token % 90, bias) for token, bias in value[:30]) if isinstance(value, tuple) and value else value


def test_a_beam_search_with_copies_of_its_pages(engine: Engine) -> None:
    searched = [chunk(row, 5, [7], spec(row, num_candidates=8)) for row in range(ROWS)]
    begin(engine, *searched, copies=[(0, 8), (2, 9)])
    begin(engine, *searched, chunk(3, 3, [7]))


def test_scores_of_a_prompt(engine: Engine) -> None:
    scored = [spec(0, given_id=token, logprobs=2) for token in (6, 7)]
    begin(engine, chunk(0, 0, [5, 6, 7], None, scores=scored), chunk(1, 4, [9]))


def test_an_adapter_beside_none(engine: Engine, adapter: Adapter) -> None:
    begin(engine, chunk(0, 4, [7], None, adapter=adapter), chunk(1, 4, [8]))
    begin(engine, chunk(0, 5, [7, 8], None, adapter=adapter))


def test_experts_as_transformers_chooses_on_a_gpu(folder: Path) -> None:
    options = OPTIONS | {"dtype": "bfloat16"}
    model = str(make_tiny_model("mixtral", folder / "mixtral"))
    loaded = rehearse(model, **options)
    loaded.model.module.set_experts_implementation(loaded.model.module.get_correct_experts_implementation(None))
    with fake_gpu(folder) as gpu:
        engine = on_fake_gpu(loaded, gpu, EngineOptions(model=model, **options), decode="tensor")
        steps: Any = engine.steps
        assert steps.graphs.sizes == (1, 2, 4)
        begin(engine, *(chunk(row, 0, [5, 6, 7]) for row in range(ROWS)))
        begin(engine, *(chunk(row, 3, [PENDING]) for row in range(ROWS)))


class Unmet:
    """Collectives of a rank that nobody else answers, of two."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x], dim=-1)


class OneOfTwo(RehearsedGpu):
    """Prepares the part of a rank, as its process does."""

    def __init__(self, has_whole_experts: bool) -> None:
        super().__init__("tensor", True, fake_flashinfer)
        self._shard = Shard(1, 2, has_whole_experts)

    def prepare(self, module: Any, probe: Probe, options: EngineOptions, served: ServedConfig) -> PagedModel:
        cuts = sharding.shard_model(module, self._shard, probe)
        part = sharding.check_shapes(module, probe, range(len(probe.layers)), self._shard)
        set_attention(module, hooks.SERVE)
        experts.choose_form(module, GPU)
        model = super().prepare(module, part, options, served)
        connect(cuts, Unmet(), nobody)
        return model


@pytest.mark.parametrize("has_whole_experts", [False, True])
def test_experts_of_a_rank_that_were_cut_on_the_host(folder: Path, has_whole_experts: bool) -> None:
    model = str(make_tiny_model("qwen3_moe", folder / f"ranks-{has_whole_experts}"))
    options = EngineOptions(model=model, parity_check=False, **OPTIONS | {"dtype": "bfloat16"})
    loaded = Engine.load(options, platform=OneOfTwo(has_whole_experts))
    with fake_gpu(folder) as gpu:
        engine = on_fake_gpu(loaded, gpu, options, decode="tensor")
        steps: Any = engine.steps
        assert steps.graphs.sizes == (1, 2, 4)
        begin(engine, *(chunk(row, 0, [5, 6, 7]) for row in range(ROWS)))
        begin(engine, *(chunk(row, 3, [PENDING]) for row in range(ROWS)))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (lambda x: x.sum().item(), "_local_scalar_dense"),
        (lambda x: x.cpu(), "not queued"),
        (lambda x: torch.tensor([1, 2], device=x.device), "not queued"),
        (lambda x: x + torch.ones(2), "on the host and on the GPU"),
        (lambda x: x[torch.tensor([0, 1])], "on the host and on the GPU"),
        (lambda x: x[x > 0], "nonzero"),
    ],
)
def test_what_waits_is_noticed(folder: Path, wrong: Any, why: str) -> None:
    with fake_gpu(folder), pytest.raises(Exception, match=why):
        wrong(torch.empty(2, device=GPU))
