"""Collectives of a worker's ranks, which are processes of one host: through memory that all have mapped.

    write the own part -> a byte to every other rank -> a byte from each of them -> read all parts

Nothing listens anywhere, and there is nothing to name, to find or to authenticate: the memory and a socket pair for
every two ranks are made by the leader, which hands each rank its ends. A rank has two slots and writes them in turn:
it comes to the first again only after a meeting for which every other rank had finished reading it.

Sums are made in the order of the ranks, in float32 and rounded once, so that every rank has the same bits and a row's
bits do not depend on where in the batch it stands. A ring's sum would depend on it from three ranks on.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Iterator, Sequence
from itertools import combinations

import torch

from engine.parallel.shard import Shard

SLOT_BYTES = 1 << 20  # what is larger meets in parts, each while it is in the cache
TURNS = 2
ROUNDS = 256  # meetings are counted in a byte


def make_seats(size: int) -> list[list[int]]:
    """The open files of each rank: the memory, then a socket to each other rank, in their order."""
    memory = os.memfd_create("kvrelay-ranks", os.MFD_CLOEXEC)
    os.ftruncate(memory, TURNS * size * SLOT_BYTES)
    seats = [[memory if rank == 0 else os.dup(memory)] for rank in range(size)]
    for one, other in combinations(range(size), 2):
        for rank, end in zip((one, other), socket.socketpair(), strict=True):
            seats[rank].append(end.detach())
    return seats


class Collectives:
    """Every rank calls the same ones in the same order. Raises ConnectionError for a rank that is lost, at once, and
    TimeoutError for one that does not come."""

    def __init__(self, seat: Sequence[int], shard: Shard, timeout_s: float) -> None:
        """`seat`: of make_seats; its files are ours from here."""
        memory, *ends = seat
        self._shard = shard
        others = (rank for rank in range(shard.size) if rank != shard.rank)
        self._sockets = {rank: socket.socket(fileno=end) for rank, end in zip(others, ends, strict=True)}
        for end in self._sockets.values():
            end.settimeout(timeout_s)
        mapped = mmap.mmap(memory, TURNS * shard.size * SLOT_BYTES)
        os.close(memory)
        self._slots = torch.frombuffer(mapped, dtype=torch.uint8).view(TURNS, shard.size, SLOT_BYTES)
        self._round = 0

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `x`."""
        total = torch.empty_like(x, memory_format=torch.contiguous_format)
        flat = total.view(-1)
        for at, parts in self._meet(x):
            added = parts[0].float()
            for part in parts[1:]:
                added = added + part
            flat[at] = added
        return total

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """At rank 0 all ranks' `x` side by side in the last dimension; elsewhere the rank's own."""
        is_root = self._shard.rank == 0
        gathered = x.new_empty(self._shard.size if is_root else 0, x.numel())
        for at, parts in self._meet(x):
            if is_root:
                gathered[:, at] = parts
        return torch.cat([part.view(x.shape) for part in gathered], dim=-1) if is_root else x

    def close(self) -> None:
        for end in self._sockets.values():
            end.close()

    def _meet(self, x: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Where in `x`, and all ranks' parts of it, [ranks, numbers]. They are valid until the next is asked for."""
        flat, step = x.reshape(-1), SLOT_BYTES // x.element_size()
        for start in range(0, flat.numel(), step):
            at = slice(start, min(start + step, flat.numel()))
            mine = flat[at]
            slots = self._slots[self._round % TURNS, :, : mine.nbytes].view(x.dtype)
            slots[self._shard.rank] = mine
            self._tell_and_hear()
            yield at, slots

    def _tell_and_hear(self) -> None:
        number = self._round.to_bytes()
        self._round = (self._round + 1) % ROUNDS
        for end in self._sockets.values():
            end.send(number)
        for rank, end in self._sockets.items():
            heard = end.recv(1)
            if not heard:
                raise ConnectionError(f"rank {rank} is gone")
            if heard != number:
                raise RuntimeError(f"rank {rank} is at meeting {heard[0]}, and this rank at {number[0]}")
