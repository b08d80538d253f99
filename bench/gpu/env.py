"""What this machine has for kvrelay on GPUs: `python -m bench.gpu.env [--rehearse]`. Fails where nothing can run."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from typing import Any

import torch

from bench.gpu import common as gpu_common
from cluster.deploy import gpus
from engine import device
from kv_transfer.transports.gpu import nccl_settings

PACKAGES = ("torch", "triton", "flashinfer-python", "apache-tvm-ffi", "transformers", "ray", "grpcio", "numpy")


def facts(rehearse: bool) -> dict[str, Any]:
    version = nccl_settings.loaded_version()
    found: dict[str, Any] = {
        "packages": {name: _version(name) for name in PACKAGES},
        "nccl_that_torch_loaded": ".".join(map(str, version)) if version else None,
        "nvcc": _nvcc(),
        "driver": _driver(),
        "gpus": [],
        "runs_without_ray": _version("ray") is None,
    }
    if not rehearse and torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties: Any = torch.cuda.get_device_properties(index)
            free, total = torch.cuda.mem_get_info(index)
            found["gpus"].append(
                {
                    "name": properties.name,
                    "capability": f"{properties.major}.{properties.minor}",
                    "multiprocessors": properties.multi_processor_count,
                    "memory_gib": round(total / 2**30, 1),
                    "free_gib": round(free / 2**30, 1),
                }
            )
    return found


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nvcc() -> str | None:
    path = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    return _last_line([path, "--version"]) if path else None


def _driver() -> str | None:
    return _last_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])


def _last_line(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().splitlines()[-1] if done.returncode == 0 and done.stdout.strip() else None


def main() -> None:
    arguments = gpu_common.parser(__doc__).parse_args()
    found = facts(arguments.rehearse)
    for key, value in found.items():
        shown = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        print(f"{key}: {shown}")
    print("NCCL settings: " + (", ".join(k for k in os.environ if k.startswith("NCCL_")) or "none"))
    reason = gpus.why_no_cuda(gpus.count_gpus() or torch.cuda.device_count(), torch.version.cuda)
    if not arguments.rehearse and (reason or not torch.cuda.is_available()):
        sys.exit(f"WRONG: {reason or 'torch finds no GPU; see nvidia-smi'}")
    missing = "" if arguments.rehearse else device.why_no_flashinfer(torch.device("cuda", 0))
    if missing:  # the tests of its kernels would be skipped, and nothing else would say so
        sys.exit(f"WRONG: {missing}")
    gpu_common.save("env", gpu_common.about(arguments.rehearse) | found, arguments.rehearse, arguments.out)


if __name__ == "__main__":
    main()
