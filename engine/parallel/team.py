"""Team is what an engine's other processes are to it, whatever they share of its model: ranks (leader.py) or stages.

What it says here is true of stages, which map the leader's pages and take what it does to them as done.
"""

from __future__ import annotations

import dataclasses
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from engine.attention.base import StepMeta
from engine.attention.probe import Probe
from engine.gpu.steps import ALONE, Mirror
from engine.options import EngineOptions
from engine.pages.layout import KvLayout
from engine.pages.memory import KvMemory, LayerPages
from engine.pages.share import WHOLE, Share
from engine.parallel.processes import Processes
from engine.pending import Steps
from engine.types import ModelInfo

OnLayer = Callable[[int], None]
RunAlone = Callable[[LayerPages, StepMeta, torch.Tensor | None, OnLayer | None], torch.Tensor]


class Team(ABC):
    num_stages = 1  # in each of which a pass can be at one time
    shares: tuple[Share, ...] = (WHOLE,)  # of the pages, by process
    mirror: Mirror = ALONE

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._finalizer = weakref.finalize(self, processes.close)  # whoever forgets to close leaves no process

    @property
    def pids(self) -> tuple[int, ...]:
        return self._processes.pids

    @abstractmethod
    def run(
        self,
        memory: KvMemory,
        meta: StepMeta,
        rows: torch.Tensor | None,
        on_layer: OnLayer | None,
        run_alone: RunAlone,
    ) -> torch.Tensor:
        """The logits of a pass that all run over `memory`; `run_alone` is the leader's part of it. Raises
        EngineBroken."""

    def check(self) -> None:
        """Raise EngineBroken once a process is lost or out of step."""
        self._processes.check()

    def close(self) -> None:
        """End the processes. A second call does nothing."""
        self._finalizer()

    def allocate(self, layout: KvLayout, device: torch.device) -> KvMemory:
        """Pages for all. Raises ValueError when there is not so much memory, EngineBroken."""
        return KvMemory(layout, str(device))

    def free(self) -> None:
        """Give the last memory up. Raises EngineBroken."""
        return

    def poison(self) -> None:
        """As the leader has done with its own share."""
        return

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Likewise. Raises EngineBroken."""
        return

    def make_steps(self, info: ModelInfo, make: Callable[[], Steps]) -> Steps:
        """The leader's; the others make ready for theirs. Raises EngineBroken."""
        return make()


class StartedTeam(Protocol):
    """The processes while they load, beside the leader. They end with `close`, or go over to what `join` returns."""

    options: EngineOptions

    def cut(self, module: PreTrainedModel, whole: Probe, max_len: int) -> tuple[Any, Probe]:
        """Leave the leader its own part of the model, and say for `join` where it was cut, and what a probe of that
        part shows. Raises UnsupportedModel."""

    def join(self, cuts: Any) -> Team:
        """Wait for every process, when the leader's part is prepared. Raises UnsupportedModel, EngineBroken."""

    def close(self) -> None: ...


def with_threads(options: EngineOptions) -> EngineOptions:
    """With this process's threads shared out among all of them, unless they have a number; this one takes its own."""
    threads = options.threads or max(1, torch.get_num_threads() // options.num_processes)
    torch.set_num_threads(threads)
    return dataclasses.replace(options, threads=threads)
