"""The other processes of a worker while they load, beside their leader.

    StartedTeam    one process for each rank of each stage -> each loads the model, and cuts its own of it
          .join    all have loaded -> ranks of a stage meet, each has a way to the next one -> projections meet -> Team

They meet, as rank.py does from its side, in shared memory and over socket pairs, whose ends the leader hands out, or in
process groups.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import PreTrainedModel

from engine.attention.probe import Probe
from engine.gpu.steps import ALONE, Mirror
from engine.options import EngineOptions
from engine.parallel import sharding
from engine.parallel.collectives import Collectives, make_seats
from engine.parallel.cutting import CutModel, cut_model
from engine.parallel.frames import Frame
from engine.parallel.meetings import Reduce, connect
from engine.parallel.mirror import LeaderMirror
from engine.parallel.passing import Into, LeaderInto, News, Passing
from engine.parallel.process_group import Groups, check_gpus
from engine.parallel.processes import Processes
from engine.parallel.shard import Position
from engine.parallel.team import LOAD_TIMEOUT_S, Team, telling
from engine.weights.config import load_config

logger = logging.getLogger(__name__)

MEET_TIMEOUT_S = 30.0  # a process that lives and does not come; one that dies is noticed at once
ALL_MEET_TIMEOUT_S = 300.0  # of each stage's groups, one after the other


def nobody_meets() -> None:
    """There is nothing to end."""


@dataclass(frozen=True, slots=True)
class _Meeting:
    """How the leader meets the others."""

    collectives: Reduce | None  # of the ranks of its stage, where there are several
    into: Into | None = None  # from the stage before, where there is one
    news: News | None = None  # of stages that tell of their layers
    mirror: Mirror = ALONE  # of steps on GPUs
    end: Callable[[], None] = nobody_meets


class StartedTeam:
    """They end with `close`, or go over to what `join` returns."""

    @classmethod
    def of(cls, options: EngineOptions, device: torch.device) -> StartedTeam:
        """Start the processes. Raises ValueError, UnsupportedModel for what cannot be."""
        if device.type == "cuda":
            check_gpus(options, device)
        if options.tensor_parallel > 1:
            sharding.check_config(load_config(options.model), options.tensor_parallel, options.expert_parallel)
        collectives = options.collectives
        if collectives == "auto":
            collectives = "shared" if device.type == "cpu" else "process_group"
        return cls(dataclasses.replace(_with_threads(options), collectives=collectives), device)

    def __init__(self, options: EngineOptions, device: torch.device) -> None:
        self.options = options
        self._device = device
        self._position = Position.of(0, options)
        self._news = News()
        self._processes = Processes(options, device, self._news.hear)

    def cut(self, module: PreTrainedModel, whole: Probe) -> CutModel:
        """Leave the leader its own part of the model, on its device. Raises UnsupportedModel."""
        return cut_model(module, whole, self._position, self._device)

    def join(self, cut: CutModel, num_layers: int) -> Team:
        """Wait for every process, when the leader's part is prepared, and let the cut projections meet. `num_layers`:
        of the whole model. Raises UnsupportedModel, EngineBroken."""
        self._processes.wait_loaded(LOAD_TIMEOUT_S)
        positions = [Position.of(number, self.options) for number in range(self.options.num_processes)]
        is_shared = self.options.collectives == "shared"
        meeting = self._in_shared_memory(positions) if is_shared else self._in_groups(cut)
        passing = Passing(self._position, cut.part, meeting.into, None)
        if meeting.collectives is not None:
            connect(cut.cuts, meeting.collectives, passing.on_met)
        team = Team(
            self._processes,
            num_stages=self._position.stage.size,
            shares=tuple(position.share(num_layers) for position in positions),
            passing=passing,
            news=meeting.news,
            mirror=meeting.mirror,
            end_meetings=meeting.end,
        )
        others = ", ".join(f"{each} is {pid}" for each, pid in zip(positions[1:], team.pids, strict=True))
        logger.info("%d processes: this one leads as %s; %s", len(positions), self._position, others)
        return team

    def _in_shared_memory(self, positions: list[Position]) -> _Meeting:
        ours = self._hand_out_seats(positions)
        collectives = Collectives(ours, self._position.shard, MEET_TIMEOUT_S) if ours else None
        meeting = _Meeting(collectives, end=collectives.close if collectives else nobody_meets)
        if self._position.stage.size == 1:
            return meeting
        return dataclasses.replace(meeting, into=LeaderInto(self._news, self._processes.wait_for), news=self._news)

    def _hand_out_seats(self, positions: list[Position]) -> list[int]:
        """The leader's own. The others' ends are open in their processes only: one that dies is noticed by that."""
        seats = ways(positions)
        for stage in {position.stage for position in positions}:
            ranks = [position for position in positions if position.stage == stage]
            for position, files in zip(ranks, make_seats(len(ranks)) if len(ranks) > 1 else [[]], strict=True):
                seats[position.number] += files
        for position in positions[1:]:
            files = seats[position.number]
            self._processes.send_to(position.number, Frame("seat", {"timeout_s": MEET_TIMEOUT_S}, files=files))
            for file in files:
                os.close(file)
        return seats[0]

    def _in_groups(self, cut: CutModel) -> _Meeting:
        with TemporaryDirectory(prefix="kvrelay-ranks-") as folder, self._processes.in_step():
            like = cut.part.entry.hidden.to(self._device)
            frame = Frame("group", {"folder": folder, "timeout_s": MEET_TIMEOUT_S})
            meet = partial(Groups.meet, Path(folder), self._position, like, MEET_TIMEOUT_S)
            _, groups = self._processes.ask_while(frame, "met", ALL_MEET_TIMEOUT_S, meet)
        if self._device.type == "cuda":
            self._processes.on_broken = groups.abort
        ids = groups.collectives if self._position.stage.size == 1 else None
        all_have = partial(self._processes.all_have, timeout_s=LOAD_TIMEOUT_S)
        mirror = LeaderMirror(partial(telling, self._processes), ids, all_have)
        return _Meeting(groups.collectives, groups.into, mirror=mirror, end=groups.abort)

    def close(self) -> None:
        """End the processes. A second call does nothing."""
        self._processes.close()


def ways(positions: list[Position]) -> list[list[int]]:
    """Open files of each process: where hidden states come in, but for the first stage, and where they leave. To the
    leader they go beside what else it is told."""
    ends: list[list[int]] = [[] for _ in positions]
    for position in positions:
        if not position.stage.is_last and (following := position.next.number):
            out, into = socket.socketpair()
            ends[position.number].append(out.detach())
            ends[following].append(into.detach())
    return ends


def _with_threads(options: EngineOptions) -> EngineOptions:
    """With this process's threads shared out among all of them, unless they have a number; this one takes its own."""
    threads = options.threads or max(1, torch.get_num_threads() // options.num_processes)
    torch.set_num_threads(threads)
    return dataclasses.replace(options, threads=threads)
