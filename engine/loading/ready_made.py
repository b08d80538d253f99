"""A model that was prepared in the process that this one was forked of, for whoever loads by the same options. Its
weights are then the same memory in all forks, and no fork waits for what was done once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import TYPE_CHECKING

from engine.options import EngineOptions
from engine.weights.files import Files, files_of

if TYPE_CHECKING:  # whoever asks who can share a model has no torch
    from engine.adapters.products import Adaptable
    from engine.loading.parity import Reference
    from engine.paged_model import PagedModel
    from engine.types import ModelInfo

MOST_LINES = 10_000  # that are kept of a log
Log = list[logging.LogRecord]
Key = tuple[EngineOptions, Files]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A model that is checked, and has no pages yet. `reference`: what its own code says; None: it was not asked."""

    info: ModelInfo
    model: PagedModel
    reference: Reference | None
    adaptable: Adaptable


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


def clear() -> None:
    _kept.clear()


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
    """The same for all who can share a model: without what is of pages, adapters, threads and cores."""
    return replace(options, num_pages=None, kv_bytes=None, max_adapters=1, threads=None, rank_cpus=())


@contextmanager
def kept_log() -> Iterator[Log]:
    """What the engine says inside, of all that workers log."""
    keeper = BufferingHandler(MOST_LINES)
    engine = logging.getLogger("engine")
    before = engine.level
    engine.setLevel(logging.INFO)
    engine.addHandler(keeper)
    try:
        yield keeper.buffer
    finally:
        engine.removeHandler(keeper)
        engine.setLevel(before)
