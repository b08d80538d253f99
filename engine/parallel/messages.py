"""What the leader and the other ranks tell each other, as frames: a step's arrays, and of the pages that it runs over
which share each has, and where.

The leader has packed the step; the ranks take its arrays as they are, so that all have the same rows, padding included.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from engine.attention.base import StepMeta
from engine.pages.layout import KvLayout, LayerKv
from engine.pages.memory import KvMemory, ShareBytes
from engine.pages.share import Share
from engine.parallel.frames import Frame


def step_frame(meta: StepMeta, rows: torch.Tensor | None) -> Frame:
    """`rows`: whose logits are wanted; None: of all."""
    arrays = {
        "token_ids": meta.token_ids.numpy(),
        "positions": meta.positions.numpy(),
        "query_starts": meta.query_starts.numpy(),
        "starts": meta.starts.numpy(),
        "block_tables": meta.block_tables.numpy(),
        "slots": meta.slots.numpy(),
    }
    if rows is not None:
        arrays["rows"] = rows.numpy()
    if meta.rope_lengths is not None:
        arrays["rope_lengths"] = meta.rope_lengths.numpy()
    return Frame("step", {"page_size": meta.page_size}, arrays)


def step_of(frame: Frame) -> tuple[StepMeta, torch.Tensor | None]:
    arrays = {name: torch.from_numpy(array) for name, array in frame.arrays.items()}
    meta = StepMeta(
        token_ids=arrays["token_ids"],
        positions=arrays["positions"],
        query_starts=arrays["query_starts"],
        starts=arrays["starts"],
        block_tables=arrays["block_tables"],
        slots=arrays["slots"],
        page_size=int(frame.fields["page_size"]),
        rope_lengths=arrays.get("rope_lengths"),
    )
    return meta, arrays.get("rows")


def memory_frame(layout: KvLayout) -> Frame:
    """Asks a rank for its share of so many pages."""
    attentions = [layer for layer in layout.layers if isinstance(layer, LayerKv)]  # no other is cut
    fields = {
        "page_size": layout.page_size,
        "dtype": layout.dtype,
        "num_pages": layout.num_pages,
        "layers": [[layer.kv_heads, layer.k_dim, layer.v_dim] for layer in attentions],
    }
    return Frame("memory", fields)


def layout_of(frame: Frame) -> KvLayout:
    fields = frame.fields
    layers = tuple(LayerKv(*map(int, layer)) for layer in fields["layers"])
    return KvLayout(int(fields["page_size"]), str(fields["dtype"]), layers, int(fields["num_pages"]))


def share_frame(memory: KvMemory) -> Frame:
    """What a rank answers: its share, for the leader to open."""
    assert memory.fd is not None, "on a CPU a share is a file"
    return Frame("share", {"share": str(memory.share)}, files=(memory.fd,))


def share_of(frame: Frame, layout: KvLayout) -> ShareBytes:
    share = Share.read(frame.fields["share"])
    [fd] = frame.files
    return ShareBytes(share=share, num_bytes=share.of(layout).total_bytes, fd=fd, close=partial(os.close, fd))


def copies_frame(copies: Sequence[tuple[int, int]]) -> Frame:
    return Frame("copy", arrays={"pages": np.array(copies, np.int64)})


def copies_of(frame: Frame) -> list[tuple[int, int]]:
    return [(source, target) for source, target in frame.arrays["pages"].tolist()]
