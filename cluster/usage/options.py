"""UsageOptions say where a router counts what its clients use, and Prices what that costs. Values."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from engine.knobs import check, knob
from worker.wire.private_files import state_folder

OFF = "off"
SCHEMES = ("postgresql", "postgres")  # libpq's


@dataclass(frozen=True, slots=True)
class UsageUrl:
    """A database elsewhere."""

    url: str = field(repr=False)  # may hold a password
    ledgers: Path  # how the names of routers' ledgers begin


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageOptions:
    usage_db: str | None = knob(
        None,
        "an SQLite file on the router's node, or a `postgresql://` URL, that says what each key used; null: a file of "
        "the cluster's, where `kvrelay` keeps its state; off: nothing is counted. See [accounts.md](accounts.md)",
        fixed="a router counts into one place from its start",
    )

    def __post_init__(self) -> None:
        check(self)
        scheme, is_url, _ = (self.usage_db or "").partition("://")
        if is_url and scheme not in SCHEMES:
            raise ValueError(
                f"usage_db has the scheme {scheme}; give postgresql://USER@HOST/DATABASE, the path of a file, or off"
            )

    def place(self, cluster: str) -> Path | UsageUrl | None:
        """None: nothing is counted."""
        if self.usage_db == OFF:
            return None
        folder = state_folder() / "usage" / cluster
        if self.usage_db is not None and "://" in self.usage_db:
            return UsageUrl(self.usage_db, folder / "postgresql")
        return Path(self.usage_db) if self.usage_db else folder / "usage.db"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Of a million tokens each. A prompt's cached tokens cost `cached`, its others `prompt`."""

    currency: str
    prompt: float
    cached: float
    generated: float
