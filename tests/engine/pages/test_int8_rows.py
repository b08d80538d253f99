"""KV pages in int8: what a row is, and that the kernels write it as the reference does, to the bit."""

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.engine import Engine
from engine.fused.cpu import Rotary
from engine.kernels import native
from engine.kernels.native import DTYPE_CODE
from engine.options import EngineOptions
from engine.pages import int8_rows
from engine.pages.layout import KvLayout, LayerKv
from engine.pages.memory import KvMemory
from engine.types import Chunk, SampleSpec, SamplingParams, Step
from tests.zoo import make_tiny_model


def test_a_number_is_off_by_half_a_step_at_most() -> None:
    x = torch.randn(50, 3, 33) * torch.logspace(-6, 6, 50)[:, None, None]
    rows = int8_rows.quantise(x)
    assert rows.shape == (50, 3, 37)
    step = x.abs().amax(-1, keepdim=True) / 127
    assert ((int8_rows.widened(rows) - x).abs() <= 0.501 * step).all()


def test_nothing_stays_nothing() -> None:
    assert not int8_rows.widened(int8_rows.quantise(torch.zeros(2, 5))).any()


def test_a_page_has_its_scales() -> None:
    layout = KvLayout(16, "int8", (LayerKv(2, 64, 32),), 3)
    assert (layout.k_page_bytes(0), layout.v_page_bytes(0)) == (16 * 2 * 68, 16 * 2 * 36)
    memory = KvMemory(layout)
    assert (memory.k(0).shape, memory.v(0).shape) == ((3, 16, 2, 68), (3, 16, 2, 36))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("dim", [16, 24, 64, 130])
def test_the_fused_kernel_writes_the_same_rows(dtype: torch.dtype, dim: int) -> None:
    heads, kv_heads, rows = 4, 2, 7
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim).to(dtype)
    qkv[3], qkv[4] = 0.0, qkv[4] * 1e-38
    angle = torch.rand(rows, dim)
    cos, sin, slots = angle.cos().to(dtype), angle.sin().to(dtype), torch.randperm(16)[:rows]
    turned = torch.empty(rows, heads, dim, dtype=dtype)
    plain = [torch.zeros(16, kv_heads, dim, dtype=dtype) for _ in range(2)]
    narrow = [torch.zeros(16, kv_heads, dim + int8_rows.SCALE_BYTES, dtype=torch.int8) for _ in range(2)]
    for k, v in (plain, narrow):
        args = Rotary(
            qkv=qkv.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            q=turned.data_ptr(),
            k_pages=k.data_ptr(),
            v_pages=v.data_ptr(),
            slots=slots.data_ptr(),
            rows=rows,
            written=rows,
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            token_stride=k.stride(0),
            dtype=DTYPE_CODE[dtype],
            int8=k.dtype == torch.int8,
            threads=1,
        )
        native.library().kvrelay_rotate_and_write(ctypes.byref(args))
    for own, kept in zip(plain, narrow, strict=True):
        assert torch.equal(kept[slots], int8_rows.quantise(own[slots]))


@pytest.mark.parametrize("spoil", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("attention", ["native", "torch"])
def test_what_is_no_number_is_told_and_not_made_one(spoil: float, attention: str, tmp_path: Path) -> None:
    """A request whose KV is spoiled fails; its neighbour does not."""
    options: dict[str, Any] = {"attention": attention, "kv_dtype": "int8", "dtype": "float32", "parity_check": False}
    engine = Engine.load(EngineOptions(model=str(make_tiny_model("llama", tmp_path)), num_pages=8, **options))
    with torch.inference_mode():
        engine.model.module.get_input_embeddings().weight[7] = spoil
    greedy = SamplingParams(temperature=0.0)
    chunks = [
        Chunk(
            request_id=name,
            token_ids=ids,
            start=0,
            block_table=[page],
            sample=SampleSpec(params=greedy, position=len(ids)),
        )
        for page, (name, ids) in enumerate({"spoiled": [5, 7, 9, 11], "sound": [5, 8, 9, 11]}.items())
    ]
    spoiled, sound = engine.step(Step(chunks=chunks))
    assert "NaN" in spoiled.error
    assert not sound.error


def test_it_is_for_cpus_and_one_process() -> None:
    with pytest.raises(ValueError, match="tensor_parallel is 2 with kv_dtype 'int8'; give one of the two"):
        Engine.load(EngineOptions(model="m", kv_dtype="int8", tensor_parallel=2))
