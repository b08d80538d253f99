"""What the shell offers for names that only running clusters know. It asks those that were started from here, briefly,
and offers nothing where one does not answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from kvrelay.client.client import Client
    from kvrelay.client.types import WorkerState

T = TypeVar("T")
TIMEOUT_S = 1.0


def clusters(incomplete: str) -> list[str]:
    from kvrelay import known_clusters

    return _beginning(incomplete, {cluster.name for cluster in known_clusters.alive()})


def workers(incomplete: str) -> list[str]:
    return _beginning(incomplete, {worker.name for worker in _workers()})


def pools(incomplete: str) -> list[str]:
    return _beginning(incomplete, {worker.name.rpartition("-")[0] for worker in _workers()})


def adapters(incomplete: str) -> list[str]:
    told = _asked(lambda client: client.adapters(timeout_s=TIMEOUT_S))
    return _beginning(incomplete, {adapter.name for adapter in told})


def _workers() -> Iterator[WorkerState]:
    return _asked(lambda client: client.status(timeout_s=TIMEOUT_S).workers)


def _asked(ask: Callable[[Client], Iterable[T]]) -> Iterator[T]:
    """What each cluster says."""
    from kvrelay import known_clusters
    from kvrelay.client.client import Client
    from kvrelay.client.types import KvrelayError

    for endpoint in (cluster.endpoints[0] for cluster in known_clusters.alive() if cluster.endpoints):
        with suppress(KvrelayError), Client(endpoint) as client:
            yield from ask(client)


def _beginning(incomplete: str, names: set[str]) -> list[str]:
    return sorted(name for name in names if name.startswith(incomplete))
