"""Ranks are the other processes of a tensor-parallel worker, as its leader sees them.

    start: one process for each rank, with one end of a socket pair -> each loads and cuts the model for itself
    join:  all have loaded -> the private process group -> projections meet
    run:   the step's arrays go to every rank, and all run it at once

Only the leader has a policy, a driver and a sampler. The other ranks run the steps that it sends and keep nothing but
weights: the KV pages are the leader's, mapped by all, each rank reading and writing its own heads. Once a rank is lost,
or a step has failed anywhere, the ranks are out of step for good: every later call raises EngineBroken.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import weakref
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from engine.attention import hooks
from engine.attention.base import StepMeta
from engine.attention.probe import Probe
from engine.options import EngineOptions
from engine.pages.memory import KvMemory, LayerPages
from engine.parallel import sharding
from engine.parallel.collectives import Collectives, make_store, named
from engine.parallel.frames import Frame
from engine.parallel.messages import memory_frame, step_frame
from engine.parallel.processes import Processes
from engine.parallel.sharding import HeadSlice, Shard
from engine.weights.config import load_config
from engine.weights.loader import set_attention

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 1800.0  # a rank loads as much as its leader, beside it
MEET_TIMEOUT_S = 30.0  # a rank that lives and does not come; one that dies is noticed at once

Forward = Callable[[LayerPages, StepMeta, torch.Tensor | None, Callable[[int], None] | None], torch.Tensor]


class Ranks:
    @classmethod
    def started(cls, options: EngineOptions, at: torch.device) -> Ranks:
        """Start the processes, which load beside the leader. Raises ValueError, UnsupportedModel for what cannot be."""
        size = options.tensor_parallel
        if at.type != "cpu":
            raise ValueError(f"tensor_parallel is {size}, and on GPUs only 1 is served; give replicas, or device: cpu")
        sharding.check_config(load_config(options.model), size)
        threads = options.threads or max(1, torch.get_num_threads() // size)
        torch.set_num_threads(threads)
        return cls(dataclasses.replace(options, threads=threads))

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self.shard = Shard(0, options.tensor_parallel)
        self._processes = Processes(options)
        self._finalizer = weakref.finalize(self, self._processes.close)  # whoever forgets to close leaves no process
        self._cuts: list[sharding.Cut] = []
        self._store: Any = None
        self._shared: KvMemory | None = None  # that the ranks have mapped
        self._pages: HeadSlice | None = None  # this rank's of it
        self._on_layer: Callable[[int], None] | None = None

    def cut(self, model: PreTrainedModel, whole: Probe, max_len: int) -> None:
        """Leave the leader its own part of the model. Raises UnsupportedModel."""
        self._cuts = sharding.shard_model(model, self.shard, whole.layer_of)
        sharding.check_shapes(model, whole, max_len, self.shard)
        set_attention(model, hooks.SERVE)

    def join(self) -> None:
        """Wait for every rank, and let the prepared projections meet. Raises UnsupportedModel, EngineBroken."""
        self._processes.wait_loaded(LOAD_TIMEOUT_S)
        self._store, port = make_store(MEET_TIMEOUT_S)
        name = f"ranks-{secrets.token_hex(8)}"
        self._processes.send(Frame("group", {"port": port, "name": name, "timeout_s": MEET_TIMEOUT_S}))
        collectives = self._guarded(lambda: Collectives(named(name, self._store), self.shard, MEET_TIMEOUT_S))
        sharding.connect(self._cuts, collectives, self._tell)
        logger.info(
            "tensor parallel over %d processes: this one and %s",
            self.shard.size,
            ", ".join(map(str, self._processes.pids)),
        )

    def run(
        self,
        memory: KvMemory,
        meta: StepMeta,
        rows: torch.Tensor | None,
        on_layer: Callable[[int], None] | None,
        forward: Forward,
    ) -> torch.Tensor:
        """The logits of a step that all ranks run over `memory`. Raises EngineBroken."""
        self.check()
        if memory is not self._shared:
            self._processes.send(memory_frame(memory))
            self._shared, self._pages = memory, HeadSlice(memory, self.shard)
        self._processes.send(step_frame(meta, rows))
        self._on_layer = on_layer
        pages = self._pages
        assert pages is not None
        logits: torch.Tensor = self._guarded(lambda: forward(pages, meta, rows, None))
        return logits

    def check(self) -> None:
        """Raise EngineBroken once a rank is lost or out of step."""
        self._processes.check()

    def close(self) -> None:
        """End the processes. A second call does nothing."""
        self._finalizer()

    @property
    def pids(self) -> tuple[int, ...]:
        return self._processes.pids

    def _tell(self, layer: int) -> None:
        if self._on_layer is not None:
            self._on_layer(layer)

    def _guarded(self, work: Callable[[], Any]) -> Any:
        """Whatever fails between the ranks' meetings leaves the others waiting there: nothing can go on."""
        try:
            return work()
        except Exception as error:
            raise self._processes.broke(f"rank 0 failed: {type(error).__name__}: {error}") from error
