"""AdapterBook is what a router knows of the LoRA adapters that requests may name: where each lies, and a digest of its
files, by which workers know that they have the same. It holds no weights.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import grpc

from cluster.router.live.requests import RequestFailed
from engine.adapters.files import AdapterError, AdapterFiles, read_adapter
from engine.types import InvalidRequest
from kvrelay.v1 import worker_pb2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownAdapter:
    name: str
    path: str
    files: AdapterFiles | None  # None: they cannot be read
    why_not: str = ""

    def message(self) -> worker_pb2.Adapter:
        """For workers. Raises RequestFailed."""
        if self.files is None:
            raise RequestFailed(
                grpc.StatusCode.FAILED_PRECONDITION, f"adapter {self.name!r} is not served: {self.why_not}"
            )
        return worker_pb2.Adapter(name=self.name, path=self.path, digest=self.files.digest)


class AdapterBook:
    def __init__(self) -> None:
        self.known: Mapping[str, KnownAdapter] = {}

    def read(self, wanted: Mapping[str, str]) -> Mapping[str, KnownAdapter]:
        """Directories by name: what `known` is to be. Reads the files of those that are not known yet; takes time."""
        found: dict[str, KnownAdapter] = {}
        for name, path in sorted(wanted.items()):
            known = self.known.get(name)
            if known is None or known.path != path or known.files is None:
                known = _read(name, path)
            found[name] = known
        return found

    def check_name(self, name: str, served: str) -> None:
        """Raises RequestFailed unless it is the model's, or an adapter's."""
        if name in ("", served) or name in self.known:
            return
        beside = f", and its adapters {', '.join(self.known)}" if self.known else ""
        raise RequestFailed(
            grpc.StatusCode.NOT_FOUND, f"model is {name[:200]!r}; this router serves {served!r}{beside}"
        )

    def asked(self, model: str, adapter: str) -> worker_pb2.Adapter | None:
        """Of a request whose model is one of check_name's. Raises RequestFailed, InvalidRequest."""
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
    try:
        return KnownAdapter(name=name, path=path, files=read_adapter(path))
    except AdapterError as error:
        log.warning("adapter %s is not served: %s", name, error)
        return KnownAdapter(name=name, path=path, files=None, why_not=str(error))
