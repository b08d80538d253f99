"""FlashInfer's kernels keep the contract of tests/engine/attention/contract.py on the GPU, in poisoned pages.

The engine takes a kernel only after a trial of its own at load (engine/attention/flashinfer/choice.py). So a kernel
that is wrong for an option is an expected failure here if that trial refuses it, and fails the test if it is taken.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine.attention.base import AttentionBackend, AttentionCall
from engine.attention.flashinfer.backend import FlashInferBackend
from engine.attention.flashinfer.build import provide
from engine.attention.flashinfer.choice import check_common, measured
from engine.attention.flashinfer.modules import wanted
from engine.attention.flashinfer.shapes import FP8, KernelChoice, Shape, decode_candidates, prefill_candidates
from engine.attention.flashinfer.timing import Limits, Stopwatch
from engine.attention.flashinfer.wrappers import FlashInfer
from engine.attention.torch_backend import TorchBackend
from engine.device import why_no_flashinfer
from engine.gpu.graphs import cuda_capture
from tests.engine.attention.contract import (
    CHUNKED_LENGTHS,
    FLASHINFER_CASES,
    FP8_CASES,
    PREFILL_LENGTHS,
    Batch,
    Case,
    check_chunks,
    check_prefill,
)

BF16 = torch.bfloat16
GPU = "cuda:0"


def shape_of(case: Case, kv_dtype: torch.dtype) -> Shape:
    return Shape(
        heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=case.k_dim,
        page_size=case.page_size,
        scaling=0.3,
        window=case.window,
        softcap=case.softcap,
        sinks=case.sinks,
        kv_dtype=kv_dtype,
    )


def all_shapes() -> list[Shape]:
    with_bf16 = [shape_of(case, BF16) for case in FLASHINFER_CASES.values()]
    return with_bf16 + [shape_of(FLASHINFER_CASES[name], FP8) for name in FP8_CASES]


@pytest.fixture(scope="module")
def plain() -> Iterator[FlashInferBackend]:
    """One workspace for all tests, and every kernel built at once."""
    missing = why_no_flashinfer(torch.device(GPU))
    if missing:
        pytest.skip(missing)
    check_common(provide(wanted(all_shapes(), torch.cuda.get_device_capability(GPU))))
    yield FlashInferBackend(FlashInfer.on(torch.device(GPU)))
    torch.cuda.empty_cache()


def measure(plain: FlashInferBackend, shape: Shape, folder: Path) -> FlashInferBackend:
    """As at load, of small steps only."""
    stopwatch = Stopwatch.on(torch.device(GPU), cuda_capture(torch.device(GPU)))
    return measured(plain, [shape], Limits(sequences=32, keys=1024), stopwatch, folder / "kernels.json")


def right_or_refused(plain: FlashInferBackend, shape: Shape, kind: str, kernel: str, run: Callable[[], None]) -> None:
    """Whether `run` passes; where it does not, the trial at load must not have taken the kernel."""
    wrong = ""
    try:
        run()
    except (AssertionError, RuntimeError) as error:
        wrong = str(error)
    if not wrong:
        return
    with tempfile.TemporaryDirectory() as folder:
        chosen = measure(plain, shape, Path(folder)).kernels[shape]
    taken = {chosen.prefill} if kind == "prefill" else chosen.decode_kernels
    assert kernel not in taken, f"{kernel} is wrong and was taken: {wrong}"
    pytest.xfail(f"{kernel} is wrong here ({wrong}) and is refused at load")


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("case", FLASHINFER_CASES.values(), ids=FLASHINFER_CASES.keys())
def test_the_reference_is_right_on_this_gpu(case: Case, dtype: torch.dtype) -> None:
    backend: AttentionBackend = TorchBackend()
    torch.backends.cuda.matmul.allow_tf32 = False
    check_prefill(Batch(case, dtype, backend, PREFILL_LENGTHS, device=GPU))
    check_chunks(Batch(case, dtype, backend, CHUNKED_LENGTHS, device=GPU))


@pytest.mark.parametrize("kernel", ["fa2", "fa3"])
@pytest.mark.parametrize("case", FLASHINFER_CASES.values(), ids=FLASHINFER_CASES.keys())
def test_prefill(plain: FlashInferBackend, case: Case, kernel: str) -> None:
    shape = shape_of(case, BF16)
    if kernel not in prefill_candidates(shape, torch.cuda.get_device_capability()):
        pytest.skip(f"{kernel} is no candidate on this GPU")
    batch = Batch(case, BF16, plain.with_choice(shape, KernelChoice(prefill=kernel)), PREFILL_LENGTHS, device=GPU)
    right_or_refused(plain, shape, "prefill", kernel, lambda: check_prefill(batch))


WITH_PAGES = [(name, BF16) for name in FLASHINFER_CASES] + [(name, FP8) for name in FP8_CASES]


@pytest.mark.parametrize("kernel", ["tensor", "cores", "xqa"])
@pytest.mark.parametrize(("name", "kv_dtype"), WITH_PAGES)
def test_decode_and_chunks(plain: FlashInferBackend, name: str, kernel: str, kv_dtype: torch.dtype) -> None:
    case = FLASHINFER_CASES[name]
    shape = shape_of(case, kv_dtype)
    if kernel not in decode_candidates(shape, torch.cuda.get_device_capability()):
        pytest.skip(f"{kernel} is no candidate for this shape on this GPU")
    backend = plain.with_choice(shape, KernelChoice(decode=kernel))
    fp8 = FP8 if kv_dtype == FP8 else None
    batch = Batch(case, BF16, backend, CHUNKED_LENGTHS, device=GPU, kv_dtype=fp8)
    right_or_refused(plain, shape, "decode", kernel, lambda: check_chunks(batch))


@pytest.mark.parametrize(("name", "kv_dtype"), WITH_PAGES)
def test_what_is_chosen_by_measurement_is_right(
    plain: FlashInferBackend, tmp_path: Path, name: str, kv_dtype: torch.dtype
) -> None:
    case = FLASHINFER_CASES[name]
    backend = measure(plain, shape_of(case, kv_dtype), tmp_path)
    fp8 = FP8 if kv_dtype == FP8 else None
    check_prefill(Batch(case, BF16, backend, PREFILL_LENGTHS, device=GPU, kv_dtype=fp8))
    check_chunks(Batch(case, BF16, backend, CHUNKED_LENGTHS, device=GPU, kv_dtype=fp8))


def test_layers_of_two_windows_share_a_step(plain: FlashInferBackend) -> None:
    """Planned by turns, as Gemma's layers are, each answer stays its own."""
    case = FLASHINFER_CASES["grouped queries"]
    batch = Batch(case, BF16, plain, (70, 90), device=GPU)
    spans = {0: range(70), 1: range(90)}
    meta = batch.meta(spans)
    rows = [batch._rows(part, spans, meta) for part in (batch.q, batch.k, batch.v)]
    plain.write(rows[1], rows[2], batch.k_pages, batch.v_pages, meta)
    wanted = TorchBackend()
    for window in (0, 12, 0, 12):
        call = AttentionCall(0.3, window)
        got = plain.attend(rows[0], batch.k_pages, batch.v_pages, meta, call)
        expected = wanted.attend(rows[0], batch.k_pages, batch.v_pages, meta, call)
        assert (got.float() - expected.float()).norm() < 2e-2 * expected.float().norm()


def test_a_plan_made_while_the_last_one_is_queued_disturbs_neither(plain: FlashInferBackend) -> None:
    """Many steps queued behind a long kernel: each must see its own plan."""
    case = FLASHINFER_CASES["grouped queries"]
    batches = [Batch(case, BF16, plain, (20 + 9 * i, 90), device=GPU) for i in range(4)]
    outs = []
    torch.cuda._sleep(200_000_000)  # the host runs ahead
    for batch in batches:
        spans = {i: range(n) for i, n in enumerate(batch.lengths)}
        meta = batch.meta(spans)
        rows = [batch._rows(part, spans, meta) for part in (batch.q, batch.k, batch.v)]
        plain.write(rows[1], rows[2], batch.k_pages, batch.v_pages, meta)
        outs.append(plain.attend(rows[0], batch.k_pages, batch.v_pages, meta, batch.call))
    for batch, out in zip(batches, outs, strict=True):
        for i, part in enumerate(out.split(list(batch.lengths))):
            wanted = batch.dense(i)
            assert (part.double() - wanted).abs().max() < 2e-2 * wanted.abs().max()
