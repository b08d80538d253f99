"""Gloo for process_group: how KV in CPU memory is moved between two ranks.

What gloo makes necessary (measured): a message larger than the buffer it arrives in ends the process, so a message's
size is its tag too, and a message of another size matches no receive and times out. Its timeout is for a whole
message, so a segment goes in pieces: a slow link moves one in time, and a peer that moves none is gone. Its port, open
as long as the group, asks a caller for a small number only, so each rank shows the other first that it is the one at
the store. What a stranger who comes before that can still do is to end the pair: tcp.py does not have this weakness.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from engine.pages.memory import KvMemory
from engine.pages.rows import Seen
from engine.parallel.process_group import gloo_group
from kv_transfer.base import Segment, TransferError
from kv_transfer.transports.two_rank_group import DECODE_RANK, PREFILL_RANK, TwoRankGroup, first_line

PROOF_BYTES = 32
PROOF_TAG = 0  # no segment is empty
PIECE_BYTES = 1 << 20  # of one message: 1.7 Mbit/s bring it in the 5 s of timeout_s
BUFFER_BYTES = 8 << 20  # at least, so that segments of all sizes share buffers whose memory is there already


class Gloo:
    """`host`: the address that says which network is used."""

    params: Mapping[str, str] = {"kind": "gloo"}

    def __init__(self, host: str) -> None:
        self._host = host

    def meeting_s(self, timeout_s: float) -> float:
        return timeout_s

    def check(self, params: Mapping[str, str], peer: str) -> None:
        if params.get("kind") != "gloo":
            raise TransferError(f"{peer}'s KV is on a GPU and ours on the CPU; give both pools the same device")

    def staging(self, memory: KvMemory, timeout_s: float) -> CpuStaging:
        return CpuStaging(memory)

    def group(
        self, store: Callable[[], Any], rank: int, memory: KvMemory, staging: Any, peer: str, timeout_s: float
    ) -> GlooGroup:
        def make() -> Any:
            met_at = store()
            group = gloo_group(met_at, rank, 2, self._host, timeout_s)
            prove(group, met_at, rank)
            return group

        return GlooGroup(make, peer, timeout_s)


class GlooGroup(TwoRankGroup):
    """`abort` does not wake a blocked wait of gloo's; only its timeout ends it."""

    def send(self, data: torch.Tensor) -> Future[None]:
        """Posted in the group's thread: gloo writes to the socket in the call, and the caller has pages to gather."""
        done = self._promise()
        self._works.put((lambda: [self._process_group.send([x], DECODE_RANK, _tag(x)) for x in _pieces(data)], done))
        return done

    def receive(self, data: torch.Tensor) -> Future[None]:
        """Posted at once, so that the bytes may come before anybody waits for them."""
        done = self._promise()
        try:
            works = [self._process_group.recv([x], PREFILL_RANK, _tag(x)) for x in _pieces(data)]
        except (RuntimeError, ValueError) as error:
            self.abort(f"cannot reach {self._peer}: {first_line(error)}")
            raise TransferError(f"cannot reach {self._peer}: {first_line(error)}") from error
        self._works.put((lambda: (works, data)[0], done))  # gloo knows the buffer's address only: it must live as long
        return done

    def _run(self) -> None:
        try:
            while (entry := self._works.get()) is not None:
                post, done = entry
                for work in post() or ():
                    work.wait()
                if not self._keep(done):
                    return
        except (RuntimeError, ValueError) as error:
            self._on_error(error)
        finally:
            self._process_group = None


def _pieces(data: torch.Tensor) -> Sequence[torch.Tensor]:
    return torch.split(data, PIECE_BYTES)


def _tag(data: torch.Tensor) -> int:
    """The size, within the 31 bits of a tag."""
    return data.numel() % (1 << 31)


class CpuStaging:
    def __init__(self, memory: KvMemory) -> None:
        self._rows = memory.rows
        self._buffers: list[torch.Tensor] = []

    def take(self, nbytes: int) -> torch.Tensor:
        buffer = self._buffers.pop() if self._buffers else torch.empty(0, dtype=torch.uint8)
        if buffer.numel() < nbytes:
            buffer = torch.empty(max(nbytes, BUFFER_BYTES), dtype=torch.uint8)
        return buffer[:nbytes]

    def give(self, buffer: torch.Tensor) -> None:
        self._buffers.append(torch.empty(0, dtype=torch.uint8).set_(buffer.untyped_storage()))

    def gather(self, segment: Segment, out: torch.Tensor, seen: Seen | None) -> None:
        self._rows.gather(segment.layers, segment.src_pages, out.numpy(), seen)

    def settle(self) -> None:
        pass

    def scatter(self, segment: Segment, data: torch.Tensor) -> None:
        self._rows.scatter(segment.layers, segment.dst_pages, data.numpy())


def prove(group: Any, store: Any, rank: int) -> None:
    """Raise RuntimeError unless the rank at the other end of `group` is the other one at `store`."""
    other = DECODE_RANK if rank == PREFILL_RANK else PREFILL_RANK
    ours = secrets.token_bytes(PROOF_BYTES)
    store.set(f"proof/{rank}", ours)
    shown = torch.zeros(PROOF_BYTES, dtype=torch.uint8)
    received = group.recv([shown], other, PROOF_TAG)
    group.send([torch.frombuffer(bytearray(ours), dtype=torch.uint8)], other, PROOF_TAG).wait()
    received.wait()
    if not hmac.compare_digest(shown.numpy().tobytes(), store.get(f"proof/{other}")):
        raise RuntimeError("somebody else is at the other end")
