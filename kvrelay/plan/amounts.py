"""How amounts are written: three digits, intervals, shares, times, money. Text only; no figure is made."""

from __future__ import annotations

import math

from placement.plan import Interval

UNKNOWN = 0.8  # of all requests: an interval of a share that is so wide says nothing
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


def num(value: float) -> str:
    """Three digits, thousands grouped: 0.0123, 1.42, 14.2, 1,420."""
    if not math.isfinite(value):
        return "-"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def between(interval: Interval) -> str:
    """14.2 (13.5 to 14.9)"""
    return f"{num(interval.value)} ({num(interval.low)} to {num(interval.high)})"


def percent(share: float) -> str:
    return "-" if not math.isfinite(share) else f"{share * 100:.3g}%"


def is_known(share: Interval) -> bool:
    """Whether its interval says more than that it is a share."""
    return share.high - share.low < UNKNOWN


def percent_between(interval: Interval) -> str:
    if not is_known(interval):
        return f"{percent(interval.value)} (not known)"
    return f"{percent(interval.value)} ({percent(interval.low)} to {percent(interval.high)})"


def seconds(value: float) -> str:
    """Seconds as a person says them: 12.5 ms, 250 ms, 1.2 s."""
    if not math.isfinite(value):
        return "-"
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def usd(value: float) -> str:
    return f"${value:,.2f}"


def if_known(value: float, said: str) -> str:
    """What stands in a table for a price or a power: 0 is that nobody knows it."""
    return said if value else "-"


def usd_per_million(usd_per_hour: float, rate: float) -> str:
    """Of requests, at a rate that keeps the machines as busy as they may be."""
    return f"${num(1e6 * usd_per_hour / 3600 / rate)}" if rate else "-"


def count(number: int, noun: str) -> str:
    """three prefill workers; 16 GPUs; one GPU"""
    word = NUMBERS[number] if number < len(NUMBERS) else f"{number:,}"
    return f"{word} {noun}" if number == 1 else f"{word} {noun}s"
