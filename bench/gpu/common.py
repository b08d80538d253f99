"""What the GPU benchmarks share: the machine, the model, where results go, and workers as plain processes (no Ray).

`--rehearse` runs every part on the CPU with tiny sizes: it proves the programs, and its figures mean nothing. Results
go to bench/results/gpu_*.json on a GPU only; a rehearsal writes into the folder that it is given.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import multiprocessing
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from bench import common

LOAD_TIMEOUT_S = 300.0
HOST, SECRET = "127.0.0.1", "bench"

# As Llama 3.1 8B, but for the vocabulary's tokenizer: requests are token ids.
LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
LLAMA_1B = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
SHAPES = {"8b": LLAMA_8B, "1b": LLAMA_1B}
MAX_POSITIONS = 16384
SHARD_BYTES = 4 << 30


class WrongResult(Exception):
    """What was measured is not what it must be: the check fails."""


def parser(about: str | None) -> argparse.ArgumentParser:
    parsed = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parsed.add_argument("--rehearse", action="store_true", help="on the CPU, tiny: the figures mean nothing")
    parsed.add_argument("--out", type=Path, default=None, help="folder of a rehearsal's results")
    parsed.add_argument("--model", default=None, help="8b, 1b, tiny, or a directory; default: 8b, tiny in a rehearsal")
    return parsed


def check_device(rehearse: bool) -> None:
    if not rehearse and not torch.cuda.is_available():
        sys.exit("no GPU that torch can use; --rehearse runs this on the CPU (its figures mean nothing)")


def device_of(rehearse: bool) -> str:
    return "cpu" if rehearse else "cuda:0"


def about(rehearse: bool) -> dict[str, Any]:
    head = common.about() | {"is_rehearsal": rehearse}
    if not rehearse:
        properties = torch.cuda.get_device_properties(0)
        head["gpu"] = {
            "name": properties.name,
            "count": torch.cuda.device_count(),
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
        }
    return head


def save(name: str, result: Mapping[str, Any], rehearse: bool, out: Path | None) -> Path:
    """bench/results/gpu_NAME.json, or OUT/gpu_NAME.json in a rehearsal."""
    if not rehearse and out is None:
        return common.save(f"gpu_{name}", result)
    folder = out or Path(os.environ.get("TMPDIR", "/tmp")) / "kvrelay-rehearsal"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"gpu_{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


# --- the model ---


def model_dir(name: str | None, rehearse: bool) -> str:
    """A directory with random weights, made once in .bench/."""
    chosen = name or ("tiny" if rehearse else "8b")
    if chosen in SHAPES:
        return str(make_llama(chosen, device_of(rehearse)))
    return str(common.demo_model(chosen)) if chosen in ("tiny", "125m") else chosen


def make_llama(size: str, device: str) -> Path:
    """Drawn where it is quick, with the spread that kvrelay's demo models have, in shards."""
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = common.MODELS / f"random-llama-{size}"
    if (directory / "model.safetensors.index.json").exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(
        **SHAPES[size],
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(directory)
    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in LlamaForCausalLM(config).named_parameters()}
    _write_shards(directory, shapes, device)
    return directory


def _write_shards(directory: Path, shapes: Mapping[str, torch.Size], device: str) -> None:
    from safetensors.torch import save_file

    generator = torch.Generator(device).manual_seed(0)
    index: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    for name, shape in sorted(shapes.items()):
        shard[name] = _random_weight(name, shape, generator, device)
        if sum(weight.nbytes for weight in shard.values()) > SHARD_BYTES:
            _flush(directory, shard, index, save_file)
    _flush(directory, shard, index, save_file)
    total = sum(shape.numel() * 2 for shape in shapes.values())
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    (directory / "model.safetensors.index.json").write_text(text)  # last: with it the model is there


def _flush(directory: Path, shard: dict[str, torch.Tensor], index: dict[str, str], save_file: Any) -> None:
    if shard:
        file = f"model-{len(set(index.values())):05d}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(shard, file))
        shard.clear()


def _random_weight(name: str, shape: torch.Size, generator: torch.Generator, device: str) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
    spread = 1.0 if "embed_tokens" in name else gain / shape[1] ** 0.5
    weight = torch.empty(shape, dtype=torch.float32, device=device).normal_(0.0, spread, generator=generator)
    return weight.to(torch.bfloat16).cpu()


# --- workers as processes ---


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProcess:
    role: str
    engine: Mapping[str, Any]  # of EngineOptions
    worker: Mapping[str, Any] = field(default_factory=dict)  # of WorkerOptions
    environ: Mapping[str, str] = field(default_factory=dict)


def _worker_main(pipe: Connection, name: str, spec: WorkerProcess) -> None:
    os.environ.update(spec.environ)
    logging.basicConfig(level=logging.WARNING, format=f"{name}: %(message)s")
    try:
        asyncio.run(_serve(pipe, name, spec))
    except Exception as error:
        logging.exception("%s ended", name)
        with contextlib.suppress(OSError):
            pipe.send(("failed", f"{type(error).__name__}: {error}"))


async def _serve(pipe: Connection, name: str, spec: WorkerProcess) -> None:
    from engine.engine import Engine
    from engine.options import EngineOptions
    from worker.driver import make_worker
    from worker.options import worker_options

    engine = await asyncio.to_thread(Engine.load, EngineOptions(**spec.engine))
    options = worker_options(name, spec.role, host=HOST, secret=SECRET, **spec.worker)
    worker = make_worker(options, engine)
    address = await worker.start()
    pipe.send(("ready", address.address))
    with contextlib.suppress(EOFError):
        await asyncio.to_thread(pipe.recv)
    await worker.stop()


@asynccontextmanager
async def processes(specs: Mapping[str, WorkerProcess]) -> AsyncIterator[str]:
    """The endpoint of a cluster whose workers are processes of their own, and whose router is in this one.

    Workers load side by side, so the share of the GPU that each may take must be written in its spec.
    """
    from cluster.front.server import RouterServer, server_options
    from cluster.router.links.worker_link import LinkState, WorkerEndpoint

    context = multiprocessing.get_context("spawn")
    started: list[tuple[Any, Connection]] = []
    endpoints: list[WorkerEndpoint] = []
    server = RouterServer(server_options(host=HOST, port=0, secret=SECRET, dead_after_s=20.0))
    try:
        for name, spec in specs.items():
            ours, theirs = context.Pipe()
            process = context.Process(target=_worker_main, args=(theirs, name, spec), daemon=True)
            process.start()
            theirs.close()
            started.append((process, ours))
        for (name, spec), (_, ours) in zip(specs.items(), started, strict=True):
            what, value = await asyncio.to_thread(_answer, ours, name)
            if what != "ready":
                raise WrongResult(f"{name} did not start: {value}")
            endpoints.append(WorkerEndpoint(name=name, role=spec.role, address=value))
        await server.start()
        server.set_workers(endpoints)
        async with asyncio.timeout(30):
            while not all(link.state is LinkState.READY for link, _, _ in server.router.workers()):
                await asyncio.sleep(0.02)
        yield f"{HOST}:{server.port}"
    finally:
        await server.stop(0.0)
        for process, pipe in started:
            with contextlib.suppress(OSError):
                pipe.send(None)
            await asyncio.to_thread(process.join, 20.0)
            if process.is_alive():
                process.kill()


def _answer(pipe: Connection, name: str) -> tuple[str, str]:
    try:
        if pipe.poll(LOAD_TIMEOUT_S):
            answer: tuple[str, str] = pipe.recv()
            return answer
    except EOFError:
        return "failed", "its process ended"
    return "failed", f"it was not ready after {LOAD_TIMEOUT_S:g} s"


def engine_options(model: str, rehearse: bool, **changes: Any) -> dict[str, Any]:
    """Of EngineOptions: on the GPU in bfloat16, or tiny on the CPU."""
    base: dict[str, Any] = {"model": model, "dtype": "bfloat16", "device": "cuda"}
    if rehearse:
        base |= {"device": "cpu", "threads": 1, "max_model_len": 1024, "parity_check": False}
    return base | changes
