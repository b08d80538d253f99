"""A model that was prepared in the process that this one was forked of, for whoever loads by the same options. Its
weights are then the same memory in all forks, and no fork waits for what was done once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from engine.options import EngineOptions
from engine.weights.files import Files, files_of

if TYPE_CHECKING:
    from engine.loading.load import Prepared

Log = list[logging.LogRecord]
Key = tuple[EngineOptions, Files]


@dataclass(slots=True)
class _Kept:
    key: Key
    prepared: Prepared
    log: Log


_kept: list[_Kept] = []  # one, in a process that prepared one and in its forks


def key_of(options: EngineOptions) -> Key:
    """By which a model is loaded: as it stands in its files now."""
    return alike(options), files_of(Path(options.model))


def put(key: Key, prepared: Prepared, log: Log) -> None:
    """`key`: from before it was loaded. `log`: what was said of it, for those who load to say it where they log."""
    _kept[:] = [_Kept(key, prepared, log)]


def take(options: EngineOptions) -> Prepared | None:
    """Once: an engine runs its model alone. Whoever loads another one lets go of it."""
    kept = _kept.pop() if _kept else None
    if kept is None or kept.key != key_of(options):
        return None
    for record in kept.log:
        if (logger := logging.getLogger(record.name)).isEnabledFor(record.levelno):
            logger.handle(record)
    return kept.prepared


def alike(options: EngineOptions) -> EngineOptions:
    """The same for all who can share a model: without what is of pages, adapters and cores, which come later."""
    return replace(options, num_pages=None, kv_bytes=None, max_adapters=1, rank_cpus=())


class _LogKeeper(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.log: Log = []

    def emit(self, record: logging.LogRecord) -> None:
        self.log.append(record)


@contextmanager
def kept_log() -> Iterator[Log]:
    """What the engine says inside, of all that workers log."""
    keeper = _LogKeeper()
    engine = logging.getLogger("engine")
    before = engine.level
    engine.setLevel(logging.INFO)
    engine.addHandler(keeper)
    try:
        yield keeper.log
    finally:
        engine.removeHandler(keeper)
        engine.setLevel(before)
