"""NCCL for process_group: how KV in the memory of GPUs is moved between two ranks.

What NCCL makes necessary (read in its and torch's sources): a lost peer leaves an operation running on the GPU for
ever, and torch's watchdog would then end the process. So the watchdog only watches, a deadline of our own decides, and
`abort` ends the operation; then a new group is made under a new name. The watchdog must not abort either: that would
complete a receive whose bytes never came. Messages have no tags; both ends post them in the pair's order. The deadline
is the peer's alone: it counts from when the buffer of a message was ready, behind the layers that are computed.

A message is a broadcast between the two ranks that torch launches on the stream it is called in (`asyncOp` False, torch
2.8). A send and a receive would run on one of the 32 streams that all of a process's groups share: behind a lost
peer's, from some ten pairs on, other pairs would wait.
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
from engine.parallel.process_group import nccl_group
from kv_transfer.base import TransferError
from kv_transfer.transports.gpu.device import CopyQueue, Gpu
from kv_transfer.transports.gpu.nccl_settings import loaded_version, prepare, why_not_on_one_gpu
from kv_transfer.transports.gpu.staging import GpuStaging
from kv_transfer.transports.two_rank_group import PREFILL_RANK, TwoRankGroup

log = logging.getLogger(__name__)
dist: Any = torch.distributed

POLL_S = 20e-6
MEETING_S = 30.0  # at least, for both ranks to set up NCCL, which takes seconds at first
MAX_CTAS = 8  # that a message may take from the engine, about 20 GB/s each over NVLink; NCCL_MAX_CTAS wins


def make_group(store: Any, rank: int, device: str) -> Any:
    """A two-rank group outside any default one. Its communicator is made by the first message, for which the receiver
    waits at the store: not only as long as a transfer may take, for the sender may still be loading its libraries."""
    prepare()
    store.set_timeout(timedelta(seconds=MEETING_S))
    torch.cuda.set_device(device)
    return nccl_group(store, rank, 2, MAX_CTAS)


@dataclass(frozen=True, slots=True, eq=False)
class _Posted:
    """An operation on its way. It keeps the buffer: NCCL knows its address only."""

    ready: Any  # the event that it starts after, for which who fills the buffer waits, and as long as that may last
    event: Any
    data: torch.Tensor
    done: Future[None] | None  # None: the greeting


class NcclGroup(TwoRankGroup):
    """Posts what it is given at once, in order, and looks whether the oldest is done."""

    def __init__(
        self,
        make: Callable[[], Any],
        rank: int,
        device: str,
        gpu: Gpu,
        queue: CopyQueue,
        peer: str,
        timeout_s: float,
    ) -> None:
        """`queue`: where the buffers are filled, and what an operation therefore starts after."""
        super().__init__(make, peer, timeout_s)
        self._device = device
        self._gpu = gpu
        self._queue = queue
        self._messages = gpu.queue()
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
        return self._put(data)

    def receive(self, data: torch.Tensor) -> Future[None]:
        return self._put(data)

    def _put(self, data: torch.Tensor) -> Future[None]:
        done = self._promise()
        self._works.put((lambda: self._post(data, done), None))
        return done

    def _greet(self) -> None:
        """Make the group and move one byte, so that a pair that cannot talk is refused when it is opened."""
        self._meet()
        if self._error is not None:
            return
        with self._queue.current():
            data = torch.zeros(1, dtype=torch.uint8, device=self._device)
        free_before = self._gpu.free_bytes
        self._post(data, None)
        while self._posted and self._error is None:
            self._look(MEETING_S)
        taken = max(0, free_before - self._gpu.free_bytes) / (1 << 20)
        log.info("NCCL took %.0f MiB of the GPU for the pair with %s", taken, self._peer)

    def _post(self, data: torch.Tensor, done: Future[None] | None) -> None:
        ready = self._queue.mark()
        self._messages.wait_for(ready)
        with self._messages.current():
            self._process_group.broadcast([data], _from_sender())
        if not self._posted:
            self._waits_since_s = time.monotonic()
        self._posted.append(_Posted(ready, self._messages.mark(), data, done))

    def _look(self, timeout_s: float) -> None:
        """Keep the oldest promise if it is due; sleep a little if not. Raises RuntimeError when it has been ready for
        timeout_s."""
        oldest = self._posted[0]
        if oldest.event.query():
            self._posted.popleft()
            self._waits_since_s = time.monotonic()
            if oldest.done is not None:
                self._keep(oldest.done)
            return
        if not oldest.ready.query():
            self._waits_since_s = time.monotonic()
        elif time.monotonic() - self._waits_since_s > timeout_s:
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
            if self._process_group is not None:
                self._process_group.abort()  # ends what runs on the GPU; only then may the buffers go
            self._process_group = None
            self._posted.clear()


def _from_sender() -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.asyncOp = PREFILL_RANK, 0, False
    return options


_NOTHING = object()


def _poll(works: Any) -> Any:
    return _NOTHING if works.empty() else works.get()


class Nccl:
    """What process_group needs to know of GPU memory. `make` makes a group: make_group, or a test's own."""

    def __init__(self, gpu: Gpu, make: Callable[[Any, int, str], Any] = make_group) -> None:
        self._gpu = gpu
        self._make = make

    @property
    def params(self) -> Mapping[str, str]:
        return {"kind": "nccl", "gpu": self._gpu.uuid}

    def meeting_s(self, timeout_s: float) -> float:
        return max(MEETING_S, timeout_s)

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

    def group(
        self, store: Callable[[], Any], rank: int, memory: KvMemory, staging: Any, peer: str, timeout_s: float
    ) -> NcclGroup:
        def make() -> Any:
            version = loaded_version()
            log.info("NCCL %s carries KV to and from %s", ".".join(map(str, version or ())) or "(a fake)", peer)
            return self._make(store(), rank, memory.device)

        return NcclGroup(make, rank, memory.device, self._gpu, staging.queue, peer, timeout_s)
