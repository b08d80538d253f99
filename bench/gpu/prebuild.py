"""Builds the FlashInfer modules that a model needs on a machine without a GPU, for one that has it:

    python -m bench.gpu.prebuild --model 8b --arch 9.0a --out DIR
    KVRELAY_FLASHINFER_AOT=DIR kvrelay up ...      # there: nothing is compiled

The compiler comes with pip, into .bench/prebuild; torch is this Python's. A run that was ended goes on where it
stopped. The exit code is 1 when a module cannot be built; DIR holds the others.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / ".bench" / "prebuild"
CUDA = "13.0"
COMPILER = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime", "nvidia-curand")
HEADERS = ("nvidia-cublas",)  # of which the norms include one
LIBRARY = ("flashinfer-python", "apache-tvm-ffi", "ninja", "nvidia-ml-py", "packaging", "requests", "tqdm")
BARE_CUDA = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm")  # the constraints do not name them
INSIDE = "KVRELAY_PREBUILD"  # set in the process that has the compiler
TESTS = "tests"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, action="append", help=f"8b, 1b, a directory, or {TESTS}; repeatable")
    parser.add_argument("--arch", default="9.0a", help="of the GPU, as nvcc names it (default: 9.0a, Hopper)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the libraries")
    parser.add_argument("--jobs", type=int, default=None, help="files at a time (default: the cores)")
    parser.add_argument("--modules", nargs="+", default=None, help="only those whose names hold one of these words")
    parser.add_argument("--kv-dtype", default="auto", help="of the pages, as the worker will have it")
    parser.add_argument("--page-size", type=int, default=None, help="tokens, as the worker will have it")
    parser.add_argument("--max-model-len", type=int, default=None, help="tokens, as the worker will have it")
    return parser.parse_args(arguments)


# --- the environment ---


def requirements(constraints: str) -> list[str]:
    """Each package with the version that constraints-gpu.txt pins, or of this CUDA."""
    pinned = dict(line.split("==") for line in constraints.split() if "==" in line)
    beyond = dict.fromkeys(BARE_CUDA, f"{CUDA}.*")
    return [
        f"{name}=={version}" if (version := pinned.get(name) or beyond.get(name)) else name
        for name in (*COMPILER, *HEADERS, *LIBRARY)
    ]


def install(place: Path) -> Path:
    """The packages in `place`/site, once; a CUDA_HOME that the linker can use is made of them."""
    wanted = requirements((ROOT / "constraints-gpu.txt").read_text())
    site, noted = place / "site", place / "installed.json"
    if not noted.exists() or json.loads(noted.read_text()) != wanted:
        shutil.rmtree(site, ignore_errors=True)
        site.mkdir(parents=True)
        print(f"installing {', '.join(wanted)}", flush=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", str(site), *wanted], check=True)
        make_linkable(site / "nvidia" / "cu13")
        noted.write_text(json.dumps(wanted))
    return site


def make_linkable(home: Path) -> None:
    """pip's wheels lack what `-lcudart -lcuda` asks for: a name without a version, and the driver's library."""
    (home / "lib64").symlink_to("lib")
    (home / "lib" / "libcudart.so").symlink_to("libcudart.so.13")
    stub = home / "lib" / "stubs" / "libcuda.so"
    stub.parent.mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile(suffix=".c") as empty:
        subprocess.run(["cc", "-shared", "-o", str(stub), "-Wl,-soname,libcuda.so.1", empty.name], check=True)


def environment(site: Path, place: Path, arch: str) -> dict[str, str]:
    """Of the process that builds. FlashInfer reads it when it is imported."""
    kept = {key: value for key, value in os.environ.items() if key != "FLASHINFER_DISABLE_JIT"}
    return kept | {
        INSIDE: "1",
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(site))),
        "PATH": os.pathsep.join((str(site / "bin"), os.environ.get("PATH", ""))),
        "CUDA_HOME": str(site / "nvidia" / "cu13"),
        "CXX": f"{os.environ.get('CXX', 'c++')} -Wl,--no-as-needed",  # the stub is empty: the driver's name stays
        "FLASHINFER_CUDA_ARCH_LIST": arch,
        "FLASHINFER_WORKSPACE_BASE": str(place),
    }


# --- inside it ---


def build(arguments: argparse.Namespace) -> int:
    from engine.attention.flashinfer import build as flashinfer_build

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    flashinfer_build.logger.setLevel(logging.DEBUG)  # each file
    major, minor = arguments.arch.rstrip("abcdef").split(".")
    modules = [module for model in arguments.model for module in needed(model, arguments, (int(major), int(minor)))]
    specs, refused = flashinfer_build.specs_of(dict.fromkeys(modules))
    words = arguments.modules or [""]
    chosen = [spec for spec in specs.values() if any(word in spec.name for word in words)]
    if not chosen:
        raise SystemExit(f"--modules is {' '.join(words)}; give words of {', '.join(s.name for s in specs.values())}")
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    (out / flashinfer_build.ABOUT).write_text(json.dumps(asdict(flashinfer_build.Target.here())) + "\n")
    lacking = [spec for spec in chosen if not flashinfer_build.library(out, spec.name).exists()]
    failed = flashinfer_build.build(lacking, out, arguments.jobs) if lacking else {}
    for spec in chosen:
        print(f"{spec.name}: {failed.get(spec.name) or shown_size(flashinfer_build.library(out, spec.name))}")
    for (name, _), why in refused.items():
        print(f"{name}: {why}")
    print(f"{len(chosen) - len(failed)} of {len(specs) + len(refused)} modules in {out}: {shown_size(out)}")
    return 1 if failed or refused else 0


def shown_size(path: Path) -> str:
    files = [path] if path.is_file() else path.rglob("*.so")
    return f"{sum(file.stat().st_size for file in files) / (1 << 20):.1f} MiB"


def needed(
    model: str, arguments: argparse.Namespace, capability: tuple[int, int]
) -> list[tuple[str, tuple[object, ...]]]:
    """By a model, or by tests/gpu."""
    from bench.gpu.weights import MAX_POSITIONS, SHAPES
    from engine.attention.flashinfer.modules import wanted
    from engine.loading.outline import modules_needed
    from engine.options import EngineOptions

    if model == TESTS:
        from tests.gpu.test_attention import all_shapes

        return wanted(all_shapes(), capability)
    with tempfile.TemporaryDirectory() as folder:
        if model in SHAPES:
            from transformers import LlamaConfig

            config = LlamaConfig(**SHAPES[model], max_position_embeddings=MAX_POSITIONS, dtype="bfloat16")
            config.architectures = ["LlamaForCausalLM"]
            config.save_pretrained(folder)
        options = EngineOptions(
            model=folder if model in SHAPES else model,
            kv_dtype=arguments.kv_dtype,
            page_size=arguments.page_size,
            max_model_len=arguments.max_model_len,
        )
        options.validate()
        return modules_needed(options, capability)


def main() -> None:
    arguments = parse()
    if os.environ.get(INSIDE):
        sys.exit(build(arguments))
    site = install(PLACE)
    command = [sys.executable, "-m", "bench.gpu.prebuild", *sys.argv[1:]]
    sys.exit(subprocess.run(command, env=environment(site, PLACE, arguments.arch), check=False).returncode)


if __name__ == "__main__":
    main()
