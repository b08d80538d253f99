"""Collectives of a worker's ranks: a private process group over loopback, outside any default group.

Sums are made from gathered parts in the order of the ranks, in float32 and rounded once, so that every rank has the
same bits and a row's bits do not depend on where in the batch it stands. A ring's sum would depend on it from three
ranks on.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from engine.parallel.shard import Shard

dist: Any = torch.distributed  # its names are not all in its type stubs

LOOPBACK = "127.0.0.1"


class Collectives:
    """Every rank calls the same ones in the same order. What a lost peer brings is RuntimeError, at once with gloo."""

    def __init__(self, store: Any, shard: Shard, timeout_s: float) -> None:
        """Blocks until all ranks are there. `store`: one that they share, under a name of their own."""
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [gloo.create_device(hostname=LOOPBACK)]
        options._threads = 1
        self._group = gloo(store, shard.rank, shard.size, options)
        self._shard = shard

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `x`."""
        parts = x.new_empty(self._shard.size, *x.shape)
        self._group.allgather([list(parts.unbind(0))], [x.contiguous()]).wait()
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part
        return total.to(x.dtype)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """At rank 0 all ranks' `x` side by side in the last dimension; elsewhere the rank's own."""
        options = dist.GatherOptions()
        options.rootRank = 0
        parts = [torch.empty_like(x) for _ in range(self._shard.size)] if self._shard.rank == 0 else []
        self._group.gather([parts] if parts else [], [x.contiguous()], options).wait()
        return torch.cat(parts, dim=-1) if parts else x


def make_store(timeout_s: float) -> tuple[Any, int]:
    """The leader's store, and its port on loopback."""
    store = dist.TCPStore(LOOPBACK, 0, None, True, timedelta(seconds=timeout_s), wait_for_workers=False)
    return store, int(store.port)


def join_store(port: int, timeout_s: float) -> Any:
    return dist.TCPStore(LOOPBACK, port, None, False, timedelta(seconds=timeout_s))


def named(name: str, store: Any) -> Any:
    return dist.PrefixStore(name, store)
