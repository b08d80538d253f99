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
import weakref
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from engine.attention import hooks
from engine.attention.base import StepMeta
from engine.attention.probe import Probe
from engine.options import EngineOptions
from engine.pages.host_memory import check_free
from engine.pages.layout import KvLayout
from engine.pages.memory import KvMemory, LayerPages
from engine.pages.share import Share
from engine.parallel import sharding
from engine.parallel.collectives import Collectives, make_seats
from engine.parallel.frames import Frame
from engine.parallel.meetings import Cut, connect
from engine.parallel.messages import copies_frame, memory_frame, share_of, step_frame
from engine.parallel.processes import Processes
from engine.parallel.shard import Shard
from engine.weights.config import load_config
from engine.weights.loader import set_attention

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 1800.0  # a rank loads as much as its leader, beside it
MEET_TIMEOUT_S = 30.0  # a rank that lives and does not come; one that dies is noticed at once

RunAlone = Callable[[LayerPages, StepMeta, torch.Tensor | None, Callable[[int], None] | None], torch.Tensor]


class StartedRanks:
    """The ranks while they load, beside the leader. They end with `close`, or go over to what `join` returns."""

    @classmethod
    def of(cls, options: EngineOptions, device: torch.device) -> StartedRanks:
        """Start the processes. Raises ValueError, UnsupportedModel for what cannot be."""
        size = options.tensor_parallel
        if device.type != "cpu":
            raise ValueError(f"tensor_parallel is {size}, and on GPUs only 1 is served; give replicas, or device: cpu")
        sharding.check_config(load_config(options.model), size)
        threads = options.threads or max(1, torch.get_num_threads() // size)
        torch.set_num_threads(threads)
        return cls(dataclasses.replace(options, threads=threads))

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self._shard = Shard(0, options.tensor_parallel)
        self._processes = Processes(options)

    def cut(self, module: PreTrainedModel, whole: Probe, max_len: int) -> list[Cut]:
        """Leave the leader its own part of the model. Raises UnsupportedModel."""
        cuts = sharding.shard_model(module, self._shard, whole)
        sharding.check_shapes(module, whole, max_len, self._shard)
        set_attention(module, hooks.SERVE)
        return cuts

    def join(self, cuts: list[Cut]) -> Ranks:
        """Wait for every rank, and let the prepared projections meet. Raises UnsupportedModel, EngineBroken."""
        self._processes.wait_loaded(LOAD_TIMEOUT_S)
        collectives = Collectives(self._hand_out_seats(), self._shard, MEET_TIMEOUT_S)
        ranks = Ranks(self._processes, self._shard, collectives)
        connect(cuts, collectives, ranks.on_met)
        pids = ", ".join(map(str, ranks.pids))
        logger.info("tensor parallel over %d processes: this one and %s", self._shard.size, pids)
        return ranks

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


class Ranks:
    def __init__(self, processes: Processes, shard: Shard, collectives: Collectives) -> None:
        self._processes = processes
        self._shard = shard
        self.shares = tuple(Share(rank, shard.size) for rank in range(shard.size))
        self._collectives = collectives
        self._finalizer = weakref.finalize(self, processes.close)  # whoever forgets to close leaves no process
        self._memory: KvMemory | None = None  # what the ranks have a share of
        self._on_layer: Callable[[int], None] | None = None  # of the step that runs

    def run(
        self,
        memory: KvMemory,
        meta: StepMeta,
        rows: torch.Tensor | None,
        on_layer: Callable[[int], None] | None,
        run_alone: RunAlone,
    ) -> torch.Tensor:
        """The logits of a step that all ranks run over `memory`. Raises EngineBroken."""
        self.check()
        assert memory is self._memory, "the ranks have a share of the last memory only"
        self._processes.send(step_frame(meta, rows))
        self._on_layer = on_layer
        with self._processes.in_step():
            return run_alone(memory, meta, rows, None)

    def allocate(self, layout: KvLayout, device: torch.device) -> KvMemory:
        """Pages of which each rank has its share, in memory of its own; what they had before they give up.

        Raises ValueError when there is not so much memory, EngineBroken.
        """
        self._memory = None
        check_free(sum(share.of(layout).total_bytes for share in self.shares))
        answers = self._processes.ask(memory_frame(layout), "share", MEET_TIMEOUT_S)
        others = [share_of(answer, layout) for answer in answers]
        self._memory = KvMemory(layout, str(device), share=self.shares[0], others=others)
        return self._memory

    def poison(self) -> None:
        self._processes.send(Frame("poison"))

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """In the other ranks' shares. Raises EngineBroken."""
        self._processes.send(copies_frame(copies))

    def on_met(self, layer: int) -> None:
        """All ranks have written the layer's KV."""
        if self._on_layer is not None:
            self._on_layer(layer)

    def check(self) -> None:
        """Raise EngineBroken once a rank is lost or out of step."""
        self._processes.check()

    def close(self) -> None:
        """End the processes. A second call does nothing."""
        self._finalizer()
        self._collectives.close()

    @property
    def pids(self) -> tuple[int, ...]:
        return self._processes.pids
