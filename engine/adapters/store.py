"""Adapters are those that an engine has in memory: loaded when a request first names one, in a thread of their own.

One lives as long as anybody holds it: a request does, by the future that `begin` gave it, and so does a step; beside
those, the ones that were used last are kept. An adapter is known by its digest. Any thread may begin to load one; one
thread runs steps.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from weakref import WeakValueDictionary

import torch

from engine.adapters.files import AdapterError, describe
from engine.adapters.products import Adaptable, Numbered, StepAdapters
from engine.adapters.weights import AdapterWeights, NativeAdapters, Rows, TorchAdapters, check_fits, load_weights
from engine.types import Adapter, Chunk

logger = logging.getLogger(__name__)


class Adapters:
    def __init__(
        self,
        adaptable: Adaptable,
        *,
        device: torch.device,
        row_multiple: int,
        is_native: bool,
        most: int,
        why_none: str = "",
    ) -> None:
        """`row_multiple`: to which a step's rows are padded. `most`: that are kept though nobody holds them.
        `why_none`: it can serve none, for that reason."""
        self._adaptable = adaptable
        self._device = device
        self._row_multiple = row_multiple
        self._is_native = is_native
        self._most = most
        self._why_none = why_none
        self._lock = threading.Lock()
        self._alive: WeakValueDictionary[str, AdapterWeights] = WeakValueDictionary()  # by digest
        self._kept: OrderedDict[str, AdapterWeights] = OrderedDict()  # the last used last
        self._loading: dict[str, Future[AdapterWeights]] = {}
        self.num_loads = 0

    @property
    def linears(self) -> Sequence[Numbered]:
        """Those that an adapter may change."""
        return self._adaptable.linears

    @property
    def digests(self) -> set[str]:
        """Of those in memory."""
        return set(self._alive)

    def check(self, adapter: Adapter) -> None:
        """Raises AdapterError where it is plain from its config and header that it cannot be had."""
        if adapter.digest not in self._alive:
            with self._told(adapter):
                check_fits(adapter.path, describe(adapter.path), self._adaptable)

    def begin(self, adapter: Adapter) -> Future[AdapterWeights]:
        """Returns at once; the result is an AdapterError where it cannot be had. It stays in memory for as long as this
        future is held."""
        with self._lock:
            if (weights := self._used(adapter.digest)) is not None:
                done: Future[AdapterWeights] = Future()
                done.set_result(weights)
                return done
            loading = self._loading.get(adapter.digest)
            if loading is not None:
                return loading
            loading = self._loading[adapter.digest] = Future()
        thread = threading.Thread(target=self._load, args=(adapter, loading), name="adapter", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no thread is to be had
            with self._lock:
                del self._loading[adapter.digest]
            loading.set_exception(error)
        return loading

    def load(self, adapter: Adapter) -> AdapterWeights:
        """Waits for it. Raises AdapterError."""
        with self._lock:
            if (weights := self._used(adapter.digest)) is not None:
                return weights
        return self.begin(adapter).result()

    def _load(self, adapter: Adapter, loading: Future[AdapterWeights]) -> None:
        began_s = time.monotonic()
        try:
            with self._told(adapter):
                weights = load_weights(adapter, self._adaptable, self._device, is_native=self._is_native)
        except BaseException as error:
            with self._lock:
                del self._loading[adapter.digest]
            loading.set_exception(error)
            return
        took_ms, size_mb = 1e3 * (time.monotonic() - began_s), weights.num_bytes / 1e6
        logger.info("adapter %s is loaded: %.1f MB in %.0f ms", adapter.name, size_mb, took_ms)
        with self._lock:
            self.num_loads += 1
            self._alive[adapter.digest] = weights
            self._keep(weights)
            del self._loading[adapter.digest]
        loading.set_result(weights)

    def _used(self, digest: str) -> AdapterWeights | None:
        """What is in memory, and is the last used by now. Under the lock."""
        if (weights := self._alive.get(digest)) is not None:
            self._keep(weights)
        return weights

    def _keep(self, weights: AdapterWeights) -> None:
        self._kept[weights.digest] = weights
        self._kept.move_to_end(weights.digest)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)

    @contextmanager
    def _told(self, adapter: Adapter) -> Iterator[None]:
        """What is wrong with it, with its name. Where it lies is for the log: a client reads the rest."""
        try:
            if self._why_none:
                raise AdapterError(self._why_none)
            yield
        except AdapterError as error:
            logger.warning("adapter %s cannot be served: %s", adapter.name, error)
            why = str(error).replace(adapter.path, "its directory")
            raise AdapterError(f"adapter {adapter.name!r} cannot be served: {why}") from None

    @contextmanager
    def of(self, chunks: Sequence[Chunk]) -> Iterator[None]:
        """Steps that are begun inside have these chunks' adapters. Raises AdapterError."""
        if not any(chunk.adapter is not None for chunk in chunks):
            yield
            return
        self._adaptable.step = self._step_of(chunks)
        try:
            yield
        finally:
            self._adaptable.step = None

    def _step_of(self, chunks: Sequence[Chunk]) -> StepAdapters:
        rows: list[Rows] = []
        first = 0
        for chunk in chunks:
            end = first + len(chunk.token_ids)
            if chunk.adapter is not None:
                weights = self.load(chunk.adapter)
                if rows and rows[-1].end == first and rows[-1].weights is weights:
                    rows[-1] = rows[-1]._replace(end=end)
                else:
                    rows.append(Rows(first, end, weights))
            first = end
        count = -(-first // self._row_multiple) * self._row_multiple
        return NativeAdapters(rows, count) if self._is_native else TorchAdapters(rows, count)
