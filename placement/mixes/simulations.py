"""Simulations of one scenario, each point once, and the searches of placement/mixes/search.py that ask for them.

All searches go on side by side, a round at a time: each says what it wants to know, every point of the round is
simulated by the runner, each is told. A mix holds a rate when it holds it on the requests of every seed; later seeds
are played only where earlier ones held. So the answers are the same in any number of processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from placement.goodput.runner import Progress, Runner
from placement.mixes.designs import Design, Mix
from placement.mixes.grid import Asking, GridPoint
from placement.mixes.scenario import LoadPoint, PointResult, Scenario, simulate_point


@dataclass(frozen=True, slots=True, kw_only=True)
class DesignSearch:
    """One design's search. `step`: requests/s from one rate of the grid to the next."""

    design: Design
    step: float
    seeds: tuple[int, ...]
    asking: Asking

    def load_point(self, asked: GridPoint, seed: int) -> LoadPoint:
        mix = Mix(design=self.design, num_prompt=asked.num_prompt, num_token=asked.num_token)
        return LoadPoint(mix, asked.rate * self.step, seed)


@dataclass(slots=True)
class Simulations:
    """`results` know one design of a name."""

    scenario: Scenario
    runner: Runner
    on_progress: Progress | None = None
    results: dict[LoadPoint, PointResult] = field(default_factory=dict)
    cpu_s: float = 0.0
    num_simulated: int = 0  # requests

    def search(self, what: str, searches: Sequence[DesignSearch]) -> list[GridPoint | None]:
        """What each search answers, in their order."""
        answers: list[GridPoint | None] = [None] * len(searches)
        waiting: dict[int, Sequence[GridPoint]] = {}
        for i, search in enumerate(searches):
            self._advance(i, search, None, waiting, answers)
        while waiting:
            self._tell(what, len(searches) - len(waiting), len(searches))
            rounds = self._are_held([(searches[i], asked) for i, asked in waiting.items()])
            for i, held in zip(list(waiting), rounds, strict=True):
                self._advance(i, searches[i], held, waiting, answers)
        self._tell(what, len(searches), len(searches))
        return answers

    def _advance(
        self,
        i: int,
        search: DesignSearch,
        held: list[bool] | None,
        waiting: dict[int, Sequence[GridPoint]],
        answers: list[GridPoint | None],
    ) -> None:
        try:
            waiting[i] = next(search.asking) if held is None else search.asking.send(held)
        except StopIteration as end:
            waiting.pop(i, None)
            answers[i] = end.value

    def _tell(self, what: str, done: int, total: int) -> None:
        if self.on_progress is not None:
            self.on_progress(f"{what}, {len(self.results)} simulations", done, total)

    def _are_held(self, rounds: Sequence[tuple[DesignSearch, Sequence[GridPoint]]]) -> list[list[bool]]:
        held = [[True] * len(asked) for _, asked in rounds]
        for place in range(max(len(search.seeds) for search, _ in rounds)):
            points = {
                (i, j): search.load_point(grid_point, search.seeds[place])
                for i, (search, asked) in enumerate(rounds)
                for j, grid_point in enumerate(asked)
                if place < len(search.seeds) and held[i][j]
            }
            self.simulate(list(points.values()))
            for (i, j), point in points.items():
                held[i][j] = self.results[point].judgement.is_met
        return held

    def simulate(self, points: Sequence[LoadPoint]) -> None:
        """Every point that is not known yet."""
        new = [point for point in dict.fromkeys(points) if point not in self.results]
        if not new:
            return
        results = self.runner.map(simulate_point, [(self.scenario, point) for point in new], "simulations")
        for point, result in zip(new, results, strict=True):
            self.results[point] = result
            self.cpu_s += result.cpu_s
            self.num_simulated += result.num_requests
