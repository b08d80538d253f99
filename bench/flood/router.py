"""The router that is flooded: a process of its own that tells what it keeps, and how late its event loop was.

python -m bench.flood.router WORKERS SETTINGS
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import threading
import time
from array import array
from typing import Any

from bench.flood.onlookers import percentiles
from cluster.front.bounds.memory import put_off_collections, renew_awaits
from cluster.front.server import RouterServer, server_options
from cluster.router.links.worker_link import WorkerEndpoint
from worker.heap import give_memory_back

LAG_BEAT_S = 0.02


class Lag:
    """Of an event loop: how much later than asked for it wakes, and how long its own thread computed meanwhile. Where
    the second is much less, the processor was another's, or the interpreter's lock another thread's."""

    def __init__(self) -> None:
        self._late_ms = array("d")  # no objects: each would keep a piece of the memory that is looked at
        self._busy_ms = array("d")
        self._beats = asyncio.get_running_loop().create_task(self._beat())

    async def _beat(self) -> None:
        while True:
            due_s, used_s = time.perf_counter() + LAG_BEAT_S, time.thread_time()
            await asyncio.sleep(LAG_BEAT_S)
            self._late_ms.append(max(0.0, time.perf_counter() - due_s) * 1e3)
            self._busy_ms.append((time.thread_time() - used_s) * 1e3)

    def seen(self) -> dict[str, dict[str, float]]:
        late_ms, self._late_ms = self._late_ms, array("d")
        busy_ms, self._busy_ms = self._busy_ms, array("d")
        return {"loop_lag_ms": percentiles(late_ms), "loop_busy_ms": percentiles(busy_ms)}


def kept(server: RouterServer) -> dict[str, int]:
    """What a router may hold for clients, by name."""
    scrape_of = {"calls": server._calls.running, "watches": server._health.num_watches}
    return scrape_of | {
        "requests": server.router.num_submissions,
        "unread_bytes": server.router.unread.total_bytes,
        "tasks": len(asyncio.all_tasks()),
        "threads": threading.active_count(),
        "system_threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
    }


async def serve(workers: list[list[str]], settings: dict[str, Any]) -> None:
    put_off_collections()
    server = RouterServer(server_options(port=0, **settings))
    port = await server.start()
    server.set_workers(WorkerEndpoint(name=n, role=r, address=a) for n, r, a in workers)
    while not server.router.is_ready:
        await asyncio.sleep(0.01)
    gc.freeze()  # as worker/process.py
    lag = Lag()
    print(json.dumps({"port": port}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        if line.strip() == "settle":
            gc.collect()
            renew_awaits()
            give_memory_back()
        used = time.process_time()
        print(json.dumps({"loop": lag.seen(), "cpu_s": used, "kept": kept(server)}), flush=True)
    await server.stop()


def main() -> None:
    workers, settings = map(json.loads, sys.argv[1:])
    asyncio.run(serve(workers, settings))


if __name__ == "__main__":
    main()
