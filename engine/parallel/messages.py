"""What the leader tells the other ranks, as frames: a step's arrays, and the KV pages that steps run over.

The leader has packed the step; the ranks take its arrays as they are, so that all have the same rows, padding included.
"""

from __future__ import annotations

import torch

from engine.attention.base import StepMeta
from engine.pages.layout import KvLayout, LayerKv
from engine.pages.memory import KvMemory
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


def memory_frame(memory: KvMemory) -> Frame:
    assert memory.fd is not None, "the ranks of a worker share CPU memory"
    layout = memory.layout
    attentions = [layer for layer in layout.layers if isinstance(layer, LayerKv)]  # no other is cut
    fields = {
        "page_size": layout.page_size,
        "dtype": layout.dtype,
        "num_pages": layout.num_pages,
        "layers": [[layer.kv_heads, layer.k_dim, layer.v_dim] for layer in attentions],
    }
    return Frame("memory", fields, files=(memory.fd,))


def memory_of(frame: Frame) -> KvMemory:
    """The leader's pages, mapped here; closing it closes the file, and what is shown stays mapped."""
    fields = frame.fields
    layers = tuple(LayerKv(*map(int, layer)) for layer in fields["layers"])
    layout = KvLayout(int(fields["page_size"]), str(fields["dtype"]), layers, int(fields["num_pages"]))
    [fd] = frame.files
    return KvMemory(layout, fd=fd)
