"""Catalog is the models that a router's process serves, each by a Router of its own over the workers of its pools:
which one a request asks for, and which one a worker is of. Models come and go while others serve (coming.py).

    of(name) -> Served      a request's: the model, or the adapter's base
    router_of(worker)       an operator's
    add, remove             one that goes is asked for no more, and stays until its last request has ended
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import grpc

from cluster.front.models.adapters import AdapterBook
from cluster.front.tokenizer import TextCodec
from cluster.router.driver import Router
from cluster.router.links.worker_link import WorkerEndpoint
from cluster.router.live.requests import RequestFailed
from cluster.router.monitoring.status import status_of
from cluster.router.takers import RouterStanding, Takers
from kvrelay.v1 import cluster_pb2, generate_pb2


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class Served:
    key: str = ""  # of the spec's `served`; empty: the cluster's own
    given_name: str = ""  # that requests call it; empty: as its workers do
    path: str = ""  # whose tokenizer `codec` is
    router: Router
    codec: TextCodec | None = None
    adapters: AdapterBook = field(default_factory=AdapterBook)
    calls: set[object] = field(default_factory=set)  # that ask for it now

    @property
    def name(self) -> str:
        if self.given_name or self.router.model is None:
            return self.given_name
        return self.router.model.name

    def ready(self) -> Served:
        """Itself, once a worker of it came up. Raises RequestFailed before."""
        if self.router.model is None:
            whose = self.name or "the cluster's own model"
            raise RequestFailed(grpc.StatusCode.UNAVAILABLE, f"no worker is ready yet for {whose}; try again later")
        return self

    @property
    def info(self) -> generate_pb2.GetModelInfoResponse:
        """Of one that is `ready`."""
        assert self.router.model is not None, "a worker of it came up"
        return self.router.model


class Catalog:
    def __init__(self, first: Served) -> None:
        self.first = first
        self._beside: dict[str, Served] = {}
        self._leaving: list[Served] = []
        self._workers: list[WorkerEndpoint] = []
        self._counted: Counter[str] = Counter()  # by routers of models that are forgotten

    def __iter__(self) -> Iterator[Served]:
        """Those that may be asked for, the cluster's own first."""
        yield self.first
        yield from self._beside.values()

    @property
    def all(self) -> list[Served]:
        """And those that leave."""
        return [*self, *self._leaving]

    @property
    def routers(self) -> list[Router]:
        """Of all of them."""
        return [served.router for served in self.all]

    def of(self, name: str) -> Served:
        """Raises RequestFailed for a name that is neither a model's nor an adapter's."""
        if name in self._beside:
            return self._beside[name]
        if name in ("", self.first.name) or name in self.first.adapters.known:
            return self.first
        models = " and ".join(repr(each.name) for each in self)
        beside = f", and its adapters {', '.join(self.first.adapters.known)}" if self.first.adapters.known else ""
        raise RequestFailed(grpc.StatusCode.NOT_FOUND, f"model is {name[:200]!r}; this router serves {models}{beside}")

    def probably(self, name: str) -> Served:
        """Likewise, or the cluster's own for whoever is told later that there is none."""
        return self._beside.get(name, self.first)

    def leaving(self, key: str) -> Served | None:
        return next((each for each in self._leaving if each.key == key), None)

    def add(self, served: Served) -> None:
        self._beside[served.key] = served
        self._tell(served)

    def remove(self, key: str) -> Served:
        """It may be asked for no more."""
        served = self._beside.pop(key)
        self._leaving.append(served)
        return served

    def forget(self, served: Served) -> None:
        """Of those that leave. What its router has counted stays in the status."""
        self._leaving.remove(served)
        self._counted.update(served.router.metrics.counts)

    def take_back(self, served: Served) -> None:
        self._leaving.remove(served)
        self._beside[served.key] = served

    # its workers

    def set_workers(self, workers: Iterable[WorkerEndpoint]) -> None:
        """These are the cluster's from now on."""
        self._workers = list(workers)
        for served in self.all:
            self._tell(served)

    def _tell(self, served: Served) -> None:
        served.router.set_workers(worker for worker in self._workers if worker.model == served.key)

    def router_of(self, worker: str) -> Router:
        """Raises RequestFailed where no router knows it."""
        for served in self.all:
            if served.router.knows(worker):
                return served.router
        known = ", ".join(link.name for served in self.all for link, *_ in served.router.workers()) or "none"
        raise RequestFailed(grpc.StatusCode.NOT_FOUND, f"there is no worker {worker!r}; there are {known}")

    @property
    def takers(self) -> Takers:
        """Of each phase of each model that may be asked for."""
        return {
            f"{phase} of {served.key}" if served.key else phase: names
            for served in self
            for phase, names in served.router.takers.items()
        }

    @property
    def standing(self) -> RouterStanding:
        ready = {name: life for served in self.all for name, life in served.router.ready_workers.items()}
        return RouterStanding(self.takers, ready, [*self._beside, *(each.key for each in self._leaving if each.calls)])

    # of all of them

    @property
    def status(self) -> cluster_pb2.GetStatusResponse:
        status = status_of(*self.routers, models=[served.name for served in self])
        for name, count in self._counted.items():
            status.counters[name] += count
        return status

    @property
    def is_ready(self) -> bool:
        """Some model has workers for every phase."""
        return any(served.router.is_ready for served in self)

    @property
    def is_whole(self) -> bool:
        """Every model has."""
        return all(served.router.is_ready for served in self)

    @property
    def num_live(self) -> int:
        return sum(served.router.num_live for served in self.all)

    @property
    def num_submissions(self) -> int:
        return sum(served.router.num_submissions for served in self.all)

    def has(self, request_id: str) -> bool:
        """Whether one of this id runs, of whatever model."""
        return any(served.router.has(request_id) for served in self.all)
