"""What the GPU benchmarks share: the machine, where results go, and workers as plain processes (no Ray).

`--rehearse` runs every part on the CPU with tiny sizes: it proves the programs, and its figures mean nothing. Results
go to the folder that is given, else to bench/results/gpu_*.json; a rehearsal's never do.
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


class WrongResult(Exception):
    """What was measured is not what it must be: the check fails."""


def parser(about: str | None) -> argparse.ArgumentParser:
    parsed = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parsed.add_argument("--rehearse", action="store_true", help="on the CPU, tiny: the figures mean nothing")
    parsed.add_argument("--out", type=Path, default=None, help="folder of the results; default: bench/results")
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


def said(row: dict[str, Any]) -> dict[str, Any]:
    """The row; a run that is ended before its end has told what it had measured."""
    print(
        ", ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())
    )
    return row


def save(name: str, result: Mapping[str, Any], rehearse: bool, out: Path | None) -> Path:
    """OUT/gpu_NAME.json; without one bench/results/gpu_NAME.json, or a temporary folder in a rehearsal."""
    if not rehearse and out is None:
        return common.save(f"gpu_{name}", result)
    folder = out or Path(os.environ.get("TMPDIR", "/tmp")) / "kvrelay-rehearsal"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"gpu_{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


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
