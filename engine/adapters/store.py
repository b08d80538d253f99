"""Adapters are those that an engine has in memory: loaded when a request first names one, and forgotten, those first
that were used longest ago, when there are more than it keeps.

An adapter is known by its digest. Any thread may load one; one thread runs steps.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from engine.adapters.files import AdapterError, AdapterFiles, describe, read_adapter
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
        is_native: bool,
        most: int,
        why_none: str = "",
    ) -> None:
        """`most`: that are kept, where a step needs no more. `why_none`: it can serve none, for that reason."""
        self._adaptable = adaptable
        self._device = device
        self._is_native = is_native
        self._most = most
        self._why_none = why_none
        self._lock = threading.Lock()
        self._loaded: OrderedDict[str, AdapterWeights] = OrderedDict()  # by digest; the last used last
        self._in_use: frozenset[str] = frozenset()  # by the step that runs

    @property
    def linears(self) -> Sequence[Numbered]:
        """Those that an adapter may change."""
        return self._adaptable.linears

    @property
    def names(self) -> Sequence[str]:
        """Digests of those in memory."""
        return list(self._loaded)

    def is_loaded(self, adapter: Adapter) -> bool:
        return adapter.digest in self._loaded

    def expect(self, adapter: Adapter) -> bool:
        """It will be wanted soon: begin to load it, unless it is there (False). Returns at once. Raises AdapterError
        where it is plain that it cannot be had; what comes out later, `load` says."""
        if self.is_loaded(adapter):
            return False
        with self._told(adapter):
            parts, _ = describe(adapter.path)
            check_fits(adapter.path, parts, self._adaptable)
        threading.Thread(target=self._try_to_load, args=(adapter,), name="adapter", daemon=True).start()
        return True

    def _try_to_load(self, adapter: Adapter) -> None:
        with suppress(AdapterError):
            self.load(adapter)

    def load(self, adapter: Adapter) -> AdapterWeights:
        """Returns it at once where it is in memory. Raises AdapterError."""
        with self._lock:
            if (weights := self._loaded.get(adapter.digest)) is not None:
                self._loaded.move_to_end(adapter.digest)
                return weights
            began_s = time.monotonic()
            with self._told(adapter):
                files = self._files(adapter)
                weights = load_weights(files, self._adaptable, self._device, is_native=self._is_native)
            self._loaded[adapter.digest] = weights
            took_ms, size_mb = 1e3 * (time.monotonic() - began_s), weights.num_bytes / 1e6
            logger.info("adapter %s is loaded: %.1f MB in %.0f ms", adapter.name, size_mb, took_ms)
            self._forget_oldest(but=adapter.digest)
            return weights

    @contextmanager
    def _told(self, adapter: Adapter) -> Iterator[None]:
        """What is wrong with it, with its name."""
        try:
            if self._why_none:
                raise AdapterError(self._why_none)
            yield
        except AdapterError as error:
            raise AdapterError(f"adapter {adapter.name!r} cannot be served: {error}") from None

    def _files(self, adapter: Adapter) -> AdapterFiles:
        files = read_adapter(adapter.path)
        if files.digest != adapter.digest:
            raise AdapterError(f"{adapter.path} holds another one than when it was added; remove it, and add it again")
        return files

    def _forget_oldest(self, *, but: str) -> None:
        for digest in list(self._loaded):
            if len(self._loaded) <= self._most:
                return
            if digest != but and digest not in self._in_use:
                del self._loaded[digest]

    @contextmanager
    def of(self, chunks: Sequence[Chunk]) -> Iterator[None]:
        """Steps that are begun inside have these chunks' adapters. Raises AdapterError."""
        if not any(chunk.adapter is not None for chunk in chunks):
            self._in_use = frozenset()
            yield
            return
        self._in_use = frozenset(chunk.adapter.digest for chunk in chunks if chunk.adapter is not None)
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
        return NativeAdapters(rows) if self._is_native else TorchAdapters(rows)
