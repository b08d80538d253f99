"""The installed FlashInfer describes its modules as build.py takes them, and finds them where it puts them; and what
was built for a GPU is loaded, where there is some: KVRELAY_FLASHINFER_AOT.

The compilers are scripts that write what they were called with.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention.flashinfer import build as flashinfer_build
from engine.attention.flashinfer.build import library, provide
from engine.attention.flashinfer.modules import generator, wanted
from engine.attention.flashinfer.shapes import Shape
from engine.device import AOT_SETTING

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="flashinfer-python is not installed"
)
LLAMA_8B = Shape(heads=32, kv_heads=8, head_dim=128, page_size=16, scaling=128**-0.5)
COMPILER = """#!/bin/sh
case "$*" in *--version*) echo "Cuda compilation tools, release 13.0, V13.0.88"; exit;; esac
for word; do
    [ "$previous" = -o ] && echo "$*" > "$word"
    [ "$previous" = -MF ] && echo "$word:" > "$word"
    previous=$word
done
case "$BREAK_NORM $*" in 1*csrc/norm.cu*) echo "norm.cu:16: fatal error: cublasLt.h: none"; exit 1; esac
"""


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    if shutil.which("ninja") is None:
        pytest.skip("there is no ninja")
    found: Any = importlib.import_module("flashinfer.jit.env")
    core: Any = importlib.import_module("flashinfer.jit.core")
    monkeypatch.setattr(core.current_compilation_context, "TARGET_CUDA_ARCHS", {(9, "0a")})
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    for name in ("FLASHINFER_JIT_DIR", "FLASHINFER_GEN_SRC_DIR"):
        monkeypatch.setattr(found, name, tmp_path / "jit" / name)
    monkeypatch.setattr(found, "FLASHINFER_AOT_DIR", found.FLASHINFER_AOT_DIR)
    for name in ("FLASHINFER_DISABLE_JIT", "FLASHINFER_EXTRA_CUDAFLAGS", AOT_SETTING):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    compiler = tmp_path / "cuda" / "bin" / "nvcc"
    compiler.parent.mkdir(parents=True)
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    importlib.import_module("flashinfer.jit.cpp_ext").get_cuda_path.cache_clear()
    return found


def test_every_module_of_a_model_is_built_and_found(settings: Any) -> None:
    modules = wanted([LLAMA_8B], (9, 0))
    assert provide(modules) == {}
    for name, arguments in modules:
        spec = generator(name)(*arguments)
        assert spec.is_aot
        assert spec.aot_path.read_text().strip().endswith(f"{spec.name}.so")
        spec.load = str
        assert spec.build_and_load() == str(library(settings.FLASHINFER_AOT_DIR, spec.name))


def test_a_file_that_fails_stops_its_own_module_only(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BREAK_NORM", "1")
    failed = provide(wanted([LLAMA_8B], (9, 0)))
    assert failed == {("gen_norm_module", ()): "norm.cu:16: fatal error: cublasLt.h: none"}
    core: Any = importlib.import_module("flashinfer.jit.core")
    with pytest.raises(core.MissingJITCacheError):
        generator("gen_norm_module")().build_and_load()


def test_the_folder_is_for_this_version_and_gpu(settings: Any) -> None:
    import flashinfer

    assert flashinfer_build.Target.here() == flashinfer_build.Target(flashinfer.__version__, "9.0a")


def test_tensors_are_handed_over_by_torch_s_own_exchange() -> None:
    """Else tvm-ffi compiles one at the first call."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
        pytest.skip(f"torch {torch.__version__} is older than the one that is paired with FlashInfer 0.6.14")
    assert hasattr(torch.Tensor, "__dlpack_c_exchange_api__")


def test_a_module_that_was_built_for_a_gpu_is_loaded_and_takes_torch_s_tensors(tmp_path: Path) -> None:
    """Up to the kernel's own word that they are on no GPU; without a driver its library's name is an empty one's."""
    named = os.environ.get(AOT_SETTING)
    if not named or not library(Path(named), "page").exists():
        pytest.skip(f"{AOT_SETTING} names no folder with the page module")
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        stub = tmp_path / "libcuda.so.1"
        subprocess.run(["cc", "-shared", "-x", "c", "-o", stub, f"-Wl,-soname,{stub.name}", os.devnull], check=True)
        ctypes.CDLL(str(stub), mode=ctypes.RTLD_GLOBAL)
    tvm_ffi: Any = importlib.import_module("tvm_ffi")
    for path in sorted(Path(named).glob("*/*.so")):
        tvm_ffi.load_module(str(path))
    page = tvm_ffi.load_module(str(library(Path(named), "page")))
    rows, table = torch.zeros(1, 2, 64), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="must be a CUDA tensor"):
        page.append_paged_kv_cache(rows, rows, table, table, rows[None], rows[None], table, table, table, 0)
