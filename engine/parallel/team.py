"""Team is an engine's other processes, as their leader sees them: the ranks of its stage, and of those before it.

    begin     a step's arrays go to every process: those of the first stage compute it as soon as they are free
    in_step   the leader does its part of it (passing.py), as they do

Only the leader has a policy, a driver and a sampler. The others run the steps that it sends, over pages of the same
numbers, each with a share of its own (engine/pages/share.py), which the leader opens: its KvMemory reaches them all.
As many steps as there are stages may be begun before the first is finished, and each stage then computes another one.
All run in the order in which they began, so that a later chunk of a prompt finds in each share what an earlier one
wrote. Once a process is lost, or a step has failed anywhere, all are out of step for good: every later call raises
EngineBroken.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from engine.attention.base import StepMeta
from engine.gpu.steps import Mirror
from engine.pages.host_memory import check_free
from engine.pages.layout import KvLayout
from engine.pages.memory import KvMemory
from engine.pages.share import Share
from engine.parallel.frames import Frame
from engine.parallel.messages import copies_frame, fit_frame, memory_frame, share_of, step_frame, steps_frame
from engine.parallel.passing import LayersTold, News, Passing
from engine.parallel.processes import Processes
from engine.pending import Steps
from engine.types import ModelInfo, OnLayer

LOAD_TIMEOUT_S = 1800.0  # a process loads as much as its leader, beside it
ALLOCATE_TIMEOUT_S = 300.0  # of one that takes its share of the machine's memory


class Team:
    def __init__(
        self,
        processes: Processes,
        *,
        num_stages: int,
        shares: tuple[Share, ...],
        passing: Passing,
        news: News | None,
        mirror: Mirror,
        end_meetings: Callable[[], None],
    ) -> None:
        """`shares`: of the pages, by process. `news`: of stages that tell of their layers. `mirror`: of steps on GPUs.
        `end_meetings`: the leader's."""
        self._processes = processes
        self._news = news
        self._end_meetings = end_meetings
        self.num_stages = num_stages  # in each of which a pass can be at one time
        self.shares = shares
        self.passing = passing
        self.mirror = mirror
        self._begun = 0
        self._memory: KvMemory | None = None  # what all have a share of
        self._finalizer = weakref.finalize(self, processes.close)  # whoever forgets to close leaves no process

    @property
    def pids(self) -> tuple[int, ...]:
        return self._processes.pids

    def begin(
        self, memory: KvMemory, meta: StepMeta, rows: torch.Tensor | None, on_layer: OnLayer | None
    ) -> OnLayer | None:
        """Let the others compute a step; whom the leader's part is to tell of layers. Of other stages' layers that is
        told before, in the thread that listens to them. Raises EngineBroken."""
        assert memory is self._memory, "all have a share of the last memory only"
        self.check()
        self._begun += 1
        tells = self._news is not None and on_layer is not None
        if self._news is not None and on_layer is not None:
            told = LayersTold(on_layer)
            self._news.told[self._begun] = told
            on_layer = told.up_to
        self._processes.send(step_frame(meta, rows, self._begun, tells_layers=tells))
        return on_layer

    def in_step(self) -> AbstractContextManager[None]:
        """While inside, the leader does its part of a step; whatever fails there breaks them all."""
        return self._processes.in_step()

    def check(self) -> None:
        """Raise EngineBroken once a process is lost or out of step."""
        self._processes.check()

    def close(self) -> None:
        """End the processes. A second call does nothing."""
        self._finalizer()
        self._end_meetings()

    def allocate(self, layout: KvLayout, device: torch.device) -> KvMemory:
        """Pages of which each process has its share, in memory of its own. They have one such memory at a time.

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
        """Give up the memory everywhere. Raises EngineBroken."""
        self._memory = None
        self._processes.send(Frame("free"))

    def least_pages(self, layout: KvLayout, peak_bytes: int) -> int:
        """How many pages the others have room for, each on its own GPU. Raises ValueError, EngineBroken."""
        answers = self._processes.ask(fit_frame(layout, peak_bytes), "fit", ALLOCATE_TIMEOUT_S)
        if reason := next((answer.fields["reason"] for answer in answers if answer.fields["reason"]), ""):
            raise ValueError(reason)
        return min(int(answer.fields["pages"]) for answer in answers)

    def make_steps(self, info: ModelInfo, make: Callable[[], Steps]) -> Steps:
        """All make their own at once, with the same graphs (engine/gpu/together.py). Raises EngineBroken."""
        with self._processes.in_step():
            _, steps = self._processes.ask_while(steps_frame(info), "steps", LOAD_TIMEOUT_S, make)
        return steps

    def poison(self) -> None:
        """As the leader has done with its own share. Raises EngineBroken."""
        self._processes.send(Frame("poison"))

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Likewise. Raises EngineBroken."""
        self._processes.send(copies_frame(copies))


@contextmanager
def telling(processes: Processes, frame: Frame) -> Iterator[None]:
    """A step of which every process is told by `frame` runs inside, the leader's part of it. Raises EngineBroken."""
    processes.check()
    processes.send(frame)
    with processes.in_step():
        yield
