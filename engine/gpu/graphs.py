"""DecodeGraphs replays a decode step as one CUDA graph for each of a few batch sizes.

    load   for each size, largest first: dummy rows -> one run that plans and warms up -> capture
    step   pad with dummy rows -> one upload into the places the graph reads -> plan again -> replay

A dummy row is token 0 at position 0 of the reserved page, which no request is ever given. Whatever the graph reads
stands in static places; what the host planned is copied in the order of the stream, so a replay that is still running
is not disturbed. A size that cannot be captured is left out: the next larger graph, or none, runs its steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from engine.attention.base import StepMeta, build_meta
from engine.attention.tables import ON_DEVICE as TABLE_NAMES
from engine.attention.tables import PageTables, page_tables
from engine.device import Capture
from engine.errors import in_short, raise_if_broken
from engine.gpu.staging import StaticUploader
from engine.types import Chunk

logger = logging.getLogger(__name__)

SMALL_SIZES = (1, 2, 4)
SIZE_STEP = 8
WARM_UPS = 2

Run = Callable[[StepMeta], torch.Tensor]  # logits [rows, vocab] of every row


class Replans(Protocol):
    @property
    def reads_block_tables(self) -> bool: ...

    def replan(self, static: PageTables, now: PageTables) -> None: ...


def sizes_up_to(most: int) -> tuple[int, ...]:
    """1, 2, 4, then every 8, and `most` itself."""
    sizes = [size for size in SMALL_SIZES if size <= most] + list(range(SIZE_STEP, most + 1, SIZE_STEP))
    return tuple(sorted({*sizes, most}))


@dataclass(frozen=True, slots=True)
class _Graph:
    meta: StepMeta
    replay: Callable[[], object]
    logits: torch.Tensor


class DecodeGraphs:
    def __init__(
        self,
        *,
        device: torch.device,
        sizes: Sequence[int],
        page_size: int,
        reserved_page: int,
        max_pages: int,
        backend: Replans,
        run: Run,
        capture: Capture,
        has_rope_lengths: bool,
    ) -> None:
        """`max_pages`: of one sequence. `run` is called for each size to warm up, then under `capture`. The model reads
        rope lengths where it has some. Raises EngineBroken when a capture takes the device with it."""
        self._page_size = page_size
        self._dummy = Chunk(request_id="", token_ids=(0,), start=0, block_table=(reserved_page,))
        self._backend = backend
        most = max(sizes)
        self._block_tables = torch.zeros(most * max_pages, dtype=torch.int32, device=device)
        self._columns = torch.arange(max_pages, device=device)
        self._has_rope_lengths = has_rope_lengths
        self._upload = StaticUploader(
            device,
            {
                "token_ids": (np.int64, most),
                "rope_positions": (np.int64, most),
                **({"rope_lengths": (np.int64, most)} if has_rope_lengths else {}),
                "slots": (np.int64, most),
                "kv_indptr": (np.int32, most + 1),
                "last_page_len": (np.int32, most),
                "kv_lens": (np.int32, most),
                "batch_indices": (np.int32, most),
                "positions": (np.int32, most),
                "kv_indices": (np.int32, most * max_pages),
            },
        )
        metas = {size: self._static_meta(size, max_pages) for size in sorted(sizes, reverse=True)}
        self._metas = metas  # of sizes left out, too: a backend knows a graph by the identity of its tables
        self._graphs = self._captured(run, capture)
        self.sizes = tuple(sorted(self._graphs))

    def size_for(self, num_sequences: int) -> int | None:
        """The smallest graph that holds so many sequences; None when none does."""
        return next((size for size in self.sizes if size >= num_sequences), None)

    def replay(self, chunks: Sequence[Chunk], known: Callable[[torch.Tensor], None]) -> torch.Tensor:
        """Logits [len(chunks), vocab], which stand until the next replay. Every chunk has one token.

        `known` is called with the graph's place for token ids, to fill in those that only the device knows.
        """
        size = self.size_for(len(chunks))
        assert size is not None, f"{len(chunks)} requests are more than the largest graph holds"
        graph = self._graphs[size]
        tables = self._fill(graph.meta, [*chunks, *[self._dummy] * (size - len(chunks))])
        assert graph.meta.tables is not None
        self._backend.replan(graph.meta.tables, tables)
        known(graph.meta.token_ids)
        graph.replay()
        return graph.logits[: len(chunks)]

    def _fill(self, static: StepMeta, chunks: Sequence[Chunk]) -> PageTables:
        """Bring the chunks' arrays into the static places."""
        meta = build_meta(chunks, self._page_size)
        tables = _tables_of(meta)
        arrays = {"token_ids": meta.token_ids, "rope_positions": meta.positions, "slots": meta.slots}
        if self._has_rope_lengths:
            arrays["rope_lengths"] = meta.positions + 1 if meta.rope_lengths is None else meta.rope_lengths
        arrays |= {name: getattr(tables, name) for name in TABLE_NAMES}
        self._upload({name: arrays[name].numpy() for name in self._upload.device})
        self._fill_block_tables(static, int(tables.block_tables.shape[1]), len(tables.kv_indices))
        return tables

    def _fill_block_tables(self, static: StepMeta, width: int, count: int) -> None:
        """From the pages just uploaded, on the device: the table is much larger than what is new in it."""
        if not self._backend.reads_block_tables:
            return
        places = self._upload.device
        first = places["kv_indptr"][: static.num_sequences, None]
        at = (first + self._columns[:width]).clamp_(max=count - 1)
        static.block_tables[:, :width].copy_(places["kv_indices"][at])

    def _captured(self, run: Run, capture: Capture) -> dict[int, _Graph]:
        """By size, without those that cannot be captured: memory is short, say, or the model's code waits for the
        device, which no graph can hold."""
        graphs: dict[int, _Graph] = {}
        reason = ""
        for size, meta in self._metas.items():
            try:
                graphs[size] = self._make(meta, run, capture)
            except RuntimeError as error:
                cause = _first(error)
                raise_if_broken(cause)
                reason = in_short(cause)
        left_out = ", ".join(str(size) for size in self._metas if size not in graphs)
        if left_out:
            logger.warning("no CUDA graph could be made for decode steps of %s requests: %s", left_out, reason)
        return graphs

    def _make(self, meta: StepMeta, run: Run, capture: Capture) -> _Graph:
        self._fill(meta, [self._dummy] * meta.num_sequences)
        for _ in range(WARM_UPS):  # the first plans the wrappers; kernels are built and chosen outside the capture
            run(meta)
        replay, logits = capture(lambda: run(meta))
        return _Graph(meta, replay, logits)

    def _static_meta(self, size: int, max_pages: int) -> StepMeta:
        """A step of `size` dummy rows whose device tensors are the static places."""
        meta = build_meta([self._dummy] * size, self._page_size)
        places = self._upload.device
        device: Mapping[str, torch.Tensor] = {
            "kv_indptr": places["kv_indptr"][: size + 1],
            "kv_indices": places["kv_indices"],
            "last_page_len": places["last_page_len"][:size],
            "kv_lens": places["kv_lens"][:size],
            "batch_indices": places["batch_indices"][:size],
            "positions": places["positions"][:size],
            "block_tables": self._block_tables[: size * max_pages].view(size, max_pages),
        }
        return replace(
            meta,
            token_ids=places["token_ids"][:size],
            positions=places["rope_positions"][:size],
            rope_lengths=places["rope_lengths"][:size] if self._has_rope_lengths else None,
            slots=places["slots"][:size],
            block_tables=device["block_tables"],
            tables=replace(_tables_of(meta), device=device, is_static=True),
        )


def _tables_of(meta: StepMeta) -> PageTables:
    on_host = (meta.query_starts.numpy(), meta.starts.numpy(), meta.block_tables.numpy())
    return page_tables(*on_host, meta.page_size)


def _first(error: BaseException) -> Exception:
    """What went wrong in a capture, whose end then fails, too, and says less."""
    while isinstance(error.__context__, RuntimeError):
        error = error.__context__
    assert isinstance(error, Exception)
    return error


def cuda_capture(device: torch.device) -> Capture:
    """Capture on `device`, all graphs in one memory pool: they never run at the same time. After a failure, of which
    nothing is left on the device, those that follow have another pool."""
    pool = torch.cuda.graph_pool_handle()

    def capture(run: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
        nonlocal pool
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        try:
            # A capture that fails would leave its own stream the current one.
            with torch.cuda.stream(torch.cuda.current_stream(device)), torch.cuda.graph(graph, pool=pool):
                logits = run()
        except BaseException:
            graph.reset()
            _end_allocations(device, pool)
            _failed.append(graph)
            pool = torch.cuda.graph_pool_handle()
            raise
        return graph.replay, logits

    return capture


# Where a capture could not be ended torch's allocator of host memory takes it to go on, too, which nothing can end from
# here (torch 2.11; pytorch#180395): it begins none in that pool again, and asks the graph at every allocation.
_failed: list[torch.cuda.CUDAGraph] = []


def _end_allocations(device: torch.device, pool: tuple[int, int]) -> None:
    """Where a capture could not be ended torch's allocator takes it to go on, and keeps its pool for good."""
    bindings: Any = torch._C
    try:
        bindings._cuda_endAllocateToPool(device.index, pool)
    except RuntimeError:  # it did end
        return
    bindings._cuda_releasePool(device.index, pool)
