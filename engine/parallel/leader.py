"""Ranks are the other processes of a tensor-parallel worker, as its leader sees them.

    start: one process for each rank, with one end of a socket pair -> each loads and cuts the model for itself
    join:  all have loaded -> the private process group -> projections meet
    run:   the step's arrays go to every rank, and all run it at once

Only the leader has a policy, a driver and a sampler. The other ranks run the steps that it sends and keep nothing but
weights: the KV pages are the leader's, mapped by all, each rank reading and writing its own heads. Once a rank is lost,
or a step has failed anywhere, the ranks are out of step for good: every later call raises EngineBroken.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
import selectors
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from engine.attention import hooks
from engine.attention.base import StepMeta
from engine.attention.hooks import UnsupportedModel
from engine.execution import EngineBroken
from engine.loader import load_config, set_attention
from engine.parallel import sharding
from engine.parallel.collectives import Collectives, make_store, named
from engine.parallel.frames import BadFrame, Channel, Frame
from engine.parallel.sharding import HeadSlice, Shard
from kv_transfer.memory import KvMemory

if TYPE_CHECKING:
    from engine.engine import EngineOptions

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 1800.0  # a rank loads as much as its leader, beside it
MEET_TIMEOUT_S = 60.0  # a rank that lives and does not answer; one that dies is noticed at once
NEWS_S = 0.5  # what failed here may be what a rank's end brought about, which is heard of a moment later
END_TIMEOUT_S = 2.0  # that a rank whose socket has closed may take to end
META_ARRAYS = ("token_ids", "positions", "query_starts", "starts", "block_tables", "slots")

Forward = Callable[[KvMemory, StepMeta, torch.Tensor | None, Callable[[int], None] | None], torch.Tensor]


class Ranks:
    @classmethod
    def started(cls, options: EngineOptions, at: torch.device) -> Ranks:
        """Start the processes, which load beside the leader. Raises ValueError, UnsupportedModel for what cannot be."""
        size = options.tensor_parallel
        if at.type != "cpu":
            raise ValueError(f"tensor_parallel is {size}, and on GPUs only 1 is served; give replicas, or device: cpu")
        sharding.check_config(load_config(options.model), size)
        threads = options.threads or max(1, torch.get_num_threads() // size)
        torch.set_num_threads(threads)
        return cls(dataclasses.replace(options, threads=threads))

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self.shard = Shard(0, options.tensor_parallel)
        self._watch = _Watch(options)
        self._finalizer = weakref.finalize(self, self._watch.close)  # whoever forgets to close leaves no process
        self._cuts: list[sharding.Cut] = []
        self._store: Any = None
        self._shared: KvMemory | None = None  # that the ranks have mapped
        self._on_layer: Callable[[int], None] | None = None

    def cut(self, model: PreTrainedModel, whole: hooks.Probe, max_len: int) -> None:
        """Leave the leader its own part of the model. Raises UnsupportedModel."""
        self._cuts = sharding.shard_model(model, self.shard, whole.layer_of)
        sharding.check_shapes(model, whole, max_len, self.shard)
        set_attention(model, hooks.SERVE)

    def join(self) -> None:
        """Wait for every rank, and let the prepared projections meet. Raises UnsupportedModel, EngineBroken."""
        self._watch.wait_loaded(LOAD_TIMEOUT_S)
        self._store, port = make_store(MEET_TIMEOUT_S)
        name = f"ranks-{secrets.token_hex(8)}"
        self._watch.send(Frame("group", {"port": port, "name": name, "timeout_s": MEET_TIMEOUT_S}))
        collectives = self._guarded(lambda: Collectives(named(name, self._store), self.shard, MEET_TIMEOUT_S))
        sharding.connect(self._cuts, collectives, self._tell)
        logger.info(
            "tensor parallel over %d processes: this one and %s",
            self.shard.size,
            ", ".join(map(str, self._watch.pids)),
        )

    def run(
        self,
        memory: KvMemory,
        meta: StepMeta,
        rows: torch.Tensor | None,
        on_layer: Callable[[int], None] | None,
        forward: Forward,
    ) -> torch.Tensor:
        """The logits of a step that all ranks run over `memory`. Raises EngineBroken."""
        self.check()
        if memory is not self._shared:
            self._share(memory)
        arrays = {name: getattr(meta, name).numpy() for name in META_ARRAYS}
        if rows is not None:
            arrays["rows"] = rows.numpy()
        self._watch.send(Frame("step", {"page_size": meta.page_size}, arrays))
        self._on_layer = on_layer
        pages = HeadSlice(memory, self.shard)
        return self._guarded(lambda: forward(pages, meta, rows, None))

    def check(self) -> None:
        """Raise EngineBroken once a rank is lost or out of step."""
        self._watch.check()

    def close(self) -> None:
        """End the processes. A second call does nothing."""
        self._finalizer()

    @property
    def pids(self) -> tuple[int, ...]:
        return self._watch.pids

    def _share(self, memory: KvMemory) -> None:
        layout = memory.layout
        fields = {
            "page_size": layout.page_size,
            "dtype": layout.dtype,
            "num_pages": layout.num_pages,
            "layers": [[layer.kv_heads, layer.k_dim, layer.v_dim] for layer in layout.layers],
        }
        assert memory.fd is not None, "the ranks of a worker share CPU memory"
        self._watch.send(Frame("memory", fields, files=(memory.fd,)))
        self._shared = memory

    def _tell(self, layer: int) -> None:
        if self._on_layer is not None:
            self._on_layer(layer)

    def _guarded(self, work: Callable[[], Any]) -> Any:
        """Whatever fails between the ranks' meetings leaves the others waiting there: nothing can go on."""
        try:
            return work()
        except Exception as error:
            raise self._watch.broke(f"rank 0 failed: {type(error).__name__}: {error}") from error


class _Watch:
    """Starts the processes, in a thread that lives as long as they, and listens to them there.

    (The kernel ends a process with the *thread* that started it, so no passing thread may start one.)
    """

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._processes: dict[int, subprocess.Popen[bytes]] = {}  # by rank
        self._channels: dict[int, Channel] = {}
        self._changed = threading.Condition()
        self._loaded: set[int] = set()
        self._refused = ""
        self._broken = ""
        self._is_closed = False
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._main, name="ranks", daemon=True)
        self._started = threading.Event()
        self._thread.start()
        self._started.wait()
        self.check()

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes.values())

    def check(self) -> None:
        if self._broken:
            raise EngineBroken(self._broken)

    def broke(self, reason: str) -> EngineBroken:
        """Note what broke, end the ranks, and return the error to raise."""
        with self._changed:
            if not self._broken:  # a rank that died is the reason, whatever its end brought about here
                self._changed.wait_for(lambda: bool(self._broken), NEWS_S)
            self._broken = self._broken or reason
            self._changed.notify_all()
        self._kill()
        return EngineBroken(self._broken)

    def send(self, frame: Frame) -> None:
        """To every rank. Raises EngineBroken."""
        for rank, channel in self._channels.items():
            try:
                channel.send(frame)
            except OSError as error:
                raise self.broke(f"rank {rank} takes no step: {error.strerror or error}") from error

    def wait_loaded(self, timeout_s: float) -> None:
        """Raises UnsupportedModel for what a rank refuses, EngineBroken when one is lost or late."""
        with self._changed:
            done = self._changed.wait_for(
                lambda: len(self._loaded) == len(self._processes) or bool(self._refused or self._broken), timeout_s
            )
        if self._refused:
            raise UnsupportedModel(self._refused)
        if not done:
            raise self.broke(f"the ranks have not loaded after {timeout_s:g} s")
        self.check()

    def close(self) -> None:
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._broken = self._broken or "the engine is closed"
            self._changed.notify_all()
        self._kill()
        self._wake.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(END_TIMEOUT_S)

    def _kill(self) -> None:
        for process in self._processes.values():
            process.kill()

    def _main(self) -> None:
        try:
            for rank in range(1, self._options.tensor_parallel):
                self._start(rank)
        except OSError as error:
            self._broken = f"the ranks cannot be started: {error}"
        finally:
            self._started.set()
        self._listen()
        for process in self._processes.values():
            process.kill()
            process.wait()
        for channel in self._channels.values():
            channel.close()
        self._woken.close()

    def _start(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(MEET_TIMEOUT_S)
        with theirs:
            self._processes[rank] = subprocess.Popen(
                [sys.executable, "-m", "engine.parallel.rank", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=_environment(self._options),
            )
        self._channels[rank] = Channel(ours)
        options = dataclasses.asdict(self._options)
        self._channels[rank].send(Frame("begin", {"rank": rank, "options": options}))

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ, 0)
            for rank, channel in self._channels.items():
                selector.register(channel, selectors.EVENT_READ, rank)
            while not self._broken:
                for key, _ in selector.select():
                    if key.data and not self._is_closed:
                        self._hear(key.data)

    def _hear(self, rank: int) -> None:
        try:
            frame = self._channels[rank].receive()
        except (OSError, BadFrame) as error:
            frame = Frame("failed", {"reason": f"{type(error).__name__}: {error}"})
        end = _end_of(self._processes[rank]) if frame is None else ""
        with self._changed:
            if frame is None:
                self._broken = self._broken or f"rank {rank} {end}"
            elif frame.kind == "loaded":
                self._loaded.add(rank)
            elif frame.kind == "refused":
                self._refused = self._refused or str(frame.fields["reason"])
            else:
                self._broken = self._broken or f"rank {rank} failed: {frame.fields.get('reason', frame.kind)}"
            self._changed.notify_all()
        if self._broken:
            logger.error("%s; the worker's ranks end", self._broken)
            self._kill()


def _end_of(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"(process {process.pid}) has closed its socket"
    how = f"was ended by signal {-code}" if code < 0 else f"has ended with exit code {code}"
    return f"(process {process.pid}) {how}"


def _environment(options: EngineOptions) -> Mapping[str, str]:
    """The leader's, with the threads of one rank: libraries read them when they are imported."""
    from engine.service_thread import THREAD_KEYS

    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    threads = {key: str(options.threads) for key in THREAD_KEYS}
    return {**os.environ, **threads, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": path}
