"""When a round counts, when it is played again, and what is told of ratios over rounds.

A round is one turn of each that is compared, or one run of one of them. It is clean where other guests of the host
stole at most STOLEN_SHARE of the cores' time and other work on this machine took at most OTHER_SHARE of it (CpuWatch).
Pure: the machine is watched by who plays.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

STOLEN_SHARE = 0.05
OTHER_SHARE = 0.15
MOST_AGAIN = 2  # of one round


class Replays:
    """How often rounds may still be played again, in one benchmark."""

    def __init__(self, left: int, cores: int | None = None) -> None:
        self.left = left
        self._cores = cores or os.cpu_count() or 1  # of the machine: what CpuWatch counts is of all

    def clean(self, play: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
        """What `play(attempt)` measured, with CpuWatch's figures, in the first clean attempt; else in the least noisy.

        Its `noise` says why it is not clean, `played_again` why each attempt was not that is not kept.
        """
        attempts = [play(0)]
        while noise_of(attempts[-1], self._cores) and self.left > 0 and len(attempts) <= MOST_AGAIN:
            self.left -= 1
            attempts.append(play(len(attempts)))
        kept = min(attempts, key=lambda one: (bool(noise_of(one, self._cores)), _noise_cores(one)))
        again = [noise_of(one, self._cores) for one in attempts if one is not kept]
        return {**kept, "noise": noise_of(kept, self._cores), "played_again": again}


def noise_of(used: Mapping[str, Any], cores: int) -> str:
    """Why what was measured beside that is noise; nothing where it is clean."""
    stolen, other = used["stolen_cores"] / cores, used["other_cores"] / cores
    if stolen > STOLEN_SHARE:
        return f"{stolen:.0%} of the cores' time was stolen by other guests"
    if other > OTHER_SHARE:
        return f"{other:.0%} of the cores' time went to other work"
    return ""


def _noise_cores(used: Mapping[str, Any]) -> float:
    return float(used["stolen_cores"] + used["other_cores"])


def counted(rounds: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The clean ones; all where none is."""
    rounds = list(rounds)
    return [one for one in rounds if not one["noise"]] or rounds


def spread(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Of (ours, theirs) in the same rounds: theirs over ours. For times, above 1 is good for us."""
    ratios = [theirs / ours for ours, theirs in pairs]
    found = {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    return {**{name: round(value, 2) for name, value in found.items()}, "rounds": len(ratios)}


def told(ratio: Mapping[str, float]) -> str:
    return "{median:.2f}x ({least:.2f}, {most:.2f})".format(**ratio)


def noise_report(rounds: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, list[str]]:
    """Of rounds by what they measured: which were played again, and which could not be had clean; and why."""
    named = [(f"{what}, round {index}", one) for what, of_one in rounds.items() for index, one in enumerate(of_one, 1)]
    return {
        "played_again": [f"{name}: {why}" for name, one in named for why in one["played_again"]],
        "not_clean": [f"{name}: {one['noise']}" for name, one in named if one["noise"]],
    }
