"""NCCL for process_group: the wire, the staging on a GPU, and the settings that keep a lost pair from harming others.

What NCCL makes necessary (read in its and torch's sources): a lost peer leaves an operation running on the GPU for
ever, and torch's watchdog would then end the process. So the watchdog only watches, a deadline of our own decides, and
`abort` ends the operation; then a new group is made under a new name. The watchdog must not abort either: that would
complete a receive whose bytes never came. Messages have no tags; both ends post them in the pair's order.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from engine.pages.memory import KvMemory
from engine.pages.page_table import Int64s, buffer_at, check_pages, pages_at
from engine.pages.rows import Seen
from kv_transfer.base import Segment, TransferError
from kv_transfer.checksum import Checksummer
from kv_transfer.transports.gpu.cuda import CopyQueue, Gpu
from kv_transfer.transports.wire import RECEIVER, SENDER, Wire

log = logging.getLogger(__name__)
dist: Any = torch.distributed

POLL_S = 20e-6
MEETING_S = 30.0  # at least, for both ranks to set up NCCL, which takes seconds at first
WATCHDOG_S = 86_400.0  # torch's own timeout, out of the way
BUFFER_BYTES = 64 << 20
DEFAULTS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}

# For a test of correctness on a machine with one GPU, on NCCL below 2.30: each process calls itself another host and
# they talk through sockets on loopback, at milliseconds a message. Never for serving.
ONE_GPU_SWITCH = "KVRELAY_NCCL_ONE_GPU"
ONE_GPU_SETTINGS = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
}
HOST_ID, HOST_ID_PREFIX = "NCCL_HOSTID", "kvrelay-"
MULTI_RANK_VERSION = (2, 30)
MULTI_RANK_KEY = "NCCL_MULTI_RANK_GPU_ENABLE"


def settings_for(chosen: Mapping[str, str], environ: Mapping[str, str], pid: int) -> dict[str, str]:
    """What the environment must say before NCCL is first used: what was chosen, then what is there, then ours."""
    ours = dict(DEFAULTS)
    if environ.get(ONE_GPU_SWITCH) == "1":
        ours |= ONE_GPU_SETTINGS | {HOST_ID: f"{HOST_ID_PREFIX}{pid}"}
    there = {key: environ[key] for key in ours if key in environ}
    if there.get(HOST_ID, "").startswith(HOST_ID_PREFIX):  # the process that started this one took it for itself
        del there[HOST_ID]
    return ours | there | dict(chosen)


def prepare(chosen: Mapping[str, str] | None = None) -> None:
    """Set this process's NCCL environment. NCCL reads it once, when its first group is made."""
    os.environ.update(settings_for(chosen or {}, os.environ, os.getpid()))


def loaded_version() -> tuple[int, ...] | None:
    """Of the NCCL that torch loaded, such as (2, 28, 9); None for a torch without it."""
    if torch.version.cuda is None:
        return None
    try:
        cuda: Any = torch.cuda  # half typed
        return tuple(cuda.nccl.version())[:3]
    except (ImportError, RuntimeError, AttributeError):
        return None


def set_up(settings: Mapping[str, str]) -> dict[str, int]:
    """What a GPU worker does before its first pair: sets NCCL's environment, tells its version (log and counter)."""
    version = loaded_version()
    if version is None:
        return {}
    prepare(settings)
    log.info("torch loaded NCCL %s", ".".join(map(str, version)))
    return {"nccl_version": version_code(version)}


def version_code(version: tuple[int, ...]) -> int:
    """As NCCL itself writes it: 22809 is 2.28.9."""
    major, minor, patch = (*version, 0, 0)[:3]
    return major * 10_000 + minor * 100 + patch


def why_not_on_one_gpu(version: tuple[int, ...] | None, environ: Mapping[str, str]) -> str:
    """Why two ranks cannot share one GPU here; empty when they can."""
    if environ.get(ONE_GPU_SWITCH) == "1":
        return ""
    shown = ".".join(map(str, version)) if version else "an unknown version"
    if version is None or version < MULTI_RANK_VERSION:
        return f"NCCL {shown} refuses two ranks on one GPU (from 2.30 {MULTI_RANK_KEY}=1 allows them); use cuda_ipc"
    if environ.get(MULTI_RANK_KEY) != "1":
        return (
            f"NCCL {shown} allows two ranks on one GPU only with {MULTI_RANK_KEY}: 1 in transfer.nccl; or use cuda_ipc"
        )
    return ""


def make_group(store: Any, rank: int, device: str) -> Any:
    """A two-rank group outside any default one. Its communicator is made by the first message, for which the receiver
    waits at the store: not only as long as a transfer may take, for the sender may still be loading its libraries."""
    prepare()
    store.set_timeout(timedelta(seconds=MEETING_S))
    torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timedelta(seconds=WATCHDOG_S)
    return dist.ProcessGroupNCCL(store, rank, 2, options)


@dataclass(frozen=True, slots=True, eq=False)
class _Posted:
    """An operation on its way. It keeps the buffer: NCCL knows its address only."""

    event: Any
    data: torch.Tensor
    done: Future[None] | None  # None: the greeting


class NcclWire(Wire):
    """Posts what it is given at once, in order, and looks whether the oldest is done."""

    def __init__(
        self,
        make_group: Callable[[], Any],
        rank: int,
        device: str,
        gpu: Gpu,
        queue: CopyQueue,
        peer: str,
        timeout_s: float,
    ) -> None:
        """`queue`: where the buffers are filled, and what an operation therefore starts after."""
        super().__init__(make_group, peer, timeout_s)
        self._rank = rank
        self._device = device
        self._queue = queue
        self._ends = gpu.queue()  # waits for the operations, and is waited for by nobody
        self._posted: deque[_Posted] = deque()
        self._waits_since_s = 0.0

    def open(self) -> None:
        opened: Future[None] = self._promise()
        self._thread.start()
        self._works.put((self._greet, opened))
        limit_s = max(MEETING_S, self._timeout_s)
        try:
            opened.result(limit_s)
        except TimeoutError:
            reason = f"{self._peer} did not come to the process group within {limit_s:g} s"
            self.abort(reason)
            raise TransferError(reason) from None

    def send(self, data: torch.Tensor) -> Future[None]:
        return self._put("send", data)

    def receive(self, data: torch.Tensor) -> Future[None]:
        return self._put("recv", data)

    def _put(self, what: str, data: torch.Tensor) -> Future[None]:
        done = self._promise()
        self._works.put((lambda: self._post(what, data, done), None))
        return done

    def _greet(self) -> None:
        """Make the group and move one byte, so that a pair that cannot talk is refused when it is opened."""
        self._meet()
        if self._error is not None:
            return
        with self._queue.current():
            data = torch.zeros(1, dtype=torch.uint8, device=self._device)
        self._post("send" if self._rank == SENDER else "recv", data, None)
        while self._posted and self._error is None:
            self._look(MEETING_S)

    def _post(self, what: str, data: torch.Tensor, done: Future[None] | None) -> None:
        with self._queue.current():
            operate = self._group.send if what == "send" else self._group.recv
            work = operate([data], RECEIVER if self._rank == SENDER else SENDER, 0)
        with self._ends.current():
            work.wait()  # the stream waits, not this thread
        if not self._posted:
            self._waits_since_s = time.monotonic()
        self._posted.append(_Posted(event=self._ends.mark(), data=data, done=done))

    def _look(self, timeout_s: float) -> None:
        """Keep the oldest promise if it is due; sleep a little if not. Raises RuntimeError after timeout_s."""
        if self._posted[0].event.query():
            oldest = self._posted.popleft()
            self._waits_since_s = time.monotonic()
            if oldest.done is not None:
                self._keep(oldest.done)
            return
        if time.monotonic() - self._waits_since_s > timeout_s:
            raise RuntimeError("the operation did not complete")
        time.sleep(POLL_S)

    def _run(self) -> None:
        try:
            while self._error is None:
                entry = self._works.get() if not self._posted else _poll(self._works)
                if entry is _NOTHING:
                    self._look(self._timeout_s)
                    continue
                if entry is None:
                    return
                post, done = entry
                post()
                if done is not None and not self._keep(done):
                    return
        except (RuntimeError, ValueError, TransferError) as error:
            self._on_error(error)
        finally:
            if self._group is not None:
                self._group.abort()  # ends what runs on the GPU; only then may the buffers go
            self._group = None
            self._posted.clear()


_NOTHING = object()


def _poll(works: Any) -> Any:
    return _NOTHING if works.empty() else works.get()


class GpuStaging:
    """Contiguous buffers on the GPU, reused in turn, and the kernels between them and the pages."""

    def __init__(self, memory: KvMemory, gpu: Gpu, timeout_s: float) -> None:
        self.queue = gpu.queue()
        self._memory = memory
        self._timeout_s = timeout_s
        self._buffers: list[torch.Tensor] = []

    def take(self, nbytes: int) -> torch.Tensor:
        buffer = self._buffers.pop() if self._buffers else None
        if buffer is None or buffer.untyped_storage().nbytes() < nbytes:
            with self.queue.current():
                capacity = max(nbytes, min(BUFFER_BYTES, self._memory.layout.total_bytes))
                buffer = torch.empty(capacity, dtype=torch.uint8, device=self._memory.bytes.device)
        return torch.empty(0, dtype=torch.uint8, device=buffer.device).set_(buffer.untyped_storage())[:nbytes]

    def give(self, buffer: torch.Tensor) -> None:
        self._buffers.append(buffer)

    def gather(self, segment: Segment, out: torch.Tensor, seen: Seen | None) -> None:
        """Launches it; `settle` waits for it."""
        layout, layers, pages = self._memory.layout, segment.layers, segment.src_pages
        self.queue.wait_for(segment.after)
        index = _existing(pages, layout.num_pages)
        self.queue.copy(
            pages_at(layout, self._memory.address, layers),
            buffer_at(layout, out.data_ptr(), layers, len(pages)),
            index,
            check_pages(range(len(pages)), len(pages)),
        )
        if seen is not None:
            self.settle()
            Checksummer(self._memory).show(layers, pages, seen)

    def settle(self) -> None:
        """The source pages are not read any more."""
        self.queue.finish(self._timeout_s)

    def scatter(self, segment: Segment, data: torch.Tensor) -> None:
        layout, layers, pages = self._memory.layout, segment.layers, segment.dst_pages
        index = _existing(pages, layout.num_pages)
        self.queue.wait_for(None)
        self.queue.copy(
            buffer_at(layout, data.data_ptr(), layers, len(pages)),
            pages_at(layout, self._memory.address, layers),
            check_pages(range(len(pages)), len(pages)),
            index,
        )
        self.queue.finish(self._timeout_s)


def _existing(pages: Any, num_pages: int) -> Int64s:
    try:
        return check_pages(pages, num_pages)
    except ValueError as error:
        raise TransferError(f"pages cannot be moved: {error}") from error


class Nccl:
    """What process_group needs to know of GPU memory. `make` makes a group: make_group, or a test's own."""

    def __init__(self, gpu: Gpu, make: Callable[[Any, int, str], Any] = make_group) -> None:
        self._gpu = gpu
        self._make = make

    @property
    def params(self) -> Mapping[str, str]:
        return {"kind": "nccl", "gpu": self._gpu.uuid}

    def check(self, params: Mapping[str, str], peer: str) -> None:
        """Raises TransferError when `peer` cannot be met."""
        if params.get("kind") != "nccl":
            raise TransferError(f"{peer}'s KV is on the CPU and ours on a GPU; give both pools the same device")
        if params.get("gpu") == self._gpu.uuid:
            reason = why_not_on_one_gpu(loaded_version(), os.environ)
            if reason:
                raise TransferError(f"{peer} is on our GPU, and {reason}")

    def staging(self, memory: KvMemory, timeout_s: float) -> GpuStaging:
        return GpuStaging(memory, self._gpu, timeout_s)

    def wire(
        self, store: Callable[[], Any], rank: int, memory: KvMemory, staging: Any, peer: str, timeout_s: float
    ) -> NcclWire:
        def make() -> Any:
            version = loaded_version()
            log.info("NCCL %s carries KV to and from %s", ".".join(map(str, version or ())) or "(a fake)", peer)
            return self._make(store(), rank, memory.device)

        return NcclWire(make, rank, memory.device, self._gpu, staging.queue, peer, timeout_s)
