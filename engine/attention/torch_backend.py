"""The reference attention backend, in plain torch: one sequence after another, over exactly its own keys.

It runs wherever torch does and is what the other backends are tested against. Its answers do not depend on the rest
of the batch, but they may differ in the last bit between chunkings, because matrix shapes choose their own kernels.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from engine.attention.base import AttentionCall, StepMeta
from engine.pages import int8_rows

MAX_SCORE_ELEMENTS = 1 << 24  # of one block of query rows: bounds the score matrix to 64 MiB


class TorchBackend:
    name = "torch"

    def write(
        self, k_TGD: torch.Tensor, v_TGE: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, meta: StepMeta
    ) -> None:
        _write(k_TGD, k_pages, meta.slots)
        _write(v_TGE, v_pages, meta.slots)

    def attend(
        self, q_THD: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, meta: StepMeta, call: AttentionCall
    ) -> torch.Tensor:
        out_THE = q_THD.new_zeros(q_THD.shape[0], q_THD.shape[1], int8_rows.width_of(v_pages))
        query_starts, starts = meta.query_starts.tolist(), meta.starts.tolist()
        for s, start in enumerate(starts):
            first, last = query_starts[s], query_starts[s + 1]
            num_keys = start + last - first
            k_LGD = _gathered(k_pages, meta, s, num_keys, call.k_scale)
            v_LGE = _gathered(v_pages, meta, s, num_keys, call.v_scale)
            for rows in _blocks(first, last, num_keys * q_THD.shape[1]):
                out_THE[rows] = _attend_rows(q_THD[rows], k_LGD, v_LGE, start + rows.start - first, call)
        return out_THE


def _write(rows_TGD: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
    rows_TGD, into = rows_TGD[: slots.shape[0]].to(pages.dtype), pages.view(-1, *pages.shape[2:])
    if pages.dtype.itemsize == 1:  # torch copies no float8 by index
        rows_TGD, into = rows_TGD.contiguous().view(torch.uint8), into.view(torch.uint8)
    into.index_copy_(0, slots, rows_TGD)


def _widened(rows: torch.Tensor, scale: float) -> torch.Tensor:
    """What pages hold, in float32."""
    if rows.dtype == int8_rows.DTYPE:
        return int8_rows.widened(rows)
    return rows.float() if scale == 1.0 else rows.float() * scale


def attention_to_keys(
    q_THD: torch.Tensor, k_pages: torch.Tensor, meta: StepMeta, sequence: int, call: AttentionCall
) -> torch.Tensor:
    """What the rows of a sequence give of their attention to each of its keys, summed over rows and heads: [L]."""
    first, last = (int(row) for row in meta.query_starts[sequence : sequence + 2])
    start = int(meta.starts[sequence])
    num_keys = start + last - first
    k_LGD = _gathered(k_pages, meta, sequence, num_keys, call.k_scale)
    sums_L = k_LGD.new_zeros(num_keys)
    for rows in _blocks(first, last, num_keys * q_THD.shape[1]):
        sums_L += _weights(q_THD[rows], k_LGD, start + rows.start - first, call).sum((0, 1))
    return sums_L


def _gathered(pages: torch.Tensor, meta: StepMeta, sequence: int, num_keys: int, scale: float) -> torch.Tensor:
    """The first `num_keys` rows of a sequence, from its pages, in float32."""
    table = meta.block_tables[sequence, : -(-num_keys // meta.page_size)].long()
    return _widened(pages[table].flatten(0, 1)[:num_keys], scale)


def _blocks(first: int, last: int, scores_per_row: int) -> Iterator[slice]:
    """Rows [first, last), so many at a time that their scores are no more than MAX_SCORE_ELEMENTS."""
    step = max(1, MAX_SCORE_ELEMENTS // scores_per_row)
    for row in range(first, last, step):
        yield slice(row, min(row + step, last))


def _attend_rows(
    q_QHD: torch.Tensor, k_LGD: torch.Tensor, v_LGE: torch.Tensor, first_position: int, call: AttentionCall
) -> torch.Tensor:
    """Rows at positions first_position, first_position + 1, ... over keys at positions 0 .. L - 1: [Q, H, E]."""
    rows, heads, _ = q_QHD.shape
    num_keys, kv_heads, _ = k_LGD.shape
    weights = _weights(q_QHD, k_LGD, first_position, call)
    out_GRE = torch.bmm(weights.view(kv_heads, -1, num_keys), v_LGE.transpose(0, 1))
    return out_GRE.view(heads, rows, -1).transpose(0, 1).to(q_QHD.dtype)


def _weights(q_QHD: torch.Tensor, k_LGD: torch.Tensor, first_position: int, call: AttentionCall) -> torch.Tensor:
    """Of each row for each key: [H, Q, L]."""
    rows, heads, _ = q_QHD.shape
    num_keys, kv_heads, _ = k_LGD.shape
    q_GRD = q_QHD.float().view(rows, kv_heads, heads // kv_heads, -1).permute(1, 2, 0, 3).flatten(1, 2)
    scores = torch.bmm(q_GRD, k_LGD.permute(1, 2, 0)) * call.scaling
    scores = scores.view(heads, rows, num_keys)
    if call.softcap:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    if call.slopes is not None:
        scores += call.slopes.view(-1, 1, 1) * _behind(rows, num_keys, first_position, scores.device)
    scores.masked_fill_(~_visible(rows, num_keys, first_position, call, scores.device), float("-inf"))
    return _softmax(scores, call.sinks)


def _behind(rows: int, num_keys: int, first_position: int, device: torch.device) -> torch.Tensor:
    """Of each key to each row, [rows, num_keys]: 0 for the row's own, -1 for the one before it."""
    query = torch.arange(first_position, first_position + rows, device=device)[:, None]
    return (torch.arange(num_keys, device=device)[None, :] - query).float()


def _visible(rows: int, num_keys: int, first_position: int, call: AttentionCall, device: torch.device) -> torch.Tensor:
    """Bool [rows, num_keys]: which keys a row may see."""
    query = torch.arange(first_position, first_position + rows, device=device)[:, None]
    key = torch.arange(num_keys, device=device)[None, :]
    visible = key <= query
    if call.chunk:
        visible &= key >= query - query % call.chunk
    return visible & (key > query - call.window) if call.window else visible


def _softmax(scores_HQL: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    if sinks is None:
        return torch.softmax(scores_HQL, dim=-1)
    sink = sinks.float().view(-1, 1, 1).expand(-1, scores_HQL.shape[1], 1)
    return torch.softmax(torch.cat([scores_HQL, sink], dim=-1), dim=-1)[..., :-1]
