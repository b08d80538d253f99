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
from engine.pages.page_table import PartTable, buffer_at, check_pages, pages_at
from tests.kv_transfer.sides import LAYERS, assert_pages_moved, random_memory, snapshot

ODD = (LayerKv(1, 3, 1), LayerKv(1, 1, 5))
BOTH = pytest.mark.parametrize("layers", [LAYERS, ODD], ids=["wide", "odd"])


def rows_of(table: PartTable, rows: list[int]) -> bytes:
    return b"".join(
        ctypes.string_at(address + row * nbytes, nbytes)
        for address, nbytes in zip(table.addresses.tolist(), table.row_bytes.tolist(), strict=True)
        for row in rows
    )


def wire_bytes(memory: KvMemory, layers: range, pages: list[int]) -> bytes:
    parts = [part for i in layers for part in (memory.k(i), memory.v(i))]
    return b"".join(part[pages].contiguous().view(torch.uint8).numpy().tobytes() for part in parts)


@BOTH
def test_pages_stand_where_the_tensors_have_them(layers: tuple[LayerKv, ...]) -> None:
    memory = random_memory(9, layers=layers, device="cpu")
    chosen = range(1, len(layers))
    table = pages_at(memory.layout, memory.address, chosen)
    assert rows_of(table, [4, 0, 8]) == wire_bytes(memory, chosen, [4, 0, 8])


@BOTH
def test_a_gathered_buffer_has_the_order_of_the_wire(layers: tuple[LayerKv, ...]) -> None:
    memory, pages = random_memory(9, layers=layers, device="cpu"), [7, 2, 5]
    wanted = wire_bytes(memory, range(len(layers)), pages)
    buffer = ctypes.create_string_buffer(wanted, len(wanted))
    table = buffer_at(memory.layout, ctypes.addressof(buffer), range(len(layers)), len(pages))
    assert rows_of(table, [0, 1, 2]) == wanted


def test_rows_are_wide_only_when_all_of_them_are() -> None:
    table = PartTable(np.array([64, 128]), np.array([32, 48]))
    assert table.is_wide
    assert not PartTable(table.addresses + 8, table.row_bytes).is_wide
    assert PartTable(table.addresses + 8, table.row_bytes).has_words
    assert not PartTable(table.addresses, table.row_bytes + 4).has_words


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
        pages_at(source.layout, source.address, chosen),
        pages_at(target.layout, target.address, chosen),
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
    table = pages_at(memory.layout, memory.address, range(len(layers)))
    wanted = reference_digest(wire_bytes(memory, range(len(layers)), pages), has_words=table.has_words)
    assert int(kernels.digest_rows(table, check_pages(pages, 23), "cpu").item()) == wanted
    swapped = kernels.digest_rows(table, check_pages(pages[::-1], 23), "cpu").item()
    assert int(swapped) != wanted
