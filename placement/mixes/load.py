"""Load is the requests that mixes are simulated with, at any rate; DrawnLoad draws them from a workload.

The same seed gives the same lengths and gaps at every rate, the gaps stretched: rates and mixes are compared on the
same requests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from placement.workload.prefixes import brought_len
from placement.workload.requests import Workload
from placement.workload.traffic import Traffic

DRAW_SECONDS = 120.0  # as Splitwise draws
STREAMS = (0, 1, 2)  # of a seed, for gaps, prompts and outputs


class Load(Protocol):
    @property
    def source(self) -> Workload: ...

    @property
    def how(self) -> str:
        """What requests have to do with the source, for the plan's sources."""

    @property
    def draw(self) -> str:
        """The same, in a word."""

    def at(self, rate: float, seed: int) -> Workload: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrawnLoad:
    """`traffic` for `seconds`, or for as long as `min_requests` take."""

    traffic: Traffic
    seconds: float = DRAW_SECONDS
    min_requests: int = 0

    @property
    def source(self) -> Workload:
        return self.traffic.source

    @property
    def draw(self) -> str:
        if self.traffic.is_replay:
            return "replay"
        return "apart" if self.traffic.are_lengths_apart else "together"

    @property
    def how(self) -> str:
        return {
            "together": "lengths drawn from it",
            "apart": "prompt and output lengths drawn from it each by itself",
            "replay": "its own requests and gaps, at the pace of the rate",
        }[self.draw]

    def at(self, rate: float, seed: int) -> Workload:
        return self.traffic.during(max(self.seconds, self.min_requests / rate), rate, seed)


def on_prefixes(source: Workload) -> str:
    """What of its prompts a mix may have cached, and is counted as work; nothing where prompts share no prefix."""
    share = float(brought_len(source).sum() / source.prompt_len.sum())
    if not share:
        return ""
    return (
        f"Up to {share:.0%} of the prompts' tokens are prefixes of earlier prompts: with several kinds of machines all "
        "are counted as computed, so fewer may do. A plan of one kind counts what is cached."
    )


def drawn_load(
    source: Workload,
    *,
    burstiness: float = 1.0,
    is_replay: bool = False,
    are_lengths_apart: bool = False,
    seconds: float = DRAW_SECONDS,
    min_requests: int = 0,
) -> DrawnLoad:
    """Requests share no prefix: no machine is counted on to have one cached, nor is any work counted so."""
    traffic = Traffic(
        source=replace(source, blocks=()),
        burstiness=burstiness,
        is_replay=is_replay,
        are_lengths_apart=are_lengths_apart,
        streams=STREAMS,
    )
    return DrawnLoad(traffic=traffic, seconds=seconds, min_requests=min_requests)
