"""Runs carry out the searches of placement/mixes/search.py: trials in other processes, the same answers in any number.

All searches go on side by side, a round at a time: each says what it wants to know, every trial of the round is played,
each is told. A mix holds when it holds on the requests of every seed; later seeds are played only where earlier ones
held. Trials are remembered.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.pool import Pool

from placement.compiled.pool import simulation_pool
from placement.goodput.runner import used_cpu_s
from placement.mixes.designs import Design, Mix
from placement.mixes.search import Found, Question, Questions
from placement.mixes.trial import Scene, Verdict, judge

Progress = Callable[[str, int, int], None]
Seeds = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """One design's questions. `step`: requests/s from one rate of the grid to the next."""

    design: Design
    step: float
    seeds: Seeds
    questions: Questions


@dataclass(frozen=True, slots=True)
class Trial:
    """Hashable by the design's name: one run knows one design of a name."""

    design: str
    num_prompt: int
    num_token: int
    rate: float
    seed: int


@dataclass(slots=True)
class Runs:
    """`pool` None: trials are played in this process, by the sources as they are."""

    scene: Scene
    pool: Pool | None = None
    on_progress: Progress | None = None
    verdicts: dict[Trial, Verdict] = field(default_factory=dict)
    cpu_s: float = 0.0
    num_simulated: int = 0  # requests

    def find(self, what: str, searches: Sequence[Search]) -> list[Found | None]:
        """What each search found, in their order."""
        found: list[Found | None] = [None] * len(searches)
        waiting: dict[int, Sequence[Question]] = {}
        for i, search in enumerate(searches):
            self._step(i, search, None, waiting, found)
        while waiting:
            self._tell(what, len(searches) - len(waiting), len(searches))
            answers = self._ask([(searches[i], asked) for i, asked in waiting.items()])
            for i, held in zip(list(waiting), answers, strict=True):
                self._step(i, searches[i], held, waiting, found)
        self._tell(what, len(searches), len(searches))
        return found

    def _step(
        self,
        i: int,
        search: Search,
        held: list[bool] | None,
        waiting: dict[int, Sequence[Question]],
        found: list[Found | None],
    ) -> None:
        try:
            waiting[i] = next(search.questions) if held is None else search.questions.send(held)
        except StopIteration as end:
            waiting.pop(i, None)
            found[i] = end.value

    def _tell(self, what: str, done: int, total: int) -> None:
        if self.on_progress is not None:
            self.on_progress(f"{what}, {len(self.verdicts)} simulations", done, total)

    def _ask(self, rounds: Sequence[tuple[Search, Sequence[Question]]]) -> list[list[bool]]:
        held = [[True] * len(asked) for _, asked in rounds]
        for place in range(max(len(search.seeds) for search, _ in rounds)):
            wanted = {
                (i, j): (search.design, _trial(search, question, search.seeds[place]))
                for i, (search, asked) in enumerate(rounds)
                for j, question in enumerate(asked)
                if place < len(search.seeds) and held[i][j]
            }
            self.play(list(wanted.values()))
            for (i, j), (_, trial) in wanted.items():
                held[i][j] = self.verdicts[trial].is_met
        return held

    def play(self, wanted: Sequence[tuple[Design, Trial]]) -> None:
        """Every trial that is not known yet."""
        new = {trial: design for design, trial in wanted if trial not in self.verdicts}
        jobs = [(self.scene, mix_of(design, trial), trial.rate, trial.seed) for trial, design in new.items()]
        results = self.pool.starmap(timed, jobs, chunksize=1) if self.pool else [timed(*job) for job in jobs]
        for trial, (verdict, cpu_s) in zip(new, results, strict=True):
            self.verdicts[trial] = verdict
            self.cpu_s += cpu_s
            self.num_simulated += verdict.num_requests


def _trial(search: Search, question: Question, seed: int) -> Trial:
    prompt, token, rate = question
    return Trial(search.design.name, prompt, token, rate * search.step, seed)


def mix_of(design: Design, trial: Trial) -> Mix:
    return Mix(design=design, num_prompt=trial.num_prompt, num_token=trial.num_token)


def timed(scene: Scene, mix: Mix, rate: float, seed: int) -> tuple[Verdict, float]:
    began_s = used_cpu_s()
    verdict = judge(scene, mix, rate, seed)
    return verdict, used_cpu_s() - began_s


@contextmanager
def pool_of(processes: int | None) -> Iterator[Pool | None]:
    """`processes` 0: none, everything in this process; None: one for each core."""
    count = len(os.sched_getaffinity(0)) if processes is None else processes
    if count <= 0:
        yield None
        return
    with simulation_pool(count) as pool:
        yield pool
