"""Collectives of a stage's ranks, and the way from each to the next stage, by torch ProcessGroups: NCCL on GPUs, in the
current stream, so that a CUDA graph holds them; gloo on CPUs, where it proves the way of GPUs.

The groups are outside any default one. Those of one meet at a file in a folder that only this user may enter, so no
store has a port. NCCL ends nothing by itself (its watchdog only watches): who hears that a process is lost calls
`abort`, and what waits on the GPU ends. A communicator is given back only when no graph holds it any more.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from engine.options import EngineOptions
from engine.parallel.shard import Position, Shard

dist: Any = torch.distributed  # its names are not all in its type stubs
WATCHDOG_S = 86_400.0  # NCCL's own timeout, out of the way
NCCL_DEFAULTS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # for which it would look into the store each second, which is gone by then
}


def check_gpus(options: EngineOptions, device: torch.device) -> None:
    """Raise ValueError unless each process has a GPU of its own, from the first on, whose memory the leader reaches."""
    size, count = options.num_processes, torch.cuda.device_count()
    if device.index:
        raise ValueError(
            f"device is {options.device!r} with {options.degrees}, whose GPUs are the first ones; "
            "give device: cuda, and CUDA_VISIBLE_DEVICES to choose them"
        )
    if count < size:
        raise ValueError(f"{options.degrees} is {size} processes, and {count} GPUs are visible; give at most {count}")
    apart = [str(other) for other in range(1, size) if not torch.cuda.can_device_access_peer(0, other)]
    if apart:
        raise ValueError(
            f"{options.degrees} wants GPUs whose memory GPU 0 reaches, and it does not that of {', '.join(apart)}; "
            "choose GPUs with peer access (nvidia-smi topo -p2p r) by CUDA_VISIBLE_DEVICES, or leave it out"
        )


def gloo_group(store: Any, rank: int, size: int, host: str, timeout_s: float) -> Any:
    """Outside any default group, over the network of that address. Blocks until all ranks are there."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._threads = 1
    return dist.ProcessGroupGloo(store, rank, size, options)


def nccl_group(store: Any, rank: int, size: int, max_ctas: int | None = None) -> Any:
    """The same on GPUs; the first message makes its communicator. One takes `max_ctas` multiprocessors at most."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timedelta(seconds=WATCHDOG_S)
    if max_ctas is not None:
        options.config.max_ctas = max_ctas
    return dist.ProcessGroupNCCL(store, rank, size, options)


def make_group(meeting: Path, shard: Shard, device: torch.device, timeout_s: float) -> Any:
    """Blocks until all ranks are there, each with the same `meeting`, a file that is not there yet."""
    store = dist.FileStore(str(meeting), shard.size)
    if device.type == "cpu":
        return gloo_group(store, shard.rank, shard.size, "127.0.0.1", timeout_s)
    for key, value in NCCL_DEFAULTS.items():
        os.environ.setdefault(key, value)
    store.set_timeout(timedelta(seconds=timeout_s))
    return nccl_group(store, shard.rank, shard.size)


class GroupCollectives:
    """Every rank calls the same ones in the same order. On GPUs they are queued, and nobody waits here."""

    def __init__(self, group: Any, shard: Shard) -> None:
        self._group = group
        self._shard = shard

    @classmethod
    def meet(cls, meeting: Path, shard: Shard, device: torch.device, timeout_s: float) -> GroupCollectives:
        """Also the first collective, which makes NCCL's communicator: no graph could hold that."""
        met = cls(make_group(meeting, shard, device, timeout_s), shard)
        met.sum(torch.zeros(1, device=device))
        return met

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `x`, in its place: a product that nobody else reads."""
        total = x.contiguous()
        _queue(self._group.allreduce([total], _here(dist.AllreduceOptions())))
        return total

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """At rank 0 all ranks' `x` side by side in the last dimension; elsewhere the rank's own."""
        x = x.contiguous()
        parts = x.new_empty(self._shard.size, *x.shape)
        _queue(self._group._allgather_base(parts.view(-1), x.view(-1), _here(dist.distributed_c10d.AllgatherOptions())))
        return torch.cat(list(parts), dim=-1) if self._shard.rank == 0 else x

    def broadcast(self, x: torch.Tensor) -> None:
        """Rank 0's `x` into all others'."""
        _queue(self._group.broadcast([x], _from_first()))

    def abort(self) -> None:
        """What waits in the group ends, with whatever bytes. A wait of gloo's ends by its timeout. Lasts, with NCCL,
        until no graph holds the group."""
        self._group.abort()


class GroupHop:
    """Hidden states from one process to another: the two are a group. A message is a broadcast: a send and a receive
    would go over a stream that others use."""

    def __init__(self, group: Any, like: torch.Tensor) -> None:
        """`like` [1, any, N]: hidden states, on the device."""
        self._group = group
        self._like = like

    @classmethod
    def meet(cls, meeting: Path, rank: int, like: torch.Tensor, timeout_s: float) -> GroupHop:
        """Rank 0 sends. Also the first message, as of collectives."""
        hop = cls(make_group(meeting, Shard(rank, 2), like.device, timeout_s), like)
        hop._message(torch.zeros(1, device=like.device))
        return hop

    def receive(self, num_rows: int) -> torch.Tensor:
        hidden_TN = self._like.new_empty(num_rows, self._like.shape[-1])
        self._message(hidden_TN)
        return hidden_TN

    def send(self, hidden_TN: torch.Tensor) -> None:
        self._message(hidden_TN.contiguous())

    def _message(self, x: torch.Tensor) -> None:
        """From rank 0's `x` into the other's."""
        _queue(self._group.broadcast([x], _from_first()))

    def abort(self) -> None:
        self._group.abort()


def _here(options: Any) -> Any:
    """NCCL launches on the stream that it is called in, not on one of its own that waits for that and is waited for."""
    options.asyncOp = False
    return options


def _from_first() -> Any:
    options = _here(dist.BroadcastOptions())
    options.rootRank, options.rootTensor = 0, 0
    return options


def _queue(work: Any) -> None:
    """On a CPU it is done then."""
    if work is not None:
        work.wait()


@dataclass(frozen=True, slots=True)
class Groups:
    """Those of one process."""

    collectives: GroupCollectives | None
    into: GroupHop | None
    out: GroupHop | None
    _once: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def meet(cls, folder: Path, position: Position, like: torch.Tensor, timeout_s: float) -> Groups:
        """First the ranks of each stage, then each two that hand on, from the first stage to the last: so nobody waits
        in a circle. `like`: hidden states, as of GroupHop."""
        stage, shard = position.stage, position.shard
        at = [folder / f"to-stage-{number}-{shard.rank}" for number in (stage.number, stage.number + 1)]
        return cls(
            GroupCollectives.meet(folder / f"stage-{stage.number}", shard, like.device, timeout_s)
            if shard.size > 1
            else None,
            None if stage.is_first else GroupHop.meet(at[0], 1, like, timeout_s),
            None if stage.is_last else GroupHop.meet(at[1], 0, like, timeout_s),
        )

    def abort(self) -> None:
        """From any thread, and once. Nobody waits until it is done: while a graph holds one of them that is never, but
        what waits on the GPU ends all the same. So each has a thread of its own, and none keeps the process."""
        if not self._once.acquire(blocking=False):
            return
        for group in (self.collectives, self.into, self.out):
            if group is not None:
                threading.Thread(target=group.abort, name="abort of a process group", daemon=True).start()
