"""The parts of the GPU check, in the order in which they tell most, and what each may take.

`takes_s` is what a part should need at most on an H100 or H200 with 16 cores whose kernels are built: it is not begun
with less left. `limit_s` is when it is ended, and counts as failed. Both are estimates, from bytes over bandwidth and
what processes take to import torch, until the check has run; a rehearsal has four times the limits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

PATIENCE = 4  # of a rehearsal, on two slow cores
CORRECTNESS = ("attention", "fp8", "rotation", "sampling", "ranks")  # files of tests/gpu

# What other parts do again, and longer, is left out of the tests.
IN_OTHER_PARTS = (
    "test_the_contract_of_transports_holds_on_a_gpu",
    "test_bytes_between_two_processes",
    "test_a_killed_process_is_noticed_and_harms_no_other_pair",
    "test_nccl_brings_the_right_bytes_where_two_ranks_can_meet",
)
CONTRACT = "tests/kv_transfer/test_transports.py"
CONTRACT_ON_CPU = (
    "tests/kv_transfer/test_gpu_transports.py",
    "tests/engine/pages/test_page_table.py",
    "tests/bench/test_gpu_programs.py",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    name: str
    command: tuple[str, ...]  # what the interpreter is given
    takes_s: float
    limit_s: float
    is_asked_for: bool = True  # by a check that names no parts
    may_be_empty: bool = False  # pytest may find nothing to run


def parts_of(*, rehearse: bool, model: str | None, out: Path) -> tuple[Part, ...]:
    flags = [*(["--rehearse"] if rehearse else []), *(["--model", model] if model else []), "--out", str(out)]

    def program(name: str, takes_s: float, limit_s: float, *more: str, module: str = "") -> Part:
        command = ("-m", f"bench.gpu.{module or name}", *flags, *more)
        return Part(name=name, command=command, takes_s=takes_s, limit_s=limit_s)

    def tests(name: str, takes_s: float, limit_s: float, *more: str) -> Part:
        command = ("-m", "pytest", "-q", *more)
        return Part(name=name, command=command, takes_s=takes_s, limit_s=limit_s, may_be_empty=rehearse)

    left_out = [f"--deselect=tests/gpu/test_transports.py::{test}" for test in IN_OTHER_PARTS]
    contract = CONTRACT_ON_CPU if rehearse else (CONTRACT,)
    parts = (
        # Imports of torch and transformers from a cold disk, nvidia-smi.
        program("environment", 15, 60, module="env"),
        # Finds what was built beforehand in seconds; nvcc takes minutes for what was not, and goes on where it was cut.
        Part(
            name="kernels",
            command=("-m", "tests.gpu.kernels", *(["--rehearse"] if rehearse else [])),
            takes_s=20,
            limit_s=420,
        ),
        # About 30 tiny engines, each with a trial of its kernels and some with graphs: two or three seconds an engine.
        tests("tokens", 60, 150, "tests/gpu/test_engine.py", "tests/gpu/test_graphs.py"),
        # Four prompts of up to 1 GB, 32 copies each: 2 s of copies; six processes that import torch, 8 s each; NCCL's
        # ways that hang are given up after 35 s each.
        program("transports", 60, 150),
        # 16 GB from the GPU into a file: 10 s in memory, 40 s on a disk.
        program("weights", 30, 90),
        # Two workers load 16 GB each, side by side (20 s), capture graphs (10 s) and serve 200 requests (15 s); another
        # engine loads and scores 200 answers of up to 3000 tokens with the plain attention (40 s).
        program("cluster", 100, 200),
        # 16 GB loaded, graphs captured (25 s); 43 steps of three batches behind contexts of 1k, 8 prompts (15 s).
        program("engine", 50, 120),
        # About 100 cases of attention at a second or less, 60 of drawing, a few engines with fp8 pages, and where there
        # are two GPUs workers over both.
        tests("correctness", 60, 150, *(f"tests/gpu/test_{name}.py" for name in CORRECTNESS)),
        # The transports' contract as on a CPU (25 s there); order against the engine's stream.
        tests("contract", 45, 120, *contract, "tests/gpu/test_transports.py", *left_out),
        # transformers loads the model (10 s) and is measured for 40 s at most.
        program("peers", 60, 120),
        # Three rates of 20 s, twice, behind three loads of the model.
        replace(program("comparison", 200, 360, module="one_gpu"), is_asked_for=False),
    )
    return tuple(replace(part, limit_s=part.limit_s * PATIENCE) for part in parts) if rehearse else parts
