"""The memory that a draw takes is counted at load: no draw of as many rows takes more than the one that is measured."""

from __future__ import annotations

import random
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.loading import gpu
from engine.loading.capacity import graph_bytes
from engine.loading.gpu import GpuPlatform
from engine.options import EngineOptions
from engine.paged_model import KvPages, PagedModel
from engine.sampling import device
from engine.sampling.device import Drawn, draw, largest_draw
from engine.sampling.plan import SamplingPlan
from engine.types import Chunk
from tests.engine.rehearsal import rehearse
from tests.engine.sampling.test_device import WAYS, logits_of, spec
from tests.engine.test_engine import save

ROWS = 48


class Meter(TorchDispatchMode):
    """The most bytes of tensors that live at a time, of those that operators made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tensors: Counter[int] = Counter()  # by the address of what they show
        self.bytes: int = 0
        self.peak_bytes: int = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor)
        return out

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        address, nbytes = storage.data_ptr(), storage.nbytes()
        if not self._tensors[address]:
            self.bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.bytes)
        self._tensors[address] += 1
        weakref.finalize(tensor, self._gone, address, nbytes)

    def _gone(self, address: int, nbytes: int) -> None:
        self._tensors[address] -= 1
        if not self._tensors[address]:
            self.bytes -= nbytes


def peak_of(plan: SamplingPlan) -> int:
    placed = {name: torch.from_numpy(array) for name, array in plan.arrays.items()}
    logits, meter = logits_of(ROWS, dtype=torch.bfloat16), Meter()
    with torch.inference_mode(), meter:
        draw(logits, plan, placed)
    return meter.peak_bytes


def test_no_draw_takes_more_memory_than_the_one_that_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "keep_largest", lambda *_: None)  # on a GPU it works in place
    most = peak_of(largest_draw(ROWS))
    names = [str(row) for row in range(ROWS)]
    for way in WAYS.values():
        assert peak_of(SamplingPlan.of(names, [spec(row, **way) for row in range(ROWS)])) <= most  # type: ignore[arg-type]
    for seed in range(5):
        rng = random.Random(seed)
        mixed = [spec(row, **rng.choice(list(WAYS.values()))) for row in range(ROWS)]  # type: ignore[arg-type]
        assert peak_of(SamplingPlan.of(names, mixed)) <= most


@pytest.mark.parametrize(("most", "lengths"), [(0, [128]), (100, [128]), (300, [128, 128, 44])])
def test_the_step_that_is_measured_is_the_largest_that_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, lengths: list[int]
) -> None:
    engine = rehearse(save(tmp_path, "LlamaConfig"), max_model_len=128)
    platform = GpuPlatform(torch.device("cpu"))
    steps: list[Sequence[Chunk]] = []

    def forward(_: PagedModel, pages: KvPages, chunks: Sequence[Chunk], rows: list[int]) -> torch.Tensor:
        steps.append(chunks)
        assert max(max(chunk.block_table) for chunk in chunks) < pages.memory.layout.num_pages
        return torch.zeros(1, engine.info.vocab_size)

    monkeypatch.setattr(PagedModel, "forward", forward)
    monkeypatch.setattr(platform, "_measured", lambda run: (run(), 0))
    platform.peak_bytes(engine.model, EngineOptions(model="", max_step_tokens=most), engine.info, None)
    (chunks,) = steps
    assert [len(chunk.token_ids) for chunk in chunks] == lengths
    used = [page for chunk in chunks for page in chunk.block_table]
    assert len(set(used)) == len(used) == sum(-(-length // engine.model.page_size) for length in lengths)


def test_a_step_that_does_not_fit_is_told_by_its_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, platform = rehearse(save(tmp_path, "LlamaConfig"), max_model_len=128), GpuPlatform(torch.device("cpu"))

    def measured(_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory\nat length")

    monkeypatch.setattr(platform, "_measured", measured)
    with pytest.raises(ValueError, match=r"^a step of 300 tokens does not fit on the GPU; give a smaller max_batch_"):
        platform.peak_bytes(engine.model, EngineOptions(model="", max_step_tokens=300), engine.info, None)


@pytest.mark.parametrize(("forward", "drawing"), [(300, 200), (200, 300)])
def test_the_budget_holds_the_larger_of_a_step_and_of_its_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forward: int, drawing: int
) -> None:
    engine = rehearse(save(tmp_path, "LlamaConfig"), cuda_graphs=False)
    peaks = iter((1000 + forward, 1000 + drawing))
    for name, answer in {
        "reset_peak_memory_stats": lambda _: None,
        "memory_allocated": lambda _: 1000,
        "max_memory_allocated": lambda _: next(peaks),
        "synchronize": lambda _: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    drawn: list[torch.Size] = []

    def spy(logits: torch.Tensor, plan: SamplingPlan, placed: Mapping[str, torch.Tensor]) -> Drawn:
        drawn.append(logits.shape)
        return draw(logits, plan, placed)

    monkeypatch.setattr(gpu, "draw", spy)
    platform, graphs = GpuPlatform(torch.device("cpu")), 0
    options = EngineOptions(model="", max_graph_batch=7, cuda_graphs=bool(forward > drawing))
    if options.cuda_graphs:
        graphs = graph_bytes((1, 2, 4, 7), engine.info.vocab_size * engine.model.probe.kv_dtype.itemsize, 1)
    with torch.inference_mode():
        assert platform.peak_bytes(engine.model, options, engine.info, None) == 300 + graphs
    assert drawn == [(7, engine.info.vocab_size)]
