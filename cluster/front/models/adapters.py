"""AdapterBook is what a router knows of the LoRA adapters that requests may name: where each lies, and a digest of its
files, by which workers know that they have the same. It holds no weights.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import grpc

from cluster.router.live.requests import RequestFailed
from engine.adapters.files import AdapterError, AdapterFiles, describe, read_adapter, stamp_of
from engine.types import InvalidRequest
from kvrelay.v1 import worker_pb2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownAdapter:
    name: str
    path: str
    files: AdapterFiles | None  # None: they cannot be read
    stamp: tuple[int, ...] = ()  # of the files, when they were read
    why_not: str = ""

    def message(self) -> worker_pb2.Adapter:
        """For workers. Raises RequestFailed, whose sentence does not say where it lies."""
        if self.files is None:
            why = self.why_not.replace(self.path, "its directory")
            raise RequestFailed(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"adapter {self.name!r} is not served: {why}; have it added again (kvrelay adapter add) once it can be",
            )
        return worker_pb2.Adapter(name=self.name, path=self.path, digest=self.files.digest)


class AdapterBook:
    def __init__(self) -> None:
        self.known: Mapping[str, KnownAdapter] = {}

    def read(self, wanted: Mapping[str, str]) -> Mapping[str, KnownAdapter]:
        """Directories by name: what `known` is to be. Reads the files of those that are new, or others by now; takes
        time."""
        return {
            name: known if (known := self._as_it_is(name, path)) is not None else _read(name, path)
            for name, path in sorted(wanted.items())
        }

    def _as_it_is(self, name: str, path: str) -> KnownAdapter | None:
        known = self.known.get(name)
        is_same = known is not None and known.path == path and known.files is not None
        return known if is_same and known is not None and known.stamp == stamp_of(path) else None

    def why_not(self, wanted: Mapping[str, str]) -> str:
        """Why one of those that come cannot be served, by its config and header; empty if all can."""
        there = {known.path for known in self.known.values()}
        try:
            for path in sorted({*wanted.values()} - there):
                describe(path)
        except AdapterError as error:
            return str(error)
        return ""

    @property
    def served(self) -> list[str]:
        """Names of those that can be read."""
        return [name for name, known in self.known.items() if known.files is not None]

    def asked(self, model: str, adapter: str) -> worker_pb2.Adapter | None:
        """Of a request for this model, or for an adapter. Raises RequestFailed, InvalidRequest."""
        if adapter and model in self.known and model != adapter:
            raise InvalidRequest(f"model is {model!r} and adapter is {adapter!r}; give one of the two")
        name = adapter or (model if model in self.known else "")
        if not name:
            return None
        if name not in self.known:
            there = f"there are {', '.join(self.known)}" if self.known else "there is none"
            raise RequestFailed(grpc.StatusCode.NOT_FOUND, f"adapter is {name[:200]!r}; {there}")
        return self.known[name].message()


def _read(name: str, path: str) -> KnownAdapter:
    stamp = stamp_of(path)
    try:
        return KnownAdapter(name=name, path=path, files=read_adapter(path), stamp=stamp)
    except AdapterError as error:
        log.warning("adapter %s is not served: %s", name, error)
        return KnownAdapter(name=name, path=path, files=None, why_not=str(error))
