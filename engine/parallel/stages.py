"""The other stages of a pipeline-parallel worker, as its leader sees them, which is the last stage.

    StartedStages  one process for each stage before -> each loads the model, and keeps its own layers
          .join    all have loaded -> each has a socket to the next one -> Stages
    Stages.begin   the step's arrays go to every stage: the first one computes as soon as it is free
          .finish  hidden states come from the stage before -> the leader's layers, norm and head -> logits

As many steps as there are stages may be begun before the first is finished, and each stage then computes another one.
They run in the order in which they began, so that a later chunk of a prompt finds in each stage's pages what an earlier
one wrote. Stages map the leader's KV pages, and write those of their own layers. Once a stage is lost, or a step has
failed anywhere, all is over: every later call raises EngineBroken.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from engine.attention import hooks
from engine.attention.base import StepMeta
from engine.attention.probe import Probe
from engine.options import EngineOptions
from engine.pages.layout import KvLayout
from engine.pages.memory import KvMemory
from engine.parallel.frames import Frame
from engine.parallel.leader import LOAD_TIMEOUT_S
from engine.parallel.messages import hidden_of, mapped_frame, step_frame
from engine.parallel.processes import Processes
from engine.parallel.team import OnLayer, RunAlone, Team, with_threads
from engine.weights import stage as parts
from engine.weights.loader import run_probe, set_attention
from engine.weights.stage import Part, Stage

logger = logging.getLogger(__name__)


class StartedStages:
    @classmethod
    def of(cls, options: EngineOptions, device: torch.device) -> StartedStages:
        """Start the processes. Raises ValueError for what cannot be."""
        size = options.pipeline_parallel
        if device.type != "cpu":
            raise ValueError(
                f"pipeline_parallel is {size}, and on GPUs only 1 is served; give replicas, or device: cpu"
            )
        return cls(with_threads(options), device)

    def __init__(self, options: EngineOptions, device: torch.device) -> None:
        self.options = options
        self._stage = Stage(options.pipeline_parallel, options.pipeline_parallel)
        self._news = News()
        self._processes = Processes(options, device, self._news.hear)

    def cut(self, module: PreTrainedModel, whole: Probe, max_len: int) -> tuple[Part, Probe]:
        return cut_model(module, whole, self._stage), whole

    def join(self, part: Part) -> Stages:
        self._processes.wait_loaded(LOAD_TIMEOUT_S)
        for number, ends in hops(self._stage.size).items():
            self._processes.send_to(number, Frame("seat", files=ends))
            for end in ends:
                os.close(end)
        stages = Stages(self._processes, part, self._stage.size, self._news)
        pids = ", ".join(map(str, stages.pids))
        logger.info("a pipeline of %d processes: %s, and this one last", self._stage.size, pids)
        return stages

    def close(self) -> None:
        self._processes.close()


def cut_model(module: PreTrainedModel, whole: Probe, stage: Stage) -> Part:
    """Leave a process its stage of a model that was probed. Raises UnsupportedModel."""
    set_attention(module, hooks.PROBE)
    part = parts.cut(module, whole, stage, lambda: run_probe(module))
    set_attention(module, hooks.SERVE)
    return part


def hops(size: int) -> dict[int, list[int]]:
    """Open files of the stages before the last: where hidden states come in, but for the first, and where they leave,
    but for the one before the last, whose go to the leader beside what else it says."""
    ends: dict[int, list[int]] = {number: [] for number in range(1, size)}
    for number in range(1, size - 1):
        out, into = socket.socketpair()
        ends[number].append(out.detach())
        ends[number + 1].append(into.detach())
    return ends


class LayersTold:
    """Tells of a step's layers in their order, each once. Whoever hears that one is written knows the same of all
    before it: the step has come that far."""

    def __init__(self, on_layer: OnLayer) -> None:
        self._on_layer = on_layer
        self._next = 0
        self._lock = threading.Lock()

    def up_to(self, layer: int) -> None:
        with self._lock:
            while self._next <= layer:
                self._on_layer(self._next)
                self._next += 1


@dataclass(frozen=True, slots=True)
class BegunPass:
    """A step that the stages before the leader's compute."""

    number: int
    memory: KvMemory
    meta: StepMeta
    told: LayersTold | None


class News:
    """What stages say of the steps that they compute, put by in the thread that listens."""

    def __init__(self) -> None:
        self.told: dict[int, LayersTold] = {}  # by the step; of those whose layers somebody waits for
        self._arrived: dict[int, torch.Tensor] = {}

    def hear(self, frame: Frame) -> None:
        number = int(frame.fields["step"])
        if frame.kind == "hidden":
            self._arrived[number] = hidden_of(frame)
        elif (told := self.told.get(number)) is not None:
            try:
                told.up_to(int(frame.fields["layer"]))
            except Exception:  # this thread hears of lost stages, too; who finishes the step tells again, and fails
                logger.exception("a layer of step %d could not be told of", number)

    def has(self, number: int) -> bool:
        return number in self._arrived

    def take(self, number: int) -> torch.Tensor:
        self.told.pop(number, None)
        return self._arrived.pop(number)


class Stages(Team):
    def __init__(self, processes: Processes, part: Part, size: int, news: News) -> None:
        super().__init__(processes)
        self.num_stages = size
        self._part = part
        self._news = news
        self._begun = 0

    def allocate(self, layout: KvLayout, device: torch.device) -> KvMemory:
        """The leader's, which the stages map."""
        memory = super().allocate(layout, device)
        self._processes.send(mapped_frame(memory))
        return memory

    def run(
        self,
        memory: KvMemory,
        meta: StepMeta,
        rows: torch.Tensor | None,
        on_layer: OnLayer | None,
        run_alone: RunAlone,
    ) -> torch.Tensor:
        return self.finish(self.begin(memory, meta, on_layer), rows, run_alone)

    def begin(self, memory: KvMemory, meta: StepMeta, on_layer: OnLayer | None) -> BegunPass:
        """Let the stages compute a step; its layers are told of in the thread that listens to them, and in the one that
        finishes it. Raises EngineBroken."""
        self.check()
        told = None if on_layer is None else LayersTold(on_layer)
        self._begun += 1
        if told is not None:
            self._news.told[self._begun] = told
        self._processes.send(step_frame(meta, None, step=self._begun, tells=told is not None))
        return BegunPass(self._begun, memory, meta, told)

    def finish(self, begun: BegunPass, rows: torch.Tensor | None, run_alone: RunAlone) -> torch.Tensor:
        """The logits of a step that was begun. Raises EngineBroken."""
        with self._processes.in_step():
            self._processes.wait_for(lambda: self._news.has(begun.number))
            self._part.entry.hidden = self._news.take(begun.number)
            if begun.told is None:
                return run_alone(begun.memory, begun.meta, rows, None)
            begun.told.up_to(self._part.layers.start - 1)
            return run_alone(begun.memory, begun.meta, rows, begun.told.up_to)
