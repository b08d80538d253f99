"""PageTables name the same pages as the step's metadata, whatever the order of pages, chunks and lengths."""

from __future__ import annotations

import random

import pytest
import torch

from engine.attention.base import build_meta
from engine.gpu.staging import StaticUploader, Uploader, on_device
from engine.types import Chunk

CPU = torch.device("cpu")


def random_chunks(rng: random.Random, page_size: int) -> list[Chunk]:
    free = list(range(1000))
    rng.shuffle(free)
    chunks = []
    for i in range(rng.randint(1, 6)):
        start, count = rng.choice([(0, rng.randint(1, 40)), (rng.randint(1, 60), 1), (rng.randint(1, 60), 9)])
        table = [
            free.pop() for _ in range(-(-(start + count) // page_size) + rng.randint(0, 2))
        ]  # may have spare pages
        chunks.append(Chunk(request_id=str(i), token_ids=list(range(count)), start=start, block_table=table))
    return chunks


@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("seed", range(8))
def test_every_row_stands_where_its_slot_says(page_size: int, seed: int) -> None:
    chunks = random_chunks(random.Random(seed), page_size)
    meta = on_device(build_meta(chunks, page_size, row_multiple=4), CPU)
    tables = meta.tables
    assert tables is not None
    indices, indptr = tables.on_device("kv_indices"), tables.on_device("kv_indptr")
    for row, (s, position) in enumerate(zip(tables.batch_indices.tolist(), tables.positions.tolist(), strict=True)):
        page = int(indices[int(indptr[s]) + position // page_size])
        assert page * page_size + position % page_size == int(meta.slots[row])
    for s, chunk in enumerate(chunks):
        length = chunk.start + len(chunk.token_ids)
        pages = indices[int(indptr[s]) : int(indptr[s + 1])].tolist()
        assert pages == list(chunk.block_table)[: -(-length // page_size)]
        assert (len(pages) - 1) * page_size + int(tables.last_page_len[s]) == length == int(tables.kv_lens[s])
        assert tables.block_tables[s, : len(pages)].tolist() == pages
    assert tables.is_decode == all(len(chunk.token_ids) == 1 for chunk in chunks)


def test_uploads_of_two_steps_do_not_share_memory() -> None:
    upload = Uploader(CPU)
    chunks = [Chunk(request_id="a", token_ids=[1, 2, 3], start=0, block_table=[7])]
    first = on_device(build_meta(chunks, 16), CPU, upload)
    kept = first.token_ids.clone()
    for token in range(4, 9):
        on_device(build_meta([Chunk(request_id="a", token_ids=[token] * 3, start=0, block_table=[9])], 16), CPU, upload)
    assert torch.equal(first.token_ids, kept)


def test_a_static_upload_changes_the_places_that_a_graph_reads() -> None:
    import numpy as np

    upload = StaticUploader(CPU, {"a": (np.int64, 3), "b": (np.float64, 2), "tail": (np.int32, 8)})
    a, tail = upload.device["a"], upload.device["tail"]
    upload({"a": np.array([1, 2, 3]), "b": np.array([0.5, 1.5]), "tail": np.array([4, 5], np.int32)})
    upload({"a": np.array([7, 8]), "b": np.array([2.5]), "tail": np.array([6], np.int32)})
    assert a[:2].tolist() == [7, 8]
    assert tail[0].item() == 6
    assert upload.device["b"][0].item() == 2.5
    with pytest.raises(AssertionError, match="tail has 9 elements"):
        upload({"a": np.array([1]), "b": np.array([1.0]), "tail": np.zeros(9, np.int32)})
