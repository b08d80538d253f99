"""ProcessCluster is a cluster of real processes without Ray: workers and a router, each started again as soon as its
process ends, with a Proxy on every link between them. What Ray and the controller do is not tried here
(ray.py); what the processes do to each other is, and a restart takes a second.

    await cluster.start() -> cluster.arm("decode-0", rule) -> await cluster.fired(rule) -> ... -> await cluster.stop()
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from cluster.deploy.own_ray.local_ray import is_there
from engine.process import set_environment
from kvrelay.chaos.targets.base import ROUTER, ProcessState, Shape, states_of
from kvrelay.chaos.targets.members import PRELOAD, run_router, run_worker
from kvrelay.chaos.targets.proxy import Proxy
from worker.options import worker_options
from worker.roles import PHASES

POLL_S = 0.005
ARMED_S = 5.0
START_S = 120.0
STOP_S = 3.0
CLIENT, WATCHER = "client", "watcher"  # two ways to the router, so that one may be cut


@dataclass(slots=True)
class Member:
    name: str
    role: str
    process: BaseProcess | None = None
    pipe: Connection | None = None
    port: int = 0  # where it listens now; 0 while it does not
    ready_s: float = 0.0  # when it last was ready
    ended_s: float = 0.0  # when its process last ended
    starts: int = 0
    rules: list[dict[str, Any]] = field(default_factory=list)


class ProcessCluster:
    def __init__(
        self,
        shape: Shape,
        folder: Path,
        *,
        engine: Mapping[str, Any],
        worker: Mapping[str, Any],
        router: Mapping[str, Any],
        seed: int,
    ) -> None:
        """`engine`, `worker` and `router` are settings by name, as LocalCluster takes them."""
        self.shape = shape
        self.endpoint = self.watch_endpoint = ""
        self.proxy = Proxy(random.Random(seed))
        self.start_s = 0.0  # the longest that a member has taken from its start to ready
        self._folder = folder
        self._engine = {**engine, "num_pages": shape.num_pages}
        self._worker, self._router = dict(worker), dict(router)
        counts = {"prefill": shape.prefill, "decode": shape.decode, "mixed": shape.mixed}
        self._workers = {f"{role}-{i}": role for role, count in counts.items() for i in range(count)}
        self._members = {name: Member(name, role) for name, role in self._workers.items()}
        self._members[ROUTER] = Member(ROUTER, "router")
        self._addresses: list[tuple[str, str, str]] = []  # of the workers, as the router is told
        self._advertised: dict[str, str] = {}
        self._context = multiprocessing.get_context("forkserver")
        self._is_stopping = False
        self._rule_serial = 0
        self._seen: dict[int, psutil.Process] = {}

    @property
    def settings(self) -> dict[str, float]:
        numbers = {**self._worker, **self._router}
        return {key: float(value) for key, value in numbers.items() if isinstance(value, int | float)}

    # Life

    async def start(self) -> None:
        """Returns when all are ready."""
        set_environment(1)
        os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
        os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")  # who is killed leaves tqdm's semaphores
        self._context.set_forkserver_preload(list(PRELOAD))
        first = self._context.Process(target=os.getpid)  # returns when the fork server has imported all that
        first.start()
        await asyncio.to_thread(first.join)
        for name in self._workers:
            for_router = await self._listen(name, lambda _: ROUTER)
            self._addresses.append((name, self._members[name].role, for_router))
            self._advertised[name] = await self._listen(name, self._owner_of)
        self.endpoint = await self._listen(ROUTER, lambda _: CLIENT)
        self.watch_endpoint = await self._listen(ROUTER, lambda _: WATCHER)
        for name in self._members:
            self._begin(name)
        await self.until_ready()

    async def _listen(self, name: str, source_of: Any) -> str:
        port = await self.proxy.listen(lambda: self._members[name].port, source_of, name)
        return f"127.0.0.1:{port}"

    async def until_ready(self) -> None:
        """Raises TimeoutError naming who is not."""
        try:
            async with asyncio.timeout(START_S):
                while not all(member.port for member in self._members.values()):
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            late = [name for name, member in self._members.items() if not member.port]
            raise TimeoutError(f"not ready within {START_S:g} s: {', '.join(late)}; see {self._folder}") from None

    async def stop(self) -> list[int]:
        self._is_stopping = True
        self.states()  # sees the ranks
        for name, member in self._members.items():
            if member.process is not None and member.pipe is not None:
                self.signal(name, signal.SIGCONT)
                with contextlib.suppress(OSError):
                    member.pipe.send(0.0)
        await asyncio.to_thread(psutil.wait_procs, self._seen.values(), STOP_S)
        left = [process.pid for process in self._seen.values() if is_there(process)]
        for member in self._members.values():
            if member.process is not None and member.process.is_alive():
                member.process.kill()
        await self.proxy.close()
        return left

    def _begin(self, name: str) -> None:
        member = self._members[name]
        ours, theirs = self._context.Pipe()
        log = str(self._folder / f"{name}.log.txt")
        if member.role == "router":
            options: Any = {**self._router, "name": name, "port": 0}
            process: BaseProcess = self._context.Process(
                target=run_router, args=(options, self._addresses, theirs, log), daemon=True
            )
        else:
            worker = (self._options(name), self._engine_of(name), self._advertised[name])
            process = self._context.Process(target=run_worker, args=(*worker, theirs, log), daemon=True)
        began_s = time.monotonic()
        process.start()
        theirs.close()
        member.process, member.pipe, member.starts = process, ours, member.starts + 1
        loop = asyncio.get_running_loop()
        loop.add_reader(ours.fileno(), self._on_event, member, ours, began_s)
        loop.add_reader(process.sentinel, self._on_end, member, process, ours)

    def _options(self, name: str) -> Any:
        role, ranks = self._members[name].role, self._engine_of(name).get("tensor_parallel", 1)
        return worker_options(name, role, **self._worker, faults=str(self._folder), tensor_parallel=ranks)

    def _engine_of(self, name: str) -> dict[str, Any]:
        ranks = self.shape.ranks if name == "decode-0" else 1
        return {**self._engine, "tensor_parallel": ranks}

    def _on_event(self, member: Member, pipe: Connection, began_s: float) -> None:
        try:
            event = pipe.recv()
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(pipe.fileno())
            return
        if event["stage"] == "ready" and member.pipe is pipe:
            member.port, member.ready_s = int(event["address"].rpartition(":")[2]), time.monotonic()
            self.start_s = max(self.start_s, member.ready_s - began_s)

    def _on_end(self, member: Member, process: BaseProcess, pipe: Connection) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(process.sentinel)
        loop.remove_reader(pipe.fileno())
        pipe.close()
        process.join()
        member.port, member.ended_s = 0, time.monotonic()
        if not self._is_stopping:
            member.rules = [rule for rule in member.rules if rule.get("stays")]
            self._write_rules(member)
            self._begin(member.name)

    # Who is there

    def names(self, role: str) -> list[str]:
        mixed = ("mixed", *PHASES)
        return [n for n, m in self._members.items() if m.role == role or (m.role == "mixed" and role in mixed)]

    def pid(self, name: str) -> int:
        process = self._members[name].process
        return process.pid or 0 if process is not None and process.is_alive() else 0

    def rank_pids(self, name: str) -> list[int]:
        """Of the processes under a worker of several."""
        with contextlib.suppress(psutil.Error):
            return [child.pid for child in psutil.Process(self.pid(name)).children(recursive=True)]
        return []

    def ended_s(self, name: str) -> float:
        return self._members[name].ended_s

    def heal(self) -> None:
        self.disarm()
        self.proxy.heal()
        for name in self._members:
            self.signal(name, signal.SIGCONT)

    def is_ready(self, name: str) -> bool:
        return bool(self._members[name].port)

    def signal(self, name: str, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if pid := self.pid(name):
                os.kill(pid, number)

    def limit(self, name: str, what: str) -> Callable[[], None]:
        """Let a worker open or take hardly more than it has; returns what lifts that."""
        process = psutil.Process(self.pid(name))
        number = psutil.RLIMIT_NOFILE if what == "descriptors" else psutil.RLIMIT_AS
        now = process.num_fds() + 2 if what == "descriptors" else process.memory_info().vms + (1 << 20)
        before = process.rlimit(number)
        process.rlimit(number, (now, before[1]))

        def lift() -> None:
            with contextlib.suppress(psutil.Error):
                process.rlimit(number, before)

        return lift

    def states(self) -> dict[int, ProcessState]:
        for name in self._members:
            for pid in [self.pid(name), *self.rank_pids(name)]:
                with contextlib.suppress(psutil.Error):
                    self._seen.setdefault(pid, psutil.Process(pid))
        return states_of(self._seen.values())

    def _owner_of(self, port: int) -> str:
        """The worker whose connection comes from this port."""
        for name in self._workers:
            with contextlib.suppress(psutil.Error):
                if any(at.laddr.port == port for at in psutil.Process(self.pid(name)).net_connections("tcp")):
                    return name
        return "unknown"

    # Faults inside a worker: worker/faults/box.py

    async def arm(self, name: str, **rule: Any) -> str:
        """Have a worker follow a rule; returns its id once it does."""
        self._rule_serial += 1
        member, rule_id = self._members[name], str(self._rule_serial)
        member.rules.append({"id": rule_id, **rule})
        self._write_rules(member)
        await self._armed(name, rule_id)
        return rule_id

    def disarm(self) -> None:
        for member in self._members.values():
            if member.rules:
                member.rules = []
                self._write_rules(member)

    async def _armed(self, name: str, rule_id: str) -> None:
        """Returns once the rule is armed, or after the time for it."""
        deadline = time.monotonic() + ARMED_S
        while not self.times(name, rule_id, "armed") and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)

    def times(self, name: str, rule_id: str, what: str = "fired") -> list[float]:
        path = self._folder / f"{name}.log"
        lines: Sequence[str] = path.read_text().splitlines() if path.exists() else ()
        entries = [json.loads(line) for line in lines if line.endswith("}")]
        return [e["at_ns"] / 1e9 for e in entries if e["rule"] == rule_id and e["what"] == what]

    def _write_rules(self, member: Member) -> None:
        path = self._folder / f"{member.name}.rules"
        rules = [{key: value for key, value in rule.items() if key != "stays"} for rule in member.rules]
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(rules))
        temporary.replace(path)
