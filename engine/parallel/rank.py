"""A process of a worker, other than its leader: `python -m engine.parallel.rank FD PARENT`. It is a rank of a stage,
which may be the only one of either.

    begin (options, number) -> load, cut, prepare -> loaded | refused -> seat | group -> [memory, step ...] until the
    leader ends

It decides nothing and keeps no queue: it runs the steps that the leader sends, in their order, over its share of the
pages. It ends with the leader: by the kernel's signal when that dies, by the end of its socket otherwise.
"""

from __future__ import annotations

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
from engine.loading.load import platform_on
from engine.loading.platform import Platform
from engine.options import EngineOptions
from engine.paged_model import KvPages, PagedModel
from engine.pages.memory import KvMemory
from engine.parallel import mirror
from engine.parallel.collectives import Collectives
from engine.parallel.cutting import CutModel, cut_model
from engine.parallel.frames import Channel, Frame
from engine.parallel.meetings import Reduce, connect
from engine.parallel.messages import copies_of, info_of, layout_of, share_frame, step_of
from engine.parallel.mirror import RankMirror
from engine.parallel.passing import Into, Out, Passing, SocketInto, SocketOut
from engine.parallel.process_group import Groups
from engine.parallel.shard import Position
from engine.pending import Steps
from engine.process import LOG_FORMAT, end_with_parent, pin_process, sentence_of
from engine.types import OnLayer
from engine.weights import loader
from engine.weights.config import served_config

FAILED_EXIT_CODE = 1

logger = logging.getLogger("engine.parallel.rank")


@dataclass(frozen=True, slots=True)
class LoadedPart:
    """What a process has of the model, ready to run."""

    model: PagedModel
    cut: CutModel


def load_part(options: EngineOptions, position: Position, platform: Platform) -> LoadedPart:
    """As the leader loads, but for the checks that are its own. Raises UnsupportedModel."""
    served = served_config(options)
    module, whole = loader.load_probed(options.model, served)
    cut = cut_model(module, whole, position, platform.device)
    return LoadedPart(replace(platform.prepare(module, cut.probe, options, served), probe=whole), cut)


class Rank:
    def __init__(
        self, channel: Channel, position: Position, loaded: LoadedPart, platform: Platform, options: EngineOptions
    ) -> None:
        self._channel = channel
        self._position = position
        self._model = loaded.model
        self._cut = loaded.cut
        self._platform = platform
        self._options = options
        self._share = position.share(len(loaded.model.probe.layers))
        self._steps: Steps | None = None  # on GPUs, once the leader has asked for them
        self._memory: KvMemory | None = None  # until the leader has asked for it

    def serve(self) -> None:
        """Run what the leader sends until it ends."""
        while (frame := self._channel.receive()) is not None:
            try:
                self._on[frame.kind](self, frame)
            except ConnectionError:
                continue  # a process beside this one is gone: the leader, who hears of it, ends us, or ends

    def _seat(self, frame: Frame) -> None:
        """Files as `leader.ways` has them, then those to meet with."""
        files, stage, into, out = list(frame.files), self._position.stage, None, None
        if not stage.is_first:
            into = SocketInto(Channel(socket.socket(fileno=files.pop(0))))
        if not stage.is_last:
            to_leader = self._position.next.number == 0
            out = SocketOut(self._channel if to_leader else Channel(socket.socket(fileno=files.pop(0))))
        collectives = Collectives(files, self._position.shard, float(frame.fields["timeout_s"])) if files else None
        self._meet(collectives, into, out)

    def _group(self, frame: Frame) -> None:
        like, timeout_s = self._cut.part.entry.hidden.to(self._model.device), float(frame.fields["timeout_s"])
        groups = Groups.meet(Path(frame.fields["folder"]), self._position, like, timeout_s)
        self._meet(groups.collectives, groups.into, groups.out)
        ids = groups.collectives if self._position.stage.size == 1 else None
        self._model = replace(self._model, mirror=RankMirror(ids, self._channel))
        self._channel.send(Frame("met"))

    def _meet(self, collectives: Reduce | None, into: Into | None, out: Out | None) -> None:
        passing = Passing(self._position, self._cut.part, into, out)
        if collectives is not None:
            connect(self._cut.cuts, collectives, passing.on_met)
        self._model = replace(self._model, passing=passing)

    @property
    def _pages(self) -> KvMemory:
        assert self._memory is not None, "a step before its memory"
        return self._memory

    def _allocate(self, frame: Frame) -> None:
        self._memory = KvMemory(layout_of(frame), str(self._model.device), share=self._share)
        self._channel.send(share_frame(self._memory))
        self._memory.close()  # of its file the leader has its own

    def _free(self, frame: Frame) -> None:
        self._memory = None

    def _step(self, frame: Frame) -> None:
        meta, rows = step_of(frame)
        rows = None if rows is None else rows.to(self._model.device)
        self._model.run(KvPages(self._pages), self._model.place(meta), rows, self._teller(frame))

    def _teller(self, frame: Frame) -> OnLayer | None:
        """Tells the leader of layers that are written; in the last stage it sees that itself."""
        if not frame.fields["tells_layers"] or self._position.stage.is_last or self._position.shard.rank > 0:
            return None
        step = frame.fields["step"]
        return lambda layer: self._channel.send(Frame("layer", {"step": step, "layer": layer}))

    def _fit(self, frame: Frame) -> None:
        page_bytes = self._share.of(layout_of(frame)).page_bytes()
        try:
            kv_bytes = self._platform.default_kv_bytes(self._options, int(frame.fields["peak_bytes"]), page_bytes)
            answer = {"pages": kv_bytes // page_bytes, "reason": ""}
        except ValueError as error:
            answer = {"pages": 0, "reason": f"{self._position}: {error}"}
        self._channel.send(Frame("fit", answer))

    def _make_steps(self, frame: Frame) -> None:
        pages = KvPages(self._pages)
        self._steps = self._platform.steps(self._model, pages, self._options, info_of(frame))
        self._channel.send(Frame("steps"))

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
    number, options = int(begin.fields["number"]), _options(begin.fields["options"])
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    platform = platform_on(devices.resolve(options.device))
    with devices.current(platform.device):
        return run(channel, number, options, platform)


def run(channel: Channel, number: int, options: EngineOptions, platform: Platform) -> int:
    """Load and serve; the exit code."""
    with torch.inference_mode():
        try:
            position = Position.of(number, options)
            process = Rank(channel, position, load_part(options, position, platform), platform, options)
        except Exception as error:  # the leader says it: most likely it refuses the same
            channel.send(Frame("refused", {"reason": sentence_of(error)}))
            return FAILED_EXIT_CODE
        pin_process(options.rank_cpus[number] if options.rank_cpus else ())
        channel.send(Frame("loaded"))
        try:
            process.serve()
        except Exception as error:
            logger.exception("%s of the worker failed", position)
            channel.send(Frame("failed", {"reason": f"{type(error).__name__}: {error}"}))
            return FAILED_EXIT_CODE
    return 0


def _options(fields: dict[str, Any]) -> EngineOptions:
    cpus = tuple(tuple(cores) for cores in fields["rank_cpus"])
    return EngineOptions(**{**fields, "rank_cpus": cpus})


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
