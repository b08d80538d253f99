"""Every attention backend keeps the same contract; what it must give is computed densely, one sequence at a time."""

from __future__ import annotations

import pytest
import torch

from engine.attention.base import AttentionBackend
from engine.attention.native_backend import NativeBackend
from engine.attention.registry import make_backend
from engine.attention.torch_backend import TorchBackend
from tests.engine.attention.contract import (
    CASES,
    CHUNKED_LENGTHS,
    PREFILL_LENGTHS,
    Batch,
    Case,
    check_chunks,
    check_prefill,
)


@pytest.fixture(params=["torch", "native"])
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    return TorchBackend() if request.param == "torch" else NativeBackend()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_prefill_equals_dense_attention(backend: AttentionBackend, case: Case, dtype: torch.dtype) -> None:
    check_prefill(Batch(case, dtype, backend, PREFILL_LENGTHS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_chunks_and_single_tokens_equal_dense_attention(
    backend: AttentionBackend, case: Case, dtype: torch.dtype
) -> None:
    check_chunks(Batch(case, dtype, backend, CHUNKED_LENGTHS))


@pytest.mark.parametrize("case", [CASES["grouped queries"], CASES["sinks and window"]], ids=["plain", "sinks, window"])
def test_the_reference_reads_pages_in_fp8(case: Case) -> None:
    check_prefill(Batch(case, torch.bfloat16, TorchBackend(), PREFILL_LENGTHS, kv_dtype=torch.float8_e4m3fn))
    check_chunks(Batch(case, torch.bfloat16, TorchBackend(), CHUNKED_LENGTHS, kv_dtype=torch.float8_e4m3fn))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name", ["grouped queries", "sinks and window", "odd widths, odd pages", "values wider than keys"]
)
def test_pages_in_int8_are_read(backend: AttentionBackend, name: str, dtype: torch.dtype) -> None:
    check_prefill(Batch(Case(2, 1, 6, 10, page_size=3), dtype, backend, (1, 5), kv_dtype=torch.int8))
    check_prefill(Batch(CASES[name], dtype, backend, PREFILL_LENGTHS, kv_dtype=torch.int8))
    check_chunks(Batch(CASES[name], dtype, backend, CHUNKED_LENGTHS, kv_dtype=torch.int8))


@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=["plain", "int8"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["grouped queries", "sinks and window", "odd widths, odd pages", "softcap", "slopes"])
def test_native_rows_are_the_same_bits_in_any_batch_chunk_and_thread(
    name: str, dtype: torch.dtype, threads: int, kv_dtype: torch.dtype | None
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        batch = Batch(CASES[name], dtype, NativeBackend(), (300, 5, 130), kv_dtype=kv_dtype)
        together = batch.run({i: range(n) for i, n in enumerate(batch.lengths)})
        alone = batch.run({0: range(300)})[0]
        assert torch.equal(together[0], alone)
        for size in (1, 37):
            spans = [range(at, min(at + size, 130)) for at in range(0, 130, size)]
            assert torch.equal(together[2], torch.cat([batch.run({2: span})[2] for span in spans]))
    finally:
        torch.set_num_threads(before)


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="attention is 'flash'; give one of auto, torch, native, flashinfer"):
        make_backend("flash", torch.float32)


def test_without_a_compiler_auto_falls_back_and_native_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    from engine.kernels import native
    from engine.kernels.build import NativeUnavailable

    monkeypatch.setenv("CXX", f"{tmp_path}/no-such-compiler")
    native.library.cache_clear()
    try:
        assert make_backend("auto", torch.float32).name == "torch"
        with pytest.raises(NativeUnavailable, match="no-such-compiler"):
            make_backend("native", torch.float32)
    finally:
        native.library.cache_clear()
