"""Every attention backend keeps the same contract; what it must give is computed densely, one sequence at a time."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from engine.attention.base import AttentionBackend, AttentionCall, StepMeta, build_meta
from engine.attention.cpu_backend import NativeBackend
from engine.attention.registry import make_backend
from engine.attention.torch_backend import TorchBackend
from engine.types import Chunk

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
NUM_PAGES = 96


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    page_size: int = 16
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False


CASES = {
    "one head for each query head": Case(4, 4, 64, 64),
    "grouped queries": Case(8, 2, 64, 64),
    "one KV head": Case(6, 1, 48, 48),
    "window": Case(4, 2, 32, 32, window=12),
    "window over many blocks": Case(4, 2, 32, 32, page_size=32, window=100),
    "softcap": Case(4, 2, 32, 32, softcap=20.0),
    "sinks": Case(4, 2, 32, 32, sinks=True),
    "sinks and window": Case(4, 2, 32, 32, window=20, sinks=True),
    "keys wider than values": Case(4, 4, 24, 16),
    "values wider than keys": Case(4, 4, 16, 40),
    "odd widths, odd pages": Case(6, 2, 7, 9, page_size=5),
    "wide heads": Case(2, 1, 256, 256),
}


@pytest.fixture(params=["torch", "native"])
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    return TorchBackend() if request.param == "torch" else NativeBackend()


@dataclass
class Batch:
    """Sequences in pages taken in random order; whatever is not theirs is NaN."""

    case: Case
    dtype: torch.dtype
    backend: AttentionBackend
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        case, generator = self.case, torch.Generator().manual_seed(0)
        size = case.page_size
        free = torch.randperm(NUM_PAGES, generator=generator).tolist()
        self.tables = [[free.pop() for _ in range(-(-length // size))] for length in self.lengths]
        self.k_pages = torch.full((NUM_PAGES, size, case.kv_heads, case.k_dim), float("nan"), dtype=self.dtype)
        self.v_pages = torch.full((NUM_PAGES, size, case.kv_heads, case.v_dim), float("nan"), dtype=self.dtype)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(self.dtype)

        self.q = [random(n, case.heads, case.k_dim) for n in self.lengths]
        self.k = [random(n, case.kv_heads, case.k_dim) for n in self.lengths]
        self.v = [random(n, case.kv_heads, case.v_dim) for n in self.lengths]
        sinks = torch.randn(case.heads, generator=generator) if case.sinks else None
        self.call = AttentionCall(scaling=0.3, window=case.window, softcap=case.softcap, sinks=sinks)

    def run(self, spans: dict[int, range], row_multiple: int = 1) -> dict[int, torch.Tensor]:
        """One step over these positions of these sequences."""
        meta = self.meta(spans, row_multiple)
        rows = [self._rows(part, spans, meta) for part in (self.q, self.k, self.v)]
        self.backend.write(rows[1], rows[2], self.k_pages, self.v_pages, meta)
        out = self.backend.attend(rows[0], self.k_pages, self.v_pages, meta, self.call)
        assert out.shape == (meta.num_rows, self.case.heads, self.case.v_dim)
        assert out.dtype == self.dtype
        used = sum(len(span) for span in spans.values())
        assert torch.equal(out[used:], torch.zeros_like(out[used:])), "padding rows are not zero"
        return dict(zip(spans, out[:used].split([len(s) for s in spans.values()]), strict=True))

    def meta(self, spans: dict[int, range], row_multiple: int = 1) -> StepMeta:
        chunks = [
            Chunk(
                request_id=str(i),
                token_ids=[0] * len(span),
                start=span.start,
                block_table=self.tables[i][: -(-span.stop // self.case.page_size)],
            )
            for i, span in spans.items()
        ]
        return build_meta(chunks, self.case.page_size, row_multiple)

    def _rows(self, parts: list[torch.Tensor], spans: dict[int, range], meta: StepMeta) -> torch.Tensor:
        rows = torch.cat([parts[i][span.start : span.stop] for i, span in spans.items()])
        filler = rows.new_full((meta.num_rows - rows.shape[0], *rows.shape[1:]), float("nan"))
        # as transformers hands them over: a transposed view of heads-first memory
        return torch.cat([rows, filler]).transpose(0, 1).contiguous().transpose(0, 1)

    def dense(self, i: int) -> torch.Tensor:
        """What attention over sequence i is, in float64, with every score in sight."""
        case, length = self.case, self.lengths[i]
        repeat = case.heads // case.kv_heads
        k = self.k[i].double().repeat_interleave(repeat, dim=1)
        v = self.v[i].double().repeat_interleave(repeat, dim=1)
        scores = torch.einsum("qhd,khd->hqk", self.q[i].double(), k) * self.call.scaling
        if case.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        position = torch.arange(length)
        hidden = position[None, :] > position[:, None]
        if case.window:
            hidden |= position[None, :] <= position[:, None] - case.window
        scores = scores.masked_fill(hidden, float("-inf"))
        if self.call.sinks is not None:
            scores = torch.cat([scores, self.call.sinks.double().view(-1, 1, 1).expand(-1, length, 1)], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., :length]
        return torch.einsum("hqk,khe->qhe", weights, v)


def assert_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    error = (got.double() - wanted).abs().max() / wanted.abs().max()
    assert error < TOLERANCE[got.dtype], f"relative error {error:.2g}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_prefill_equals_dense_attention(backend: AttentionBackend, case: Case, dtype: torch.dtype) -> None:
    batch = Batch(case, dtype, backend, (1, 17, 64, 65, 150))
    out = batch.run({i: range(n) for i, n in enumerate(batch.lengths)}, row_multiple=8)
    for i, rows in out.items():
        assert_close(rows, batch.dense(i))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_chunks_and_single_tokens_equal_dense_attention(
    backend: AttentionBackend, case: Case, dtype: torch.dtype
) -> None:
    batch = Batch(case, dtype, backend, (20, 90))
    steps = (
        {0: range(7), 1: range(70)},
        {1: range(70, 71), 0: range(7, 19)},
        {0: range(19, 20), 1: range(71, 90)},
    )
    rows: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    for spans in steps:
        for i, out in batch.run(spans).items():
            rows[i].append(out)
    for i, parts in rows.items():
        assert_close(torch.cat(parts), batch.dense(i))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["grouped queries", "sinks and window", "odd widths, odd pages", "softcap"])
def test_native_rows_are_the_same_bits_in_any_batch_chunk_and_thread(
    name: str, dtype: torch.dtype, threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        batch = Batch(CASES[name], dtype, NativeBackend(), (300, 5, 130))
        together = batch.run({i: range(n) for i, n in enumerate(batch.lengths)})
        alone = batch.run({0: range(300)})[0]
        assert torch.equal(together[0], alone)
        for size in (1, 37):
            spans = [range(at, min(at + size, 130)) for at in range(0, 130, size)]
            assert torch.equal(together[2], torch.cat([batch.run({2: span})[2] for span in spans]))
    finally:
        torch.set_num_threads(before)


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="attention is 'flash'; give one of auto, torch, native"):
        make_backend("flash", torch.float32)


def test_without_a_compiler_auto_falls_back_and_native_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    from engine import native

    monkeypatch.setenv("CXX", f"{tmp_path}/no-such-compiler")
    native.library.cache_clear()
    try:
        assert make_backend("auto", torch.float32).name == "torch"
        with pytest.raises(native.NativeUnavailable, match="no-such-compiler"):
            make_backend("native", torch.float32)
    finally:
        native.library.cache_clear()
