"""One kernel rotates rows and writes them into pages: FlashInfer's bits, in Triton's interpreter. Steps take it, one
call for each layer, where at load it is there, right and not slower."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from engine.attention.flashinfer.backend import FlashInferBackend
from engine.attention.flashinfer.shapes import FP8, KernelChoice, Shape
from engine.attention.flashinfer.timing import Stopwatch
from engine.attention.flashinfer.wrappers import FlashInfer
from engine.fused import rotary_choice
from engine.fused.gpu import FlashInferKernels
from engine.fused.kernels import RopeTable
from engine.fused.rotary_choice import Rows, chosen
from engine.types import Chunk, Step
from tests.engine import rehearsal
from tests.engine.attention import fake_flashinfer
from tests.engine.rehearsal import rehearse
from tests.engine.test_engine import greedy, prompts, save

KERNEL = "engine.fused.rotary_kernel"
CPU = torch.device("cpu")
LIBRARY: Any = fake_flashinfer
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: it comes with torch's CUDA builds"
)
RESERVED = 8  # a page


@pytest.fixture(scope="module")
def kernel() -> Iterator[ModuleType]:
    """The real one, run by Triton's interpreter on CPU memory; decided when it is imported."""
    patch = pytest.MonkeyPatch()
    patch.setenv("TRITON_INTERPRET", "1")
    sys.modules.pop(KERNEL, None)
    yield importlib.import_module(KERNEL)
    sys.modules.pop(KERNEL)
    patch.undo()


def cut(x: torch.Tensor) -> torch.Tensor:
    """To bfloat16 as the interpreter does, which rounds to zero where a GPU rounds to the nearest."""
    return (x.view(torch.int32) & -(1 << 16)).view(torch.float32).bfloat16()


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_joined", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (9, 3, 64), (20, 20, 64), (8, 1, 256)])
def test_the_kernel_gives_the_bits_of_two_and_writes_nothing_else(
    kernel: ModuleType, heads: int, kv_heads: int, dim: int, is_joined: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    widths = [heads * dim, kv_heads * dim, kv_heads * dim]
    joined = torch.randn(6, sum(widths), generator=generator).to(dtype)
    q, k, v = (x if is_joined else x.contiguous() for x in torch.split(joined, widths, dim=-1))
    table = RopeTable(torch.randn(50, dim, generator=generator), torch.tensor([3, 49, 17, 17, 0, 0]))
    slots = torch.tensor([5, 16 * 7 + 15, 16, 0, 16 * RESERVED, 16 * RESERVED])
    q[5], k[5], v[5] = q[4], k[4], v[4]  # rows of padding are all the same
    q[3] = 0.0  # its products have signs
    pages = torch.full((2, RESERVED + 1, 16, kv_heads, dim), float("nan")).to(dtype)
    wanted_pages = pages.clone()
    narrowed: Callable[[torch.Tensor], torch.Tensor] = cut if dtype == torch.bfloat16 else torch.Tensor.half
    rotated = LIBRARY.apply_rope_with_cos_sin_cache(table.positions, q.float(), k.float(), dim, table.cos_sin)
    wanted_q, wanted_k = map(narrowed, rotated)
    for rows, into in zip((wanted_k, v), wanted_pages, strict=True):
        into.view(-1, kv_heads * dim)[slots] = rows
    by_head = (x.view(6, -1, dim) for x in (q, k, v))
    q_THD = kernel.rotate_and_write(*by_head, table, *pages, slots)
    assert torch.equal(q_THD.flatten(1).view(torch.int16), wanted_q.view(torch.int16))
    assert torch.equal(pages.view(torch.int16), wanted_pages.view(torch.int16))


COMPILE = """
import subprocess, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from engine.fused import rotary_kernel

kernel, dim = rotary_kernel._rotate_and_write, int(sys.argv[1])
kinds = {"cos_sin": "*fp32", "positions": "*i64", "slots": "*i64", "q_row": "i32", "k_row": "i32", "v_row": "i32"}
constants = {"HEADS": 32, "KV_HEADS": 8, "HALF": dim // 2, "BLOCK": 2 * rotary_kernel.PAIRS // dim}
names = kernel.arg_names
source = triton.compiler.ASTSource(
    fn=kernel,
    signature={name: "constexpr" if name in constants else kinds.get(name, "*bf16") for name in names},
    constexprs={(names.index(name),): value for name, value in constants.items()},
    attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in constants},
)
options = {"num_warps": rotary_kernel.NUM_WARPS}
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
with open(sys.argv[2], "w") as file:
    file.write(made.asm["ptx"])
subprocess.run([get_ptxas(90).path, "-v", "--gpu-name=sm_90a", sys.argv[2], "-o", "/dev/null"], check=True)
"""


@needs_triton
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_for_hopper_it_spills_nothing_and_moves_16_bytes_at_a_time(dim: int, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, str(dim), str(tmp_path / "kernel.ptx")]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert said.returncode == 0, said.stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in said.stderr
    ptx = (tmp_path / "kernel.ptx").read_text()
    moves = re.findall(r"(?:ld|st)\.global\S*", ptx)
    assert set(moves) == {"ld.global.b64", "ld.global.v4.b32", "st.global.v4.b32"}  # a position and a slot in 8
    assert ptx.count("fma.rn.f32") == ptx.count("mul.f32") == 2 * 16  # as FlashInfer's: no more is contracted


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("llama"), "LlamaConfig")


@pytest.mark.parametrize("way", ["stand-in", pytest.param("kernel", marks=needs_triton)])
def test_a_step_makes_one_call_for_each_layer(
    llama: str, way: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    run = rehearsal.rotate_and_write if way == "stand-in" else request.getfixturevalue("kernel").rotate_and_write
    calls: list[int] = []

    def counted(*args: Any) -> torch.Tensor:
        calls.append(len(args[0]))
        rotated: torch.Tensor = run(*args)
        return rotated

    two = dict.fromkeys(("apply_rope_with_cos_sin_cache", "append_paged_kv_cache"))  # not to be called
    monkeypatch.setattr(rehearsal, "rotate_and_write", counted)
    engine = rehearse(llama, library=SimpleNamespace(**vars(fake_flashinfer) | two))
    layers = engine.layout.num_layers

    def rows_of(*token_ids: list[int]) -> list[int]:
        calls.clear()
        chunks = [
            Chunk(request_id=str(i), token_ids=ids, start=0, block_table=[2 * i]) for i, ids in enumerate(token_ids)
        ]
        engine.step(Step(chunks=chunks))
        return calls

    assert rows_of([5, 6, 7], [8]) == [4] * layers
    monkeypatch.setattr(rehearsal, "rotate_and_write", None)
    wanted = greedy(rehearse(llama), prompts((20, 9, 30)), new_tokens=3, chunk=64)
    calls.clear()
    assert greedy(engine, prompts((20, 9, 30)), new_tokens=3, chunk=64) == wanted
    assert calls[-layers:] == [4] * layers  # in a graph, with a row of padding


@pytest.mark.parametrize("scaling", ["llama3", "yarn", "linear"])
def test_scaled_frequencies_come_with_the_table(scaling: str, tmp_path: Path) -> None:
    rope = {"rope_type": scaling, "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if scaling == "llama3" else {}
    engine = rehearse(save(tmp_path, "LlamaConfig", rope_parameters=rope, max_position_embeddings=256))  # in parity
    assert type(engine.model.module.base_model.forward).__name__ == "Decoder"


def wrong(*args: Any) -> torch.Tensor:
    args[5].view(-1)[0] = 900.0  # a value's element
    return rehearsal.rotate_and_write(*args)


def missing(*_: Any) -> torch.Tensor:
    raise ModuleNotFoundError("No module named 'triton'")


@pytest.mark.parametrize(
    ("one", "seconds", "best", "said"),
    [
        (rehearsal.rotate_and_write, (2.0, 1.0), "triton", "flashinfer 100000 us, triton 50000 us"),
        (rehearsal.rotate_and_write, (1.0, 2.0), "flashinfer", "flashinfer 50000 us, triton 100000 us"),
        (wrong, (2.0, 1.0), "flashinfer", "not served by triton: relative error"),
        (missing, (2.0, 1.0), "flashinfer", "not served by triton: ModuleNotFoundError"),
    ],
)
def test_at_load_it_is_taken_where_it_is_right_and_not_slower(
    one: Callable[..., torch.Tensor],
    seconds: tuple[float, float],
    best: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(rotary_choice, "_in_triton", one)
    sizes: dict[str, Any] = {"heads": 8, "kv_heads": 2, "head_dim": 64, "page_size": 16, "scaling": 0.125}
    shapes = [Shape(**sizes), Shape(**sizes, window=20), Shape(**sizes, kv_dtype=FP8)]
    backend = FlashInferBackend(FlashInfer.on(CPU, fake_flashinfer), dict.fromkeys(shapes, KernelChoice()))
    by_turns = cycle(seconds)
    with caplog.at_level("INFO"):
        kernels = chosen(backend, Stopwatch(None, lambda run: next(by_turns)))
    assert (kernels._rotate_and_write is one) == (best == "triton")
    assert said in caplog.text
    assert caplog.messages[-1] == f"rows are rotated and written into pages by {best}"


@needs_triton
def test_a_step_of_the_trial_through_the_kernel(kernel: ModuleType) -> None:
    half = torch.float16
    shape = Shape(heads=4, kv_heads=2, head_dim=64, page_size=16, scaling=0.125, dtype=half, kv_dtype=half)
    backend = FlashInferBackend(FlashInfer.on(CPU, fake_flashinfer))
    assert Rows.of(shape, 1, CPU).error(FlashInferKernels(None, kernel.rotate_and_write), backend) < 1e-3
