"""What every attention backend must give, computed densely, one sequence at a time: cases, batches and the check.

The same batches run on the CPU (tests/engine) and on GPUs (tests/gpu).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.attention.base import AttentionBackend, AttentionCall, StepMeta, build_meta
from engine.gpu.staging import on_device
from engine.pages import fp8 as kv_fp8
from engine.pages import int8_rows
from engine.pages.fp8 import KvScale
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
    slopes: bool = False
    chunk: int = 0


CASES = {
    "one head for each query head": Case(4, 4, 64, 64),
    "grouped queries": Case(8, 2, 64, 64),
    "one KV head": Case(6, 1, 48, 48),
    "window": Case(4, 2, 32, 32, window=12),
    "window over many blocks": Case(4, 2, 32, 32, page_size=32, window=100),
    "chunks": Case(4, 2, 32, 32, chunk=12),
    "chunks of many blocks": Case(4, 2, 32, 32, page_size=32, chunk=50),
    "softcap": Case(4, 2, 32, 32, softcap=20.0),
    "sinks": Case(4, 2, 32, 32, sinks=True),
    "sinks and window": Case(4, 2, 32, 32, window=20, sinks=True),
    "slopes": Case(4, 4, 32, 32, slopes=True),
    "slopes, window and groups": Case(6, 2, 32, 32, window=70, slopes=True),
    "keys wider than values": Case(4, 4, 24, 16),
    "values wider than keys": Case(4, 4, 16, 40),
    "odd widths, odd pages": Case(6, 2, 7, 9, page_size=5),
    "wide heads": Case(2, 1, 256, 256),
}


# FlashInfer's kernels have these head dims only, and half precision.
FLASHINFER_CASES = {  # few widths: each kind of kernel and width is compiled by itself
    "one head for each query head": Case(4, 4, 64, 64),
    "grouped queries": Case(8, 2, 128, 128),
    "groups of three": Case(6, 2, 128, 128),
    "groups of seven": Case(14, 2, 128, 128),
    "wide heads": Case(4, 2, 256, 256),
    "pages of 32": Case(8, 2, 128, 128, page_size=32),
    "pages of 5": Case(8, 2, 128, 128, page_size=5),
    "window": Case(8, 2, 128, 128, window=12),
    "window over many pages": Case(8, 2, 128, 128, window=100),
    "softcap": Case(8, 2, 128, 128, softcap=20.0),
    "softcap and window": Case(8, 2, 128, 128, window=33, softcap=30.0),
    "sinks": Case(8, 2, 128, 128, sinks=True),
    "sinks and window": Case(8, 2, 128, 128, window=20, sinks=True),
}
FP8_CASES = ("grouped queries", "pages of 5", "window", "sinks and window")
PREFILL_LENGTHS = (1, 17, 64, 65, 150)
CHUNKED_LENGTHS = (20, 90)
STEPS = (
    {0: range(7), 1: range(70)},
    {1: range(70, 71), 0: range(7, 19)},
    {0: range(19, 20), 1: range(71, 72)},  # one row each: decode
    {1: range(72, 90)},
)


@dataclass
class Batch:
    """Sequences in pages taken in random order; whatever is not theirs is NaN."""

    case: Case
    dtype: torch.dtype
    backend: AttentionBackend
    lengths: tuple[int, ...]
    device: str = "cpu"
    kv_dtype: torch.dtype | None = None  # of the pages, where it is another than the queries'

    def __post_init__(self) -> None:
        case, generator = self.case, torch.Generator().manual_seed(0)
        size = case.page_size
        free = torch.randperm(NUM_PAGES, generator=generator).tolist()
        self.tables = [[free.pop() for _ in range(-(-length // size))] for length in self.lengths]
        page_dtype = self.kv_dtype or self.dtype
        self.scale = KvScale(2.0**-6, 2.0**-7) if page_dtype == kv_fp8.DTYPE else KvScale()
        poison = torch.full((NUM_PAGES, size, case.kv_heads, 1), float("nan"), device=self.device)
        if page_dtype == int8_rows.DTYPE:
            poison = torch.full_like(poison, -1.0)  # and a scale that is NaN
        beside = int8_rows.SCALE_BYTES if page_dtype == int8_rows.DTYPE else 0
        self.k_pages = poison.expand(-1, -1, -1, case.k_dim + beside).to(page_dtype).contiguous()
        self.v_pages = poison.expand(-1, -1, -1, case.v_dim + beside).to(page_dtype).contiguous()

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(self.device, self.dtype)

        self.q = [random(n, case.heads, case.k_dim) for n in self.lengths]
        self.k = [random(n, case.kv_heads, case.k_dim) for n in self.lengths]
        self.v = [random(n, case.kv_heads, case.v_dim) for n in self.lengths]
        sinks = torch.randn(case.heads, generator=generator).to(self.device) if case.sinks else None
        scale, slopes = self.scale, 2.0 ** -torch.arange(1.0, case.heads + 1, device=self.device)
        self.call = AttentionCall(
            0.3,
            case.window,
            case.softcap,
            sinks,
            scale.k,
            scale.v,
            case.chunk,
            slopes if case.slopes else None,
        )
        if self.kv_dtype is not None:  # what is compared with is what the pages can hold
            self.k = [self._shown(self._kept(k, scale.k), scale.k) for k in self.k]
            self.v = [self._shown(self._kept(v, scale.v), scale.v) for v in self.v]

    def _kept(self, rows: torch.Tensor, scale: float) -> torch.Tensor:
        """As pages hold them."""
        return int8_rows.quantise(rows) if self.kv_dtype == int8_rows.DTYPE else kv_fp8.quantise(rows, scale)

    def _shown(self, kept: torch.Tensor, scale: float) -> torch.Tensor:
        return (int8_rows.widened(kept) if kept.dtype == int8_rows.DTYPE else kept.float() * scale).to(self.dtype)

    def run(self, spans: dict[int, range], row_multiple: int = 1) -> dict[int, torch.Tensor]:
        """One step over these positions of these sequences."""
        meta = self.meta(spans, row_multiple)
        rows = [self._rows(part, spans, meta) for part in (self.q, self.k, self.v)]
        if self.kv_dtype is not None:
            rows[1:] = [self._kept(x, s) for x, s in zip(rows[1:], (self.scale.k, self.scale.v), strict=True)]
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
        meta = build_meta(chunks, self.case.page_size, row_multiple)
        return on_device(meta, torch.device(self.device), with_tables=self.backend.name == "flashinfer")

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
        position = torch.arange(length, device=self.device)
        if self.call.slopes is not None:
            scores += self.call.slopes.double().view(-1, 1, 1) * (position[None, :] - position[:, None])
        hidden = position[None, :] > position[:, None]
        if case.chunk:
            hidden |= position[None, :] < position[:, None] - position[:, None] % case.chunk
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


def check_prefill(batch: Batch) -> None:
    """Whole prompts in one step, padded, equal dense attention."""
    out = batch.run({i: range(n) for i, n in enumerate(batch.lengths)}, row_multiple=8)
    for i, rows in out.items():
        assert_close(rows, batch.dense(i))


def check_chunks(batch: Batch) -> None:
    """Chunks, mixed steps and single tokens equal dense attention. `batch` is of CHUNKED_LENGTHS."""
    rows: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    for spans in STEPS:
        for i, out in batch.run(spans).items():
            rows[i].append(out)
    for i, parts in rows.items():
        assert_close(torch.cat(parts), batch.dense(i))
