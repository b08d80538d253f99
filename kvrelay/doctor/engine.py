"""What the engine finds here: its kernels, torch's CUDA, GPUs and what lies between them.

Read in a process of its own (`python -m kvrelay.doctor.engine` prints it): torch is large, a driver that does not fit
can end whoever asks, and the kernels are built at first use, as they would be by the first worker.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from kvrelay.doctor.finding import Finding

TIMEOUT_S = 360.0
LEAST_NCCL = (2, 27)  # whose pairs can be aborted and made anew


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    instructions: str = ""  # by which the native products multiply
    may_multiply: bool = False  # the kernel lets them
    why_no_native: str = ""
    torch_cuda: str = ""  # that torch was built for; empty: without
    gpus: tuple[str, ...] = ()  # that torch can use
    nccl: tuple[int, ...] = ()
    flashinfer: str = ""  # why its kernels cannot run; empty: they can
    apart: tuple[tuple[int, int], ...] = ()  # GPUs that cannot reach each other's memory
    trouble: str = ""  # why nothing could be read


def engine_facts() -> EngineFacts:
    command = [sys.executable, "-P", "-m", "kvrelay.doctor.engine"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        read: dict[str, Any] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return EngineFacts(trouble=f"torch and the kernels did not load within {TIMEOUT_S:.0f} s")
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        return EngineFacts(trouble=f"torch or the kernels end the process ({done.returncode}): {last[:200]}")
    lists = {key: tuple(read[key]) for key in ("gpus", "nccl")}
    return EngineFacts(**read | lists | {"apart": tuple(map(tuple, read["apart"]))})


def engine(facts: EngineFacts, *, gpus: int, wants_gpu: bool) -> Iterator[Finding]:
    """`gpus`: that the driver shows; `wants_gpu`: the spec does."""
    if facts.trouble:
        mend = "install kvrelay's own versions (pip install -c constraints.txt), with torch for this machine's driver"
        yield Finding(part="engine", name="torch", verdict="bad", found=facts.trouble, mend=mend)
        return
    yield _kernels(facts)
    if gpus or wants_gpu:
        yield _gpus(facts, gpus, wants_gpu=wants_gpu)
    if facts.gpus:
        yield from _between(facts)


def _kernels(facts: EngineFacts) -> Finding:
    part, name = "engine", "kernels"
    if facts.why_no_native:
        mend = "install g++ 12 or later: without the native kernels attention and products run many times slower"
        return Finding(part=part, name=name, verdict="doubtful", found=facts.why_no_native, mend=mend)
    if not facts.may_multiply:
        mend = "run a kernel that grants AMX (5.16 or later, no seccomp on arch_prctl): oneDNN multiplies until then"
        found = f"products by {facts.instructions}, which the kernel does not allow"
        return Finding(part=part, name=name, verdict="doubtful", found=found, mend=mend)
    return Finding(part=part, name=name, verdict="good", found=f"native; products by {facts.instructions}")


def _gpus(facts: EngineFacts, gpus: int, *, wants_gpu: bool) -> Finding:
    cuda = f"torch is for CUDA {facts.torch_cuda}" if facts.torch_cuda else "torch was built without CUDA"
    if facts.gpus:
        found = f"{len(facts.gpus)} usable ({', '.join(dict.fromkeys(facts.gpus))}); {cuda}"
        if not facts.flashinfer:
            return Finding(part="engine", name="GPUs", verdict="good", found=f"{found}; FlashInfer")
        mend = "without FlashInfer attention runs on torch, many times slower: see docs/gpu.md"
        return Finding(part="engine", name="GPUs", verdict="doubtful", found=f"{found}; {facts.flashinfer}", mend=mend)
    install = "install kvrelay[gpu] (CUDA 13) or kvrelay[gpu-cu12] (CUDA 12.8), and a driver that is as new"
    mend = install if gpus else "give device: cpu, or a machine with a GPU that nvidia-smi shows"
    found = f"{gpus} here, and torch can use none: {cuda}"
    return Finding(part="engine", name="GPUs", verdict="bad" if wants_gpu else "doubtful", found=found, mend=mend)


def _between(facts: EngineFacts) -> Iterator[Finding]:
    nccl = ".".join(map(str, facts.nccl))
    if facts.nccl and facts.nccl[:2] < LEAST_NCCL:
        mend = "install kvrelay[gpu] or kvrelay[gpu-cu12]: pairs of older ones cannot be ended one by one"
        yield Finding(part="engine", name="NCCL", verdict="bad", found=nccl, mend=mend)
    else:
        yield Finding(part="engine", name="NCCL", verdict="good" if nccl else "unknown", found=nccl or "torch has none")
    if facts.apart:
        some = ", ".join(f"{a} and {b}" for a, b in facts.apart[:4])
        mend = "KV between them goes by the host: look at nvidia-smi topo -m, or leave cuda_ipc out of transports"
        found = f"{len(facts.apart)} pairs cannot reach each other's memory ({some})"
        yield Finding(part="engine", name="GPU to GPU", verdict="doubtful", found=found, mend=mend)
    elif len(facts.gpus) > 1:
        yield Finding(part="engine", name="GPU to GPU", verdict="good", found="all reach each other's memory")


def _read() -> EngineFacts:
    import torch

    from engine.device import why_no_flashinfer
    from engine.kernels import native
    from engine.kernels.build import NativeUnavailable
    from engine.weights import panels

    instructions = why = ""
    may_multiply = False
    try:
        native.library()
        may_multiply = panels.can_multiply(64, torch.bfloat16)
        instructions = panels.instructions() if may_multiply else "AMX"
    except NativeUnavailable as error:
        why = str(error)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    return EngineFacts(
        instructions=instructions,
        may_multiply=may_multiply,
        why_no_native=why,
        torch_cuda=torch.version.cuda or "",
        gpus=tuple(torch.cuda.get_device_name(i) for i in range(count)),
        nccl=tuple(torch.cuda.nccl.version()) if count else (),
        flashinfer=why_no_flashinfer(torch.device("cuda", 0)) if count else "",
        apart=tuple(pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)),
    )


if __name__ == "__main__":
    print(json.dumps(asdict(_read())))
