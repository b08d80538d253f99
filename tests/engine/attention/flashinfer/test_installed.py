"""The installed FlashInfer's own wrappers take what the backend gives them, and hand their kernels what is wanted.

Only the compiled kernels are replaced, by dense arithmetic over the arguments they would be called with: planning, the
checks and the order of the arguments are the library's.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.attention.flashinfer.modules import FOR_EVERY_MODEL, Wanted, generator, wanted
from engine.attention.flashinfer.wrappers import FlashInfer
from engine.engine import Engine
from engine.options import EngineOptions
from tests.engine.attention import fake_flashinfer
from tests.engine.attention.contract import (
    CHUNKED_LENGTHS,
    FLASHINFER_CASES,
    FP8_CASES,
    PREFILL_LENGTHS,
    Batch,
    check_chunks,
    check_prefill,
)
from tests.engine.attention.flashinfer.test_backend import backend_for, hopper_decode
from tests.engine.rehearsal import rehearse
from tests.engine.test_engine import greedy, prompts, save
from tests.engine.test_rehearsal import counted_replays

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="flashinfer-python is not installed"
)
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
NON_CAUSAL, CAUSAL = 0, 1
PLAN_ARGUMENTS = {"fa2": (19, 20), "fa3": (16,)}  # 0.6.18 also asks if all have as many rows


def prefill_module(backend: str, *made_for: Any) -> SimpleNamespace:
    q_dtype, kv_dtype, _, index_dtype, k_dim, v_dim, _, has_window, has_softcap, _ = made_for
    assert index_dtype == torch.int32
    assert k_dim == v_dim

    def plan(*args: Any) -> tuple[Any, ...]:
        assert len(args) in PLAN_ARGUMENTS[backend]
        qo_indptr, kv_indptr, kv_lens = args[3:6]
        assert all(x.device.type == "cpu" for x in (qo_indptr, kv_indptr, kv_lens))
        assert (args[15] >= 0) == has_window
        return args

    def paged_run(*args: Any) -> None:
        (
            _,
            _,
            planned,
            q,
            k_pages,
            v_pages,
            qo_indptr,
            kv_indptr,
            kv_indices,
            last,
            out,
            lse,
            mask,
            layout,
            window,
            _,
        ) = args[:16]
        softcap, sm_scale = args[22], args[23]
        assert (q.dtype, k_pages.dtype) == (q_dtype, kv_dtype)
        assert layout == 0
        assert window == planned[15]
        assert (softcap > 0) == has_softcap
        assert torch.equal(qo_indptr, planned[3])
        assert torch.equal(kv_indptr, planned[4])
        rows = qo_indptr.diff().tolist()
        assert mask == CAUSAL or set(rows) == {1}
        assert mask == (CAUSAL if planned[14] else NON_CAUSAL)
        tables = (kv_indptr, kv_indices, last)
        keys, values = (fake_flashinfer._gather(pages, *tables) for pages in (k_pages, v_pages))
        got, log2_sum = fake_flashinfer.dense(q, keys, values, rows, sm_scale, window, softcap)
        out.copy_(got)
        if lse is not None:
            lse.copy_(log2_sum)

    return SimpleNamespace(plan=plan, paged_run=paged_run)


def decode_module(*made_for: Any) -> SimpleNamespace:
    has_window, has_softcap = made_for[-2:]

    def plan(*args: Any) -> tuple[Any, ...]:
        assert len(args) == 15
        assert args[3].device.type == "cpu"
        assert (args[9] != -1) == has_window
        return args

    def run(*args: Any) -> None:
        _, _, planned, q, k_pages, v_pages, kv_indptr, kv_indices, last, out, lse, _, window, _ = args[:14]
        softcap, sm_scale = args[15], args[16]
        assert torch.equal(kv_indptr, planned[3])
        assert (softcap > 0) == has_softcap
        tables = (kv_indptr, kv_indices, last)
        keys, values = (fake_flashinfer._gather(pages, *tables) for pages in (k_pages, v_pages))
        got, log2_sum = fake_flashinfer.dense(q, keys, values, [1] * len(last), sm_scale, window, softcap)
        out.copy_(got)
        if lse is not None:
            lse.copy_(log2_sum)

    return SimpleNamespace(plan=plan, run=run)


def append(key: torch.Tensor, value: torch.Tensor, batch: Any, positions: Any, k: Any, v: Any, *tables: Any) -> None:
    indices, indptr, last, layout = tables
    assert layout == 0
    fake_flashinfer.append_paged_kv_cache(key, value, batch, positions, (k, v), indices, indptr, last)


def xqa(*args: Any) -> None:
    (_, _, kv_heads, window, q_scale, out, rcp_out_scale, q, sinks, k_pages, v_pages, _, _, table, longest, lengths,
     batch, kv_scale) = args[:18]  # fmt: skip
    assert rcp_out_scale == 1.0
    assert q.shape == out.shape == (batch, 1, *q.shape[2:])
    assert lengths.shape == (batch, 1)
    fake_flashinfer.xqa_batch_decode_with_kv_cache(
        query=q.squeeze(1),
        kv_cache=(k_pages, v_pages),
        workspace_buffer=None,
        block_tables=table,
        seq_lens=lengths.squeeze(1),
        max_seq_len=longest,
        bmm1_scale=q_scale * kv_scale / q.shape[-1] ** 0.5,
        bmm2_scale=kv_scale,
        window_left=window - 1 if window else -1,
        out=out.squeeze(1),
        sinks=None if sinks is None else sinks.reshape(-1),
    )
    assert sinks is None or sinks.shape[0] == kv_heads


def test_the_modules_that_are_built_ahead_are_those_the_wrappers_ask_for(
    library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashinfer import decode, prefill

    asked: set[Wanted] = set()

    def noting(name: str, make: Callable[..., SimpleNamespace]) -> Callable[..., SimpleNamespace]:
        def made(*arguments: Any) -> SimpleNamespace:
            asked.add((name, arguments))
            return make(*arguments)

        return made

    for module in (prefill, decode):
        monkeypatch.setattr(module, "get_batch_prefill_module", noting("gen_batch_prefill_module", prefill_module))
    monkeypatch.setattr(decode, "get_batch_decode_module", noting("gen_batch_decode_module", decode_module))
    xqa_module = importlib.import_module("flashinfer.xqa")
    made = noting("gen_xqa_module", lambda *args: SimpleNamespace(xqa=xqa))
    monkeypatch.setattr(xqa_module, "get_xqa_module", lambda *args: made(*args[:8]))  # 0.6.18: if queries are ragged

    shapes = []
    for name in ("grouped queries", "window", "softcap"):
        case = FLASHINFER_CASES[name]
        for kernel, decode_kernel in (("fa3", "tensor"), ("fa2", "cores"), ("fa2", hopper_decode(case)[-1])):
            backend = backend_for(case, kernel, decode_kernel)
            backend.flashinfer = FlashInfer.on(backend.flashinfer.device, library)
            shapes += list(backend.kernels)
            check_chunks(Batch(case, BF16, backend, CHUNKED_LENGTHS))
    ahead = wanted(shapes, (9, 0))
    assert asked == set(ahead) - set(FOR_EVERY_MODEL)
    for name, arguments in ahead:
        inspect.signature(generator(name)).bind(*arguments)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    import flashinfer
    from flashinfer import decode, page, prefill
    from flashinfer import xqa as _xqa_function  # noqa: F401  the module of that name is shadowed by it

    xqa_module = importlib.import_module("flashinfer.xqa")
    empty = torch.empty

    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", unpinned)
    for module in (prefill, decode, xqa_module):
        monkeypatch.setattr(module, "device_support_pdl", lambda device: False)
    monkeypatch.setattr(prefill, "get_batch_prefill_module", prefill_module)
    monkeypatch.setattr(decode, "get_batch_prefill_module", prefill_module)
    monkeypatch.setattr(decode, "get_batch_decode_module", decode_module)
    monkeypatch.setattr(page, "get_page_module", lambda: SimpleNamespace(append_paged_kv_cache=append))
    monkeypatch.setattr(xqa_module, "get_xqa_module", lambda *args: SimpleNamespace(xqa=xqa))
    for module in (decode, xqa_module):
        monkeypatch.setattr(module, "get_device_sm_count", lambda device: 132)
    monkeypatch.setattr(xqa_module, "get_compute_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.inference_mode(torch.is_inference_mode_enabled()))
    return flashinfer


@pytest.mark.parametrize("kernel", ["fa2", "fa3"])
@pytest.mark.parametrize("name", FLASHINFER_CASES)
def test_prompts(library: Any, name: str, kernel: str) -> None:
    case = FLASHINFER_CASES[name]
    backend = backend_for(case, kernel, "tensor")
    backend.flashinfer = FlashInfer.on(backend.flashinfer.device, library)
    check_prefill(Batch(case, BF16, backend, PREFILL_LENGTHS))


WAYS = [(name, decode, BF16) for name, case in FLASHINFER_CASES.items() for decode in hopper_decode(case)]
WAYS += [(name, "tensor", FP8) for name in FP8_CASES]


@pytest.mark.parametrize(("name", "decode", "kv_dtype"), WAYS)
def test_chunks_and_single_tokens(library: Any, name: str, decode: str, kv_dtype: torch.dtype) -> None:
    case = FLASHINFER_CASES[name]
    backend = backend_for(case, "fa2", decode, kv_dtype)
    backend.flashinfer = FlashInfer.on(backend.flashinfer.device, library)
    check_chunks(Batch(case, BF16, backend, CHUNKED_LENGTHS, kv_dtype=FP8 if kv_dtype == FP8 else None))


@pytest.mark.parametrize("decode", ["tensor", "cores", "xqa"])
def test_replayed_decode_steps(library: Any, tmp_path: Path, decode: str) -> None:
    """Wrappers bound to a graph's buffers, planned again by fast_decode_plan before each replay."""
    directory = save(tmp_path, "LlamaConfig")
    lengths = (20, 40, 9)
    on_cpu = Engine.load(EngineOptions(model=directory, dtype="float32", num_pages=64, attention="torch"))
    engine = rehearse(directory, decode=decode, fused=False, library=library)
    replays = counted_replays(engine)
    assert greedy(engine, prompts(lengths), 5, chunk=64) == greedy(on_cpu, prompts(lengths), 5, chunk=64)
    assert replays == [3, 3, 3, 3]
