"""A process of a worker, other than its leader: `python -m engine.parallel.rank FD PARENT`. One rank of a
tensor-parallel worker, or the stage of a pipeline (stage_process.py).

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
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from engine import device as devices
from engine.attention import hooks
from engine.loading.load import platform_on
from engine.loading.platform import Platform
from engine.options import EngineOptions
from engine.paged_model import KvPages, PagedModel
from engine.pages.memory import KvMemory
from engine.parallel import mirror, sharding
from engine.parallel.collectives import Collectives
from engine.parallel.frames import Channel, Frame
from engine.parallel.meetings import Cut, connect, nobody
from engine.parallel.messages import copies_of, info_of, layout_of, share_frame, step_of
from engine.parallel.mirror import RankMirror, drop_graphs, graph_sizes
from engine.parallel.process_group import GroupCollectives
from engine.parallel.shard import Shard
from engine.parallel.stage_process import StageProcess, load_stage
from engine.pending import Steps
from engine.process import LOG_FORMAT, pin_process, sentence_of
from engine.weights import loader, ropes
from engine.weights.config import served_config
from engine.weights.stage import Stage

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


def load_part(options: EngineOptions, shard: Shard, platform: Platform) -> Part:
    """As the leader loads, but for the checks that are its own. Raises UnsupportedModel.

    The whole model is mapped from its files, and what is kept of it is copied: no memory or GPU ever holds it all.
    """
    served = served_config(options)
    module, whole = loader.load_probed(options.model, served)
    cuts = sharding.shard_model(module, shard, whole)
    part = sharding.check_shapes(module, whole, served.max_len, shard)
    loader.set_attention(module, hooks.SERVE)
    ropes.move(module, platform.device)
    return Part(replace(platform.prepare(module, part, options, served), probe=whole), cuts)


class Rank:
    def __init__(self, channel: Channel, shard: Shard, part: Part, platform: Platform, options: EngineOptions) -> None:
        self._channel = channel
        self._shard = shard
        self._part = part
        self._model = part.model
        self._platform = platform
        self._options = options
        self._steps: Steps | None = None  # on GPUs, once the leader has asked for them
        self._memory: KvMemory | None = None  # until the leader has asked for it

    def serve(self) -> None:
        """Run what the leader sends until it ends."""
        while (frame := self._channel.receive()) is not None:
            self._on[frame.kind](self, frame)

    def _seat(self, frame: Frame) -> None:
        collectives = Collectives(frame.files, self._shard, float(frame.fields["timeout_s"]))
        connect(self._part.cuts, collectives, nobody)

    def _group(self, frame: Frame) -> None:
        meeting, timeout_s = Path(frame.fields["meeting"]), float(frame.fields["timeout_s"])
        group = GroupCollectives.meet(meeting, self._shard, self._model.device, timeout_s)
        connect(self._part.cuts, group, nobody)
        self._model = replace(self._model, mirror=RankMirror(group))

    @property
    def _pages(self) -> KvMemory:
        assert self._memory is not None, "a step before its memory"
        return self._memory

    def _allocate(self, frame: Frame) -> None:
        self._memory = KvMemory(layout_of(frame), str(self._model.device), share=self._shard.share)
        self._channel.send(share_frame(self._memory))
        self._memory.close()  # of its file the leader has its own

    def _free(self, frame: Frame) -> None:
        self._memory = None

    def _step(self, frame: Frame) -> None:
        meta, rows = step_of(frame)
        rows = None if rows is None else rows.to(self._model.device)
        self._model.run_alone(self._pages, self._model.place(meta), rows)

    def _fit(self, frame: Frame) -> None:
        page_bytes = self._shard.share.of(layout_of(frame)).page_bytes()
        try:
            kv_bytes = self._platform.default_kv_bytes(self._options, int(frame.fields["peak_bytes"]), page_bytes)
            answer = {"pages": kv_bytes // page_bytes, "reason": ""}
        except ValueError as error:
            answer = {"pages": 0, "reason": f"rank {self._shard.rank}: {error}"}
        self._channel.send(Frame("fit", answer))

    def _make_steps(self, frame: Frame) -> None:
        pages = KvPages(self._pages)
        self._steps = self._platform.steps(self._model, pages, self._options, info_of(frame))
        self._channel.send(Frame("steps", {"sizes": graph_sizes(self._steps)}))

    def _chunks(self, frame: Frame) -> None:
        assert self._steps is not None, "a step before they were asked for"
        self._steps.begin(mirror.step_of(frame))

    _on: ClassVar[dict[str, Callable[[Rank, Frame], None]]] = {
        "seat": _seat,
        "group": _group,
        "memory": _allocate,
        "free": _free,
        "fit": _fit,
        "steps": _make_steps,
        "no graphs": lambda self, _: drop_graphs(self._steps),
        "poison": lambda self, _: self._pages.poison(),
        "copy": lambda self, frame: self._pages.copy_pages(copies_of(frame)),
        "step": _step,
        "chunks": _chunks,
    }


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
    platform = platform_on(devices.resolve(options.device))
    with devices.current(platform.device):
        return run(channel, number, options, platform)


def run(channel: Channel, number: int, options: EngineOptions, platform: Platform) -> int:
    """Load and serve; the exit code."""
    with torch.inference_mode():
        try:
            process = _loaded(channel, number, options, platform)
        except Exception as error:  # the leader says it: most likely it refuses the same
            channel.send(Frame("refused", {"reason": sentence_of(error)}))
            return FAILED_EXIT_CODE
        pin_process(options.rank_cpus[number] if options.rank_cpus else ())
        channel.send(Frame("loaded"))
        try:
            process.serve()
        except Exception as error:
            logger.exception("process %d of the worker failed", number)
            channel.send(Frame("failed", {"reason": f"{type(error).__name__}: {error}"}))
            return FAILED_EXIT_CODE
    return 0


def _loaded(channel: Channel, number: int, options: EngineOptions, platform: Platform) -> Rank | StageProcess:
    if options.pipeline_parallel > 1:
        stage = Stage(number, options.pipeline_parallel)
        return StageProcess(channel, stage, load_stage(options, stage, platform))
    shard = Shard(number, options.tensor_parallel)
    return Rank(channel, shard, load_part(options, shard, platform), platform, options)


def _options(fields: dict[str, Any]) -> EngineOptions:
    cpus = tuple(tuple(cores) for cores in fields["rank_cpus"])
    return EngineOptions(**{**fields, "rank_cpus": cpus})


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
