"""The part of `kvrelay bench` that compares two servers and sweeps over rates: its flags, and what it prints."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrelay.cli.console import note, print_json
from kvrelay.cli.progress import request_progress

if TYPE_CHECKING:
    from kvrelay.bench.metrics import Outcome
    from kvrelay.bench.openai import OpenAITarget
    from kvrelay.bench.options import PlayOptions, WorkloadOptions
    from kvrelay.bench.series.turns import Series
    from kvrelay.client.access import Access


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesFlags:
    """Both together, either, or neither: then one run."""

    compare: Annotated[
        list[str] | None,
        typer.Option(
            help="Two servers, played in turns: --compare A B, each HOST:PORT of a router, or a URL of OpenAI's API."
        ),
    ] = None
    rates: Annotated[
        str | None, typer.Option(help="Play each of these rates, such as 1,2,4,8; auto: search the knee.")
    ] = None
    rounds: Annotated[int, typer.Option(min=1, max=100, help="With --compare or --rates: of each rate.")] = 3
    attainment: Annotated[
        float,
        typer.Option(min=0.01, max=0.999, help="With --rates: the share that is to meet --goodput, up to the knee."),
    ] = 0.9
    distinct_prompts: Annotated[
        bool,
        typer.Option("--distinct-prompts", help="With --compare: for two doors of one cluster, which has one cache."),
    ] = False

    @property
    def is_asked(self) -> bool:
        return bool(self.compare or self.rates)

    def series(
        self, target: str | OpenAITarget, other: Mapping[str, Any], rate: float, slos_s: Mapping[str, float]
    ) -> Series:
        """`target`: what is played without --compare. `other`: of an OpenAI server. Raises WorkloadError."""
        from kvrelay.bench.series.turns import Series, parse_rates
        from kvrelay.bench.workload import WorkloadError

        if self.compare and len(self.compare) != 2:
            raise WorkloadError(f"--compare has {len(self.compare)} servers; give two: --compare A B")
        if self.rates and not slos_s:
            raise WorkloadError(f"--rates {self.rates} looks for the knee of targets; give --goodput ttft:500 tpot:50")
        asked = {name: _target(name, other) for name in self.compare or ()}
        if self.compare and len(asked) < 2:
            raise WorkloadError(f"--compare has {self.compare[0]} twice; give two servers")
        return Series(
            targets=asked or {target if isinstance(target, str) else target.base_url: target},
            rates=parse_rates(self.rates) if self.rates else [rate],
            rounds=self.rounds,
            slos_s=slos_s,
            wanted=self.attainment,
            distinct_prompts=self.distinct_prompts,
        )


def _target(text: str, other: Mapping[str, Any]) -> str | OpenAITarget:
    from kvrelay.bench.openai import OpenAITarget

    return OpenAITarget(base_url=text, **other) if text.startswith(("http://", "https://")) else text


def play(
    series: Series, workload: WorkloadOptions, playing: PlayOptions, access: Access, *, show: bool
) -> dict[str, Any]:
    """The whole result. Raises WorkloadError, KvrelayError."""
    from kvrelay.bench.machine import about
    from kvrelay.bench.results import settings_object
    from kvrelay.bench.series.comparing import series_object
    from kvrelay.bench.series.turns import play_series

    def watch(what: str, total: int) -> AbstractContextManager[Callable[[Outcome], None]]:
        return request_progress(total, show=show, what=what)

    played = asyncio.run(play_series(series, workload, playing, access=access, watch=watch))
    return series_object(series, played, settings_object(workload, playing), about())


def show(result: dict[str, Any], saved: Path | None, as_json: bool) -> None:
    from rich.console import Console

    from kvrelay.bench.series.comparing import uneven_cache
    from kvrelay.bench.series.words import knee_words, series_tables

    if why := uneven_cache(result):
        note(f"note: {why}")
    if as_json:
        turns = [{key: value for key, value in turn.items() if key != "samples"} for turn in result["turns"]]
        print_json(result | {"turns": turns} | ({"saved": str(saved)} if saved else {}))
        return
    console = Console()
    for table in series_tables(result):
        console.print(table, highlight=False)
    for side, found in result.get("knees", {}).items():
        print(f"{side}: {knee_words(found, result['wanted_attainment'])}")
    if saved:
        print(f"saved to {saved}; kvrelay report {saved} makes a page of it")
