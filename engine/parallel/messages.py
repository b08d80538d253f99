"""What the processes of a worker tell each other, as frames: a step's arrays, and of the pages that it runs over which
share each has, and where; and the hidden states that stages hand on.

The leader has packed the step; the others take its arrays as they are: all have the same rows, padding included.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch

from engine.attention.base import StepMeta
from engine.gpu import driver
from engine.pages.layout import KvLayout, LayerKv
from engine.pages.memory import TORCH_DTYPE, KvMemory, ShareBytes
from engine.pages.share import Share
from engine.parallel.frames import Frame
from engine.types import LengthRope, ModelInfo


def step_frame(meta: StepMeta, rows: torch.Tensor | None, number: int, *, tells_layers: bool) -> Frame:
    """`rows`: whose logits are wanted; None: of all. `tells_layers`: whether stages are to tell of theirs."""
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
    return Frame("step", {"step": number, "page_size": meta.page_size, "tells_layers": tells_layers}, arrays)


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
    return Frame("memory", _layout_fields(layout))


def fit_frame(layout: KvLayout, peak_bytes: int) -> Frame:
    """Asks a rank for how many pages there is room beside a step's peak."""
    return Frame("fit", _layout_fields(layout) | {"peak_bytes": peak_bytes})


def _layout_fields(layout: KvLayout) -> dict[str, Any]:
    attentions = [layer for layer in layout.layers if isinstance(layer, LayerKv)]  # no other is cut
    return {
        "page_size": layout.page_size,
        "dtype": layout.dtype,
        "num_pages": layout.num_pages,
        "layers": [[layer.kv_heads, layer.k_dim, layer.v_dim] for layer in attentions],
    }


def steps_frame(info: ModelInfo) -> Frame:
    """Asks a rank to make ready for steps."""
    return Frame("steps", asdict(info))


def info_of(frame: Frame) -> ModelInfo:
    rope = frame.fields["rope"]
    told = {"eos_token_ids": tuple(frame.fields["eos_token_ids"]), "rope": None if rope is None else LengthRope(**rope)}
    return ModelInfo(**{**frame.fields, **told})


def layout_of(frame: Frame) -> KvLayout:
    fields = frame.fields
    layers = tuple(LayerKv(*map(int, layer)) for layer in fields["layers"])
    return KvLayout(int(fields["page_size"]), str(fields["dtype"]), layers, int(fields["num_pages"]))


def share_frame(memory: KvMemory) -> Frame:
    """What a rank answers: its share, for the leader to open."""
    if memory.fd is not None:
        return Frame("share", {"share": str(memory.share)}, files=(memory.fd,))
    handle, base = driver.export(memory.bytes.device.index, memory.address)
    fields = {"share": str(memory.share), "handle": handle.hex(), "offset": memory.address - base}
    return Frame("share", fields)


def share_of(frame: Frame, layout: KvLayout, device: torch.device) -> ShareBytes:
    """Opened, on a GPU for kernels of `device`."""
    share = Share.read(frame.fields["share"])
    num_bytes = share.of(layout).total_bytes
    if frame.files:
        [fd] = frame.files
        return ShareBytes(share=share, num_bytes=num_bytes, fd=fd, close=partial(os.close, fd))
    handle, offset = bytes.fromhex(frame.fields["handle"]), int(frame.fields["offset"])
    base = driver.open_handle(device.index, handle)
    return ShareBytes(
        share=share,
        num_bytes=num_bytes,
        address=base + offset,
        handle=handle,
        offset=offset,
        close=partial(driver.close_handle, device.index, base),
    )


def copies_frame(copies: Sequence[tuple[int, int]]) -> Frame:
    return Frame("copy", arrays={"pages": np.array(copies, np.int64)})


def copies_of(frame: Frame) -> list[tuple[int, int]]:
    return [(source, target) for source, target in frame.arrays["pages"].tolist()]


def hidden_frame(number: int, hidden_TN: torch.Tensor) -> Frame:
    """Hidden states of a pass, as bytes."""
    fields = {"step": number, "shape": list(hidden_TN.shape), "dtype": str(hidden_TN.dtype).removeprefix("torch.")}
    return Frame("hidden", fields, {"hidden": hidden_TN.contiguous().view(torch.uint8).numpy()})


def hidden_of(frame: Frame, number: int) -> torch.Tensor:
    """Of this pass, [T, N]."""
    if frame.fields["step"] != number:
        raise RuntimeError(f"step {number} is to be computed, and the rows of step {frame.fields['step']} came")
    dtype = TORCH_DTYPE[str(frame.fields["dtype"])]
    return torch.from_numpy(frame.arrays["hidden"]).view(dtype).view(*map(int, frame.fields["shape"]))
