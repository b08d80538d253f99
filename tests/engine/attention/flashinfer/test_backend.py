"""The flashinfer backend asks the library for the right thing: proved on a CPU against a library that forgives nothing.

What only a GPU can show, that the kernels themselves are right, is in tests/gpu/test_attention.py.
"""

from __future__ import annotations

import importlib.util
import inspect
import shutil
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import device
from engine.attention.base import AttentionCall
from engine.attention.flashinfer.backend import FlashInferBackend
from engine.attention.flashinfer.shapes import (
    FP8,
    KernelChoice,
    Shape,
    decode_candidates,
    prefill_candidates,
    shape_of,
    why_not,
)
from engine.attention.flashinfer.wrappers import FlashInfer
from engine.attention.registry import make_backend
from tests.engine.attention import fake_flashinfer
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

CPU = torch.device("cpu")
BF16 = torch.bfloat16
ON_CPU = FlashInfer.on(CPU, fake_flashinfer)
HOPPER, AMPERE = (9, 0), (8, 0)

# Of flashinfer-python 0.6.14: what each call that the engine makes may be given, in order.
SIGNATURES = {
    "BatchPrefillWithPagedKVCacheWrapper.__init__": "self float_workspace_buffer kv_layout use_cuda_graph "
    "qo_indptr_buf paged_kv_indptr_buf paged_kv_indices_buf paged_kv_last_page_len_buf custom_mask_buf "
    "mask_indptr_buf backend jit_args jit_kwargs",
    "BatchPrefillWithPagedKVCacheWrapper.plan": "self qo_indptr paged_kv_indptr paged_kv_indices "
    "paged_kv_last_page_len num_qo_heads num_kv_heads head_dim_qk page_size head_dim_vo custom_mask "
    "packed_custom_mask causal pos_encoding_mode use_fp16_qk_reduction sm_scale window_left logits_soft_cap "
    "rope_scale rope_theta q_data_type kv_data_type o_data_type non_blocking prefix_len_ptr token_pos_in_items_ptr "
    "token_pos_in_items_len max_item_len_ptr seq_lens seq_lens_q block_tables max_token_per_sequence "
    "max_sequence_kv fixed_split_size disable_split_kv",
    "BatchPrefillWithPagedKVCacheWrapper.run": "self q paged_kv_cache args q_scale k_scale v_scale out lse "
    "return_lse enable_pdl window_left sinks kv_cache_sf skip_softmax_threshold_scale_factor",
    "BatchDecodeWithPagedKVCacheWrapper.__init__": "self float_workspace_buffer kv_layout use_cuda_graph "
    "use_tensor_cores paged_kv_indptr_buffer paged_kv_indices_buffer paged_kv_last_page_len_buffer backend jit_args",
    "BatchDecodeWithPagedKVCacheWrapper.plan": "self indptr indices last_page_len num_qo_heads num_kv_heads head_dim "
    "page_size pos_encoding_mode window_left logits_soft_cap q_data_type kv_data_type o_data_type data_type sm_scale "
    "rope_scale rope_theta non_blocking block_tables seq_lens fixed_split_size disable_split_kv q_len_per_req",
    "BatchDecodeWithPagedKVCacheWrapper.run": "self q paged_kv_cache args q_scale k_scale v_scale out lse return_lse "
    "enable_pdl window_left sinks q_len_per_req skip_softmax_threshold_scale_factor kv_cache_sf",
    "append_paged_kv_cache": "append_key append_value batch_indices positions paged_kv_cache kv_indices kv_indptr "
    "kv_last_page_len kv_layout",
    "decode.fast_decode_plan": "self indptr indices last_page_len num_qo_heads num_kv_heads head_dim page_size "
    "pos_encoding_mode window_left logits_soft_cap q_data_type kv_data_type data_type sm_scale rope_scale rope_theta "
    "non_blocking fixed_split_size disable_split_kv global_override_indptr_cpu",
    "decode.xqa_batch_decode_with_kv_cache": "query kv_cache workspace_buffer block_tables seq_lens max_seq_len "
    "bmm1_scale bmm2_scale window_left out sinks kv_layout enable_pdl q_len_per_req o_scale mask kv_cache_sf",
    "rmsnorm": "input weight eps out enable_pdl",
    "gemma_rmsnorm": "input weight eps out enable_pdl",
    "fused_add_rmsnorm": "input residual weight eps enable_pdl",
    "gemma_fused_add_rmsnorm": "input residual weight eps enable_pdl",
    "silu_and_mul": "input out enable_pdl",
    "apply_rope_with_cos_sin_cache": "positions query key head_size cos_sin_cache is_neox",
}


def parameters(library: object, name: str) -> str:
    found = library
    for part in name.split("."):
        found = getattr(found, part)
    return " ".join(inspect.signature(found).parameters)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_stand_in_has_the_library_s_parameters(name: str) -> None:
    assert parameters(fake_flashinfer, name) == SIGNATURES[name]


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer-python is not installed")
@pytest.mark.parametrize("name", SIGNATURES)
def test_the_installed_library_has_them_too(name: str) -> None:
    import flashinfer
    import flashinfer.decode

    have = parameters(flashinfer, name).split()
    if "kwargs" in have:  # 0.6.18 hands them on
        have = parameters(flashinfer, name.replace(".plan", "._plan_impl")).split()
    missing = [parameter for parameter in SIGNATURES[name].split() if parameter not in have]
    assert not missing, f"flashinfer {flashinfer.__version__}: {name} has no {missing}"


def backend_for(case: Case, prefill: str, decode: str, kv_dtype: torch.dtype | None = None) -> FlashInferBackend:
    shape = Shape(
        heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=case.k_dim,
        page_size=case.page_size,
        scaling=0.3,
        window=case.window,
        softcap=case.softcap,
        sinks=case.sinks,
        kv_dtype=kv_dtype or BF16,
    )
    return FlashInferBackend(ON_CPU, {shape: KernelChoice(prefill=prefill, decode=decode)})


@pytest.mark.parametrize("case", FLASHINFER_CASES.values(), ids=FLASHINFER_CASES.keys())
def test_prompts_equal_dense_attention(case: Case) -> None:
    check_prefill(Batch(case, BF16, backend_for(case, "fa3", "tensor"), PREFILL_LENGTHS))


def hopper_decode(case: Case) -> tuple[str, ...]:
    q, pages = torch.empty(1, case.heads, case.k_dim), torch.empty(1, case.page_size, case.kv_heads, case.k_dim)
    return decode_candidates(shape_of(q, pages, AttentionCall(0.3, case.window, case.softcap)), HOPPER)


@pytest.mark.parametrize(
    ("name", "decode"), [(name, decode) for name, case in FLASHINFER_CASES.items() for decode in hopper_decode(case)]
)
def test_chunks_and_single_tokens_equal_dense_attention(name: str, decode: str) -> None:
    case = FLASHINFER_CASES[name]
    check_chunks(Batch(case, BF16, backend_for(case, "fa2", decode), CHUNKED_LENGTHS))


@pytest.mark.parametrize("name", FP8_CASES)
def test_pages_in_fp8_are_read_with_their_scales(name: str) -> None:
    case = FLASHINFER_CASES[name]
    backend = backend_for(case, "fa2", "tensor", FP8)
    check_chunks(Batch(case, BF16, backend, CHUNKED_LENGTHS, kv_dtype=FP8))


def test_a_layer_is_planned_once_a_step_for_each_shape() -> None:
    case = FLASHINFER_CASES["grouped queries"]
    batch = Batch(case, BF16, FlashInferBackend(ON_CPU), (20, 90))
    meta = batch.meta({0: range(20), 1: range(90)})
    rows = [batch._rows(part, {0: range(20), 1: range(90)}, meta) for part in (batch.q, batch.k, batch.v)]
    batch.backend.write(rows[1], rows[2], batch.k_pages, batch.v_pages, meta)
    planned: list[int] = []
    backend: Any = batch.backend
    for window in (0, 12, 0, 12):  # four layers of two kinds, by turns
        call = AttentionCall(0.3, window)
        backend.attend(rows[0], batch.k_pages, batch.v_pages, meta, call)
        planned.append(sum(len(tables) for _, tables in backend._runners.values()))
    assert planned == [1, 2, 2, 2]


def test_candidates_are_those_that_know_every_option_of_the_layer() -> None:
    plain = Shape(heads=8, kv_heads=2, head_dim=128, page_size=16, scaling=1.0)
    assert prefill_candidates(plain, HOPPER) == ("fa2", "fa3")
    assert prefill_candidates(plain, AMPERE) == ("fa2",)
    assert decode_candidates(plain, HOPPER) == ("tensor", "cores", "xqa")
    assert decode_candidates(plain, AMPERE) == ("tensor", "cores")

    def but(**changes: object) -> Shape:
        return Shape(**{**{f: getattr(plain, f) for f in Shape.__dataclass_fields__}, **changes})

    assert decode_candidates(but(softcap=30.0), HOPPER) == ("tensor", "cores")
    assert decode_candidates(but(page_size=5), HOPPER) == ("tensor", "cores")
    assert decode_candidates(but(heads=14), HOPPER) == ("tensor", "xqa")
    assert prefill_candidates(but(kv_dtype=FP8), HOPPER) == ("fa2",)
    assert decode_candidates(but(kv_dtype=FP8), HOPPER) == ("tensor",)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        ((8, 2, 192, 128, BF16, BF16), "keys are 192 wide and its values 128"),
        ((8, 2, 48, 48, BF16, BF16), "heads are 48 wide"),
        ((8, 2, 64, 64, torch.float32, torch.float32), "computes in float32"),
        ((8, 3, 64, 64, BF16, BF16), "8 query heads do not share 3"),
        ((8, 2, 64, 64, BF16, FP8), ""),
    ],
)
def test_a_layer_that_flashinfer_cannot_serve_is_told_why(layer: tuple[object, ...], reason: str) -> None:
    found = why_not(*layer)  # type: ignore[arg-type]
    assert reason in found
    assert bool(found) == bool(reason)


@pytest.mark.parametrize(("beside", "found"), [(True, True), (False, False)])
def test_ninja_beside_a_python_that_was_not_activated_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, beside: bool, found: bool
) -> None:
    """FlashInfer calls it by its name."""
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    if beside:
        (tmp_path / "ninja").touch(mode=0o755)
    assert device.ninja_is_found() == found
    assert (shutil.which("ninja") is not None) == found


def test_flashinfer_on_a_cpu_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="attention is 'flashinfer', but FlashInfer runs on CUDA GPUs"):
        make_backend("flashinfer", BF16)


def test_modules_that_were_built_here_before_need_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("KVRELAY_FLASHINFER_AOT", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    installed = {"flashinfer": ModuleSpec("flashinfer", None)}
    monkeypatch.setattr(device, "find_spec", installed.get)
    monkeypatch.setattr(device, "nvcc", lambda: None)
    monkeypatch.setattr(device, "version", lambda _: "0.6.14")
    monkeypatch.setattr(device, "ninja_is_found", lambda: False)
    gpu = torch.device("cuda", 0)
    other = tmp_path / "kvrelay" / "flashinfer" / "0.6.13-9.0a" / "page" / "page.so"
    other.parent.mkdir(parents=True)
    other.touch()
    assert "there is none on PATH" in device.why_no_flashinfer(gpu)
    other.parents[1].rename(other.parents[2] / "0.6.14-9.0a")
    assert not device.why_no_flashinfer(gpu)
