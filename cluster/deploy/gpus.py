"""What GPUs this machine has, and whether the torch that is installed can use them. It imports no torch: the command
asks before anything is started, and torch takes seconds to import.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from pathlib import Path

from engine.cuda_version import why_too_old

MISSING_EXTRA = "install kvrelay[gpu] (CUDA 13) or kvrelay[gpu-cu12] (CUDA 12.8)"


def count_gpus() -> int:
    """GPUs that the driver shows and CUDA_VISIBLE_DEVICES leaves; 0 where there is no driver."""
    there = _nvml_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return there if visible is None else min(there, _listed(visible))


def why_no_cuda(gpus: int, torch_cuda: str | None) -> str:
    """Why no worker can run on a GPU here; empty when it can. `torch_cuda`: see `torch_cuda_version`."""
    if not gpus:
        return "this machine has no GPU that its driver or CUDA_VISIBLE_DEVICES shows; see nvidia-smi"
    if torch_cuda is None:
        return f"the torch that is installed was built without CUDA; {MISSING_EXTRA}"
    return why_too_old(torch_cuda)


def torch_cuda_version() -> str | None:
    """The CUDA that the installed torch was built for, such as 13.0; None for a build without, or no torch."""
    spec = importlib.util.find_spec("torch")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    for folder in folders:
        path = Path(folder) / "version.py"
        match = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", _text(path), re.MULTILINE)
        if match:
            return match[1]
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _listed(visible: str) -> int:
    """As CUDA reads it: nothing from the first entry that means no device."""
    count = 0
    for entry in visible.split(","):
        if not entry.strip() or entry.strip() == "-1":
            break
        count += 1
    return count


def _nvml_count() -> int:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    count = ctypes.c_uint()
    if nvml.nvmlInit_v2() != 0:
        return 0
    try:
        return count.value if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 else 0
    finally:
        nvml.nvmlShutdown()
