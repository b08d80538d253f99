"""What clients that nobody here wrote make of the HTTP API.

    python -m bench.clients [NAMES...]

A small cluster in this process, asked by each client from an environment of its own (install.py). A program of
programs/ says `passed WHAT` or `failed WHAT: WHY` for each thing that it looks at, and this writes down all of them.
Writes bench/results/clients.json, where those that were not named keep what they had.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.clients.install import CLIENTS, PROGRAMS, Client, installed
from bench.common import RESULTS, about, demo_model, save
from cluster.deploy.local import LocalCluster
from cluster.front.server import server_options
from engine.options import EngineOptions

LIMIT_S = 900.0  # for one client
ALONE = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1"}


async def bench(names: list[str]) -> dict[str, Any]:
    model = str(demo_model("tiny"))
    engine = EngineOptions(model=model, num_pages=512, max_model_len=1024, threads=1)
    async with LocalCluster(model, engine=engine, router=server_options(http_ports=(0,))) as cluster:
        assert cluster.server is not None
        url = f"http://127.0.0.1:{cluster.server.http_port}"
        told = {name: await _asked(CLIENTS[name], name, url, model) for name in names}
        await cluster.settled()
        cluster.check_invariants()
    return told


async def _asked(client: Client, name: str, url: str, model: str) -> dict[str, Any]:
    """What its program says of each check, "" where it passed."""
    programs = await asyncio.to_thread(installed, name)
    if programs is None:
        return {"title": client.title, "versions": list(client.packages), "checks": {"all": "npm is not installed"}}
    with tempfile.TemporaryDirectory() as folder:
        said, code = await _said(client, programs, [url, model], Path(folder))
    checks = {}
    for line in said.splitlines():
        how, _, what = line.partition(" ")
        if how in ("passed", "failed"):
            checks[what] = "" if how == "passed" else what
    if code or not checks:
        checks["to its end"] = f"exit code {code}: {said[-300:]}"
    print(f"{client.title}: {len(checks) - sum(map(bool, checks.values()))} of {len(checks)} passed", flush=True)
    for why in filter(None, checks.values()):
        print(f"    {why}", flush=True)
    return {"title": client.title, "versions": list(client.packages), "checks": checks}


async def _said(client: Client, programs: Path, given: list[str], folder: Path) -> tuple[str, int | None]:
    program = folder / client.program
    program.write_text((PROGRAMS / client.program).read_text())
    if client.is_node:
        (folder / "node_modules").symlink_to(programs.parent / "node_modules")
        run = [shutil.which("node") or "node"]
    else:
        run = ["bash"] if program.suffix == ".sh" else [str(programs / "python"), "-P", str(PROGRAMS / "run.py")]
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    child = await asyncio.create_subprocess_exec(
        *run,
        str(program),
        *given,
        cwd=folder,
        env={**os.environ, **ALONE, "PATH": path, "PYTHONPATH": ""},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        said, _ = await asyncio.wait_for(child.communicate(), LIMIT_S)
    except TimeoutError:
        child.kill()
        return "", await child.wait()
    return said.decode(errors="replace"), child.returncode


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.clients", description="Ask the HTTP API by outside clients.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CLIENTS)}; all when none is given")
    names = parser.parse_args().names or list(CLIENTS)
    if unknown := [name for name in names if name not in CLIENTS]:
        parser.error(f"there is no client {unknown[0]!r}; give some of {', '.join(CLIENTS)}")
    clients = asyncio.run(bench(names))
    told = RESULTS / "clients.json"
    before = json.loads(told.read_text())["clients"] if told.exists() else {}
    all_clients = {name: {**before, **clients}[name] for name in CLIENTS if name in {**before, **clients}}
    print(f"results are in {save('clients', {**about(), 'clients': all_clients})}")
    return 1 if any(any(client["checks"].values()) for client in clients.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
