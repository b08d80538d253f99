"""Where an engine computes: the device that is meant, and what it lacks.

`auto` is resolved once, at load. What a GPU machine lacks (CUDA, FlashInfer, nvcc) is said in one sentence here.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

from engine.build_cache import NoCacheFolder, cache_folder
from engine.cuda_version import why_too_old
from engine.errors import raise_if_broken
from engine.options import check_device_name

AOT_FOLDER = Path("data") / "aot"  # of FlashInfer: modules built beforehand
AOT_SETTING = "KVRELAY_FLASHINFER_AOT"  # the environment's: another folder of them

Capture = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], object], torch.Tensor]]
"""What makes a graph of a run: how to replay it, and what it gives."""


def resolve(name: str) -> torch.device:
    """The device called `name`; `auto` is the current GPU where there is one. Raises ValueError with one sentence."""
    check_device_name(name)
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(f"device is {name!r}, but {_why_no_cuda()}")
    index = int(name.partition(":")[2] or torch.cuda.current_device())
    if index >= torch.cuda.device_count():
        raise ValueError(f"device is {name!r}, but this machine has {torch.cuda.device_count()} GPUs; count from 0")
    return torch.device("cuda", index)


def current(device: torch.device) -> AbstractContextManager[object]:
    """While inside, `device` is the GPU that is meant where none is named; nothing on a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def check(device: torch.device) -> None:
    """Raise EngineBroken once a GPU is lost to this process, whose call ever it was: a transport's copy, say."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.default_stream(device).query()
    except RuntimeError as error:
        raise_if_broken(error)


def _why_no_cuda() -> str:
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} was built without CUDA; install kvrelay[gpu] (CUDA 13) or kvrelay[gpu-cu12], "
            "or give device: cpu"
        )
    return why_too_old(torch.version.cuda) or (
        f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no GPU; check nvidia-smi and "
        "CUDA_VISIBLE_DEVICES, or give device: cpu"
    )


def why_no_flashinfer(device: torch.device) -> str:
    """Why FlashInfer's kernels cannot run there; empty when they can."""
    if device.type != "cuda":
        return f"FlashInfer runs on CUDA GPUs, and the device is {device}"
    if find_spec("flashinfer") is None:
        return "the package flashinfer-python is not installed; install kvrelay[gpu]"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is older than Ampere, which FlashInfer's kernels need"
    has_ninja = ninja_is_found()
    if not has_ninja and not _has_prebuilt():
        return (
            "FlashInfer compiles its kernels with ninja, and there is none on PATH or beside this Python; install "
            "ninja, or the package flashinfer-jit-cache"
        )
    if nvcc() is None and not _has_prebuilt():
        return (
            "FlashInfer compiles its kernels with nvcc, and there is none (looked for $CUDA_HOME/bin/nvcc and nvcc on "
            "PATH); install the CUDA toolkit, or the package flashinfer-jit-cache"
        )
    return ""


def ninja_is_found() -> bool:
    """Whether FlashInfer, which calls it by its name, finds ninja. In a venv that is not activated it stands beside
    this Python and not on PATH: then PATH is told."""
    if shutil.which("ninja") is not None:
        return True
    beside = Path(sys.executable).parent
    if not (beside / "ninja").is_file():
        return False
    os.environ["PATH"] = os.pathsep.join(filter(None, (str(beside), os.environ.get("PATH"))))
    return True


def nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    beside = Path(home) / "bin" / "nvcc"
    return str(beside) if beside.is_file() else shutil.which("nvcc")


def _has_prebuilt() -> bool:
    if find_spec("flashinfer_jit_cache") is not None:
        return True
    spec = find_spec("flashinfer")
    packages = list(spec.submodule_search_locations or ()) if spec is not None else []
    folders = [Path(package) / AOT_FOLDER for package in packages]
    if named := os.environ.get(AOT_SETTING):
        folders.append(Path(named))
    return any(any(folder.glob("*/*.so")) for folder in [*folders, *_built_before()])


def _built_before() -> list[Path]:
    """Folders of modules that a load on this machine has built for this version, while there was a compiler."""
    try:
        return list((cache_folder() / "flashinfer").glob(f"{version('flashinfer-python')}-*"))
    except (NoCacheFolder, PackageNotFoundError):
        return []
