"""The other ranks of a tensor-parallel worker, as its leader sees them.

    StartedRanks   one process for each rank, with one end of a socket pair -> each loads and cuts the model for itself
          .join    all have loaded -> each has its seat (collectives.py) -> projections meet -> Ranks
    Ranks.run      the step's arrays go to every rank, and all run it at once

Only the leader has a policy, a driver and a sampler. The other ranks run the steps that it sends, over pages of the
same numbers, each with a share of its own (engine/pages/share.py), which the leader opens: its KvMemory reaches them
all. Once a rank is lost, or a step has failed anywhere, the ranks are out of step for good: every later call raises
EngineBroken.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import PreTrainedModel

from engine.attention import hooks
from engine.attention.base import StepMeta
from engine.attention.probe import Probe
from engine.gpu.steps import ALONE, Mirror
from engine.options import EngineOptions
from engine.pages.host_memory import check_free
from engine.pages.layout import KvLayout
from engine.pages.memory import KvMemory
from engine.parallel import sharding
from engine.parallel.collectives import Collectives, make_seats
from engine.parallel.frames import Frame
from engine.parallel.meetings import Cut, connect
from engine.parallel.messages import copies_frame, fit_frame, memory_frame, share_of, step_frame, steps_frame
from engine.parallel.mirror import LeaderMirror, drop_graphs, graph_sizes
from engine.parallel.process_group import GroupCollectives, check_gpus
from engine.parallel.processes import Processes
from engine.parallel.shard import Shard
from engine.parallel.team import OnLayer, RunAlone, Team, with_threads
from engine.pending import Steps
from engine.types import ModelInfo
from engine.weights import ropes
from engine.weights.config import load_config
from engine.weights.loader import set_attention

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 1800.0  # a rank loads as much as its leader, beside it
ALLOCATE_TIMEOUT_S = 300.0  # of a rank that takes its share of the machine's memory
MEET_TIMEOUT_S = 30.0  # a rank that lives and does not come; one that dies is noticed at once


class StartedRanks:
    """The ranks while they load, beside the leader. They end with `close`, or go over to what `join` returns."""

    @classmethod
    def of(cls, options: EngineOptions, device: torch.device) -> StartedRanks:
        """Start the processes. Raises ValueError, UnsupportedModel for what cannot be."""
        size = options.tensor_parallel
        if device.type == "cuda":
            check_gpus(options, device)
        collectives = options.collectives
        if collectives == "auto":
            collectives = "shared" if device.type == "cpu" else "process_group"
        sharding.check_config(load_config(options.model), size)
        return cls(dataclasses.replace(with_threads(options), collectives=collectives), device)

    def __init__(self, options: EngineOptions, device: torch.device) -> None:
        self.options = options
        self._device = device
        self._shard = Shard(0, options.tensor_parallel)
        self._processes = Processes(options, device)

    def cut(self, module: PreTrainedModel, whole: Probe, max_len: int) -> tuple[list[Cut], Probe]:
        """Leave the leader its own part of the model, on its device; and what a probe of that shows.

        Raises UnsupportedModel.
        """
        cuts = sharding.shard_model(module, self._shard, whole)
        part = sharding.check_shapes(module, whole, max_len, self._shard)
        set_attention(module, hooks.SERVE)
        ropes.move(module, self._device)
        return cuts, part

    def join(self, cuts: list[Cut]) -> Ranks:
        """Wait for every rank, and let the prepared projections meet. Raises UnsupportedModel, EngineBroken."""
        self._processes.wait_loaded(LOAD_TIMEOUT_S)
        collectives = self._collectives()
        ranks = Ranks(self._processes, self._shard, collectives)
        connect(cuts, collectives, ranks.on_met)
        pids = ", ".join(map(str, ranks.pids))
        logger.info("tensor parallel over %d processes: this one and %s", self._shard.size, pids)
        return ranks

    def _collectives(self) -> Collectives | GroupCollectives:
        if self.options.collectives == "shared":
            return Collectives(self._hand_out_seats(), self._shard, MEET_TIMEOUT_S)
        with TemporaryDirectory(prefix="kvrelay-ranks-") as folder, self._processes.in_step():
            meeting = Path(folder) / "meeting"
            self._processes.send(Frame("group", {"meeting": str(meeting), "timeout_s": MEET_TIMEOUT_S}))
            group = GroupCollectives.meet(meeting, self._shard, self._device, MEET_TIMEOUT_S)
        if self._device.type == "cuda":
            self._processes.on_broken = group.abort
        return group

    def _hand_out_seats(self) -> list[int]:
        """The leader's own. The others' ends are open in their processes only: one that dies is noticed by that."""
        ours, *theirs = make_seats(self._shard.size)
        for rank, seat in enumerate(theirs, 1):
            self._processes.send_to(rank, Frame("seat", {"timeout_s": MEET_TIMEOUT_S}, files=seat))
            for file in seat:
                os.close(file)
        return ours

    def close(self) -> None:
        """End the processes. A second call does nothing."""
        self._processes.close()


class Ranks(Team):
    def __init__(self, processes: Processes, shard: Shard, collectives: Collectives | GroupCollectives) -> None:
        super().__init__(processes)
        self._shard = shard
        self.shares = tuple(Shard(rank, shard.size).share for rank in range(shard.size))
        self._collectives = collectives
        self.mirror: Mirror = (
            LeaderMirror(self._tell, collectives) if isinstance(collectives, GroupCollectives) else ALONE
        )
        self._memory: KvMemory | None = None  # what the ranks have a share of
        self._on_layer: OnLayer | None = None  # of the step that runs

    def run(
        self,
        memory: KvMemory,
        meta: StepMeta,
        rows: torch.Tensor | None,
        on_layer: OnLayer | None,
        run_alone: RunAlone,
    ) -> torch.Tensor:
        with self._tell(step_frame(meta, rows)):
            self.hear(memory, on_layer)
            return run_alone(memory, meta, rows, None)

    @contextmanager
    def _tell(self, frame: Frame) -> Iterator[None]:
        self.check()
        self._processes.send(frame)
        with self._processes.in_step():
            yield

    def hear(self, memory: KvMemory, on_layer: OnLayer | None) -> None:
        """A step begins over `memory`; `on_layer` is told of each layer once all ranks have written it."""
        assert memory is self._memory, "the ranks have a share of the last memory only"
        self._on_layer = on_layer

    def allocate(self, layout: KvLayout, device: torch.device) -> KvMemory:
        """Pages of which each rank has its share, in memory of its own. They have one such memory at a time.

        Raises ValueError when there is not so much memory, EngineBroken.
        """
        if device.type == "cpu":
            check_free(sum(share.of(layout).total_bytes for share in self.shares))
        assert self._memory is None, "the memory before is to be freed"
        answers = self._processes.ask(memory_frame(layout), "share", ALLOCATE_TIMEOUT_S)
        others = [share_of(answer, layout, device) for answer in answers]
        self._memory = KvMemory(layout, str(device), share=self.shares[0], others=others)
        return self._memory

    def free(self) -> None:
        """Give up the memory on every rank. Raises EngineBroken."""
        self._memory = None
        self._processes.send(Frame("free"))

    def least_pages(self, layout: KvLayout, peak_bytes: int) -> int:
        """How many pages the other ranks have room for, each on its own GPU. Raises ValueError, EngineBroken."""
        answers = self._processes.ask(fit_frame(layout, peak_bytes), "fit", ALLOCATE_TIMEOUT_S)
        if reason := next((answer.fields["reason"] for answer in answers if answer.fields["reason"]), ""):
            raise ValueError(reason)
        return min(int(answer.fields["pages"]) for answer in answers)

    def make_steps(self, info: ModelInfo, make: Callable[[], Steps]) -> Steps:
        """All ranks make their own at once, and capture the same graphs, or none. Raises EngineBroken."""
        if not isinstance(self._collectives, GroupCollectives):
            return make()
        with self._processes.in_step():
            answers, steps = self._processes.ask_while(steps_frame(info), "steps", LOAD_TIMEOUT_S, make)
        if {tuple(answer.fields["sizes"]) for answer in answers} != {graph_sizes(steps)}:
            logger.warning("decode steps run without CUDA graphs: the ranks have not captured the same")
            drop_graphs(steps)
            self._processes.send(Frame("no graphs"))
        return steps

    def poison(self) -> None:
        self._processes.send(Frame("poison"))

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """In the other ranks' shares. Raises EngineBroken."""
        self._processes.send(copies_frame(copies))

    def on_met(self, layer: int) -> None:
        """All ranks have written the layer's KV."""
        if self._on_layer is not None:
            self._on_layer(layer)

    def close(self) -> None:
        super().close()
        self._collectives.close()
