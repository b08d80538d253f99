"""What each key used, as clients see it: what routers tell, summed over those of a cluster, grouped and priced."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace

from kvrelay.v1 import cluster_pb2 as pb

PER = 1_000_000  # tokens that a price is for


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyUsage:
    hour_s: int  # its begin, in seconds since 1970
    key: str  # the name of a client's token; empty: it has none
    requests: int
    prompt_tokens: int
    cached_tokens: int  # of the prompts'
    generated_tokens: int
    prefill_s: float
    handoff_s: float
    decode_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Of a million tokens each."""

    currency: str
    prompt: float  # without the cached
    cached: float
    generated: float

    def cost(self, used: KeyUsage) -> float:
        uncached = used.prompt_tokens - used.cached_tokens
        priced = uncached * self.prompt + used.cached_tokens * self.cached + used.generated_tokens * self.generated
        return priced / PER


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    database: str  # its identity: several routers may tell of one
    rows: tuple[KeyUsage, ...]
    prices: Prices | None


NUMBERS = tuple(field.name for field in fields(KeyUsage) if field.name not in ("hour_s", "key"))


def usage_from(answer: pb.GetUsageResponse) -> Usage:
    rows = tuple(
        KeyUsage(hour_s=each.hour_s, key=each.key, **{name: getattr(each, name) for name in NUMBERS})
        for each in answer.usage
    )
    prices = None
    if answer.HasField("prices"):
        told = answer.prices
        prices = Prices(currency=told.currency, prompt=told.prompt, cached=told.cached, generated=told.generated)
    return Usage(database=answer.database, rows=rows, prices=prices)


def of_all(told: Iterable[Usage]) -> list[KeyUsage]:
    """Of several routers, in the order in which they were asked: of a database that several tell, the last one's."""
    return [row for usage in {usage.database: usage for usage in told}.values() for row in usage.rows]


def grouped_by(rows: Iterable[KeyUsage], group_of: Callable[[KeyUsage], str]) -> dict[str, KeyUsage]:
    """The sums, in the order of the groups' names."""
    sums: dict[str, KeyUsage] = {}
    for row in rows:
        group = group_of(row)
        sums[group] = added(sums[group], row) if group in sums else row
    return dict(sorted(sums.items()))


def added(one: KeyUsage, other: KeyUsage) -> KeyUsage:
    return replace(one, **{name: getattr(one, name) + getattr(other, name) for name in NUMBERS})
