"""Where kernels are told that pages stand, against where the tensors have them; and the kernels, in an interpreter."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import random
import sys
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
import torch

from engine.pages.layout import LayerKv
from engine.pages.memory import KvMemory
from engine.pages.page_table import PartTable, buffer_at, check_pages, common, part_at
from tests.engine.pages.test_shares import cut_memory, whole
from tests.kv_transfer.fake_gpu import row_bytes
from tests.kv_transfer.sides import LAYERS, assert_pages_moved, random_memory, snapshot

ODD = (LayerKv(1, 3, 1), LayerKv(1, 1, 5))
BOTH = pytest.mark.parametrize("layers", [LAYERS, ODD], ids=["wide", "odd"])


def rows_of(table: PartTable, rows: list[int]) -> bytes:
    return b"".join(row_bytes(table, np.array(rows)))


def wire_bytes(memory: KvMemory, layers: range, pages: list[int]) -> bytes:
    parts = [part for i in layers for part in (memory.k(i), memory.v(i))]
    return b"".join(part[pages].contiguous().view(torch.uint8).numpy().tobytes() for part in parts)


@BOTH
def test_pages_stand_where_the_tensors_have_them(layers: tuple[LayerKv, ...]) -> None:
    memory = random_memory(9, layers=layers, device="cpu")
    chosen = range(1, len(layers))
    table = memory.places.to_read(chosen)
    assert rows_of(table, [4, 0, 8]) == wire_bytes(memory, chosen, [4, 0, 8])


@BOTH
def test_a_gathered_buffer_has_the_order_of_the_wire(layers: tuple[LayerKv, ...]) -> None:
    memory, pages = random_memory(9, layers=layers, device="cpu"), [7, 2, 5]
    wanted = wire_bytes(memory, range(len(layers)), pages)
    buffer = ctypes.create_string_buffer(wanted, len(wanted))
    table = buffer_at(memory.layout, ctypes.addressof(buffer), range(len(layers)), len(pages))
    assert rows_of(table, [0, 1, 2]) == wanted


def test_rows_are_wide_only_when_all_of_them_are() -> None:
    table = part_at(64, 32, 32)
    assert common(table, part_at(128, 32, 32)).is_wide
    assert not common(table, part_at(136, 32, 32)).is_wide
    assert not common(table, part_at(128, 24, 32)).is_wide
    assert part_at(72, 24, 32).has_words
    assert not part_at(72, 28, 32).has_words


@pytest.mark.parametrize("pages", [[3, 9], [-1], [0, 10]])
def test_a_page_that_does_not_exist_is_refused(pages: list[int]) -> None:
    with pytest.raises(ValueError, match="of 9 are to be copied"):
        check_pages(pages, 9)


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    """The real kernels, run by Triton's interpreter on CPU memory; decided when they are imported."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed: it comes with torch's CUDA builds")
    patch = pytest.MonkeyPatch()
    patch.setenv("TRITON_INTERPRET", "1")
    sys.modules.pop("kv_transfer.transports.gpu.page_kernels", None)
    yield importlib.import_module("kv_transfer.transports.gpu.page_kernels")
    sys.modules.pop("kv_transfer.transports.gpu.page_kernels")
    patch.undo()


@BOTH
def test_the_kernel_copies_pages_and_nothing_else(kernels: ModuleType, layers: tuple[LayerKv, ...]) -> None:
    source = random_memory(23, layers=layers, seed=1, device="cpu")
    target = random_memory(31, layers=layers, seed=2, device="cpu")
    rng, before, chosen = random.Random(3), snapshot(target), range(1, len(layers))
    src, dst = rng.sample(range(23), 7), rng.sample(range(31), 7)
    kernels.copy_rows(
        source.places.to_read(chosen),
        target.places.to_write(chosen),
        check_pages(src, 23),
        check_pages(dst, 31),
        "cpu",
    )
    assert_pages_moved(before, source, target, chosen, src, dst)


def reference_digest(data: bytes, *, has_words: bool) -> int:
    words = np.frombuffer(data, np.int64 if has_words else np.uint8).astype(np.int64)
    with np.errstate(over="ignore"):
        mixed = np.arange(1, len(words) + 1, dtype=np.int64) * np.int64(-7046029254386353131)
        mixed = (mixed ^ (mixed >> 32)) * np.int64(-4658895280553007687)
        return int((words * (mixed | 1)).sum())


@BOTH
def test_the_kernel_digests_the_bytes_of_the_wire(kernels: ModuleType, layers: tuple[LayerKv, ...]) -> None:
    memory, pages = random_memory(23, layers=layers, seed=4, device="cpu"), [5, 11, 2, 19]
    table = memory.places.to_read(range(len(layers)))
    wanted = reference_digest(wire_bytes(memory, range(len(layers)), pages), has_words=table.has_words)
    assert int(kernels.digest_rows(table, check_pages(pages, 23), "cpu").item()) == wanted
    swapped = kernels.digest_rows(table, check_pages(pages[::-1], 23), "cpu").item()
    assert int(swapped) != wanted


@pytest.mark.parametrize(("source", "target"), [("two ranks", "whole"), ("whole", "two ranks in two stages")])
def test_the_kernels_copy_and_digest_heads_wherever_they_stand(kernels: ModuleType, source: str, target: str) -> None:
    (ours, *our_ranks), (theirs, *their_ranks) = cut_memory(source, 23, 1)[1], cut_memory(target, 31, 2)[1]
    layers, src, dst = range(1, ours.layout.num_layers), [4, 19, 11], [30, 2, 7]
    wanted = whole(ours, layers, src)
    tables = ours.places.to_read(layers), theirs.places.to_write(layers)
    kernels.copy_rows(*tables, check_pages(src, 23), check_pages(dst, 31), "cpu")
    assert whole(theirs, layers, dst) == wanted
    for memory, pages in ((ours, src), (theirs, dst)):
        table = memory.places.to_read(layers)
        found = kernels.digest_rows(table, check_pages(pages, memory.layout.num_pages), "cpu").item()
        assert int(found) == reference_digest(wanted, has_words=table.has_words)
    assert len(our_ranks) + len(their_ranks) == len(ours.others) + len(theirs.others)  # their memory was used
