"""One rank of a tensor-parallel worker, other than its leader: `python -m engine.parallel.rank FD PARENT`.

    begin (options, rank) -> load, cut, prepare -> loaded | refused -> seat -> [memory, step ...] until the leader ends

It decides nothing and keeps no queue: it runs the steps that the leader sends, over its share of the pages. It ends
with the leader: by the kernel's signal when that dies, by the end of its socket otherwise.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
from dataclasses import dataclass
from typing import Any

import torch

from engine.attention import hooks
from engine.loading.cpu import CpuPlatform
from engine.options import EngineOptions
from engine.paged_model import PagedModel
from engine.pages.memory import KvMemory
from engine.pages.share import Share
from engine.parallel import sharding
from engine.parallel.collectives import Collectives
from engine.parallel.frames import Channel, Frame
from engine.parallel.meetings import Cut, connect
from engine.parallel.messages import copies_of, layout_of, share_frame, step_of
from engine.parallel.shard import Shard
from engine.process import LOG_FORMAT, pin_process, sentence_of
from engine.weights import loader, ropes
from engine.weights.config import served_config

PR_SET_PDEATHSIG = 1
FAILED_EXIT_CODE = 1

logger = logging.getLogger("engine.parallel.rank")


def end_with_parent(parent: int) -> None:
    """Have the kernel end this process when its parent dies, or end now if that has happened already."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(FAILED_EXIT_CODE)


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank has of the model, ready to run."""

    model: PagedModel
    cuts: list[Cut]


def load_part(options: EngineOptions, shard: Shard) -> Part:
    """As the leader loads, but for the checks that are its own. Raises UnsupportedModel."""
    platform, served = CpuPlatform(), served_config(options)
    module = loader.load_model(options.model, served.config, served.dtype, platform.device)
    ropes.adopt(module, served.rope)
    whole = loader.probe_model(module, served.max_len)
    cuts = sharding.shard_model(module, shard, whole)
    loader.set_attention(module, hooks.SERVE)
    return Part(platform.prepare(module, whole, options, served), cuts)


class Rank:
    def __init__(self, channel: Channel, shard: Shard, part: Part) -> None:
        self._channel = channel
        self._shard = shard
        self._part = part
        self._memory: KvMemory | None = None  # until the leader has asked for it

    def serve(self) -> None:
        """Run what the leader sends until it ends."""
        while (frame := self._channel.receive()) is not None:
            if frame.kind == "step":
                self._step(frame)
            elif frame.kind == "copy":
                self._pages.copy_pages(copies_of(frame))
            elif frame.kind == "memory":
                self._allocate(frame)
            elif frame.kind == "poison":
                self._pages.poison()
            elif frame.kind == "seat":
                collectives = Collectives(frame.files, self._shard, float(frame.fields["timeout_s"]))
                connect(self._part.cuts, collectives, _nobody)

    @property
    def _pages(self) -> KvMemory:
        assert self._memory is not None, "a step before its memory"
        return self._memory

    def _allocate(self, frame: Frame) -> None:
        self._memory = None  # its bytes are free before others are taken
        share = Share(self._shard.rank, self._shard.size)
        self._memory = KvMemory(layout_of(frame), str(self._part.model.device), share=share)
        self._channel.send(share_frame(self._memory))
        self._memory.close()  # of its file the leader has its own

    def _step(self, frame: Frame) -> None:
        meta, rows = step_of(frame)
        self._part.model.run_alone(self._pages, meta, rows)


def _nobody(layer: int) -> None:
    return


def main(fd: int, parent: int) -> int:
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the leader decides
    logging.basicConfig(level=os.environ.get("KVRELAY_LOG_LEVEL", "WARNING"), format=LOG_FORMAT)
    channel = Channel(socket.socket(fileno=fd))
    begin = channel.receive()
    if begin is None:
        return FAILED_EXIT_CODE
    number, options = int(begin.fields["rank"]), _options(begin.fields["options"])
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with torch.inference_mode():
        shard = Shard(number, options.tensor_parallel)
        try:
            part = load_part(options, shard)
        except Exception as error:  # the leader says it: most likely it refuses the same
            channel.send(Frame("refused", {"reason": sentence_of(error)}))
            return FAILED_EXIT_CODE
        pin_process(options.rank_cpus[number] if options.rank_cpus else ())
        channel.send(Frame("loaded"))
        try:
            Rank(channel, shard, part).serve()
        except Exception as error:
            logger.exception("rank %d failed", number)
            channel.send(Frame("failed", {"reason": f"{type(error).__name__}: {error}"}))
            return FAILED_EXIT_CODE
    return 0


def _options(fields: dict[str, Any]) -> EngineOptions:
    cpus = tuple(tuple(cores) for cores in fields["rank_cpus"])
    return EngineOptions(**{**fields, "rank_cpus": cpus})


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
