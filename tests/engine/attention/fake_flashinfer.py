"""FlashInfer's interface on a CPU: the same names and parameters, dense float64 arithmetic, and no patience.

It refuses whatever the real kernels would take silently and get wrong: tables on the wrong side, a plan that is not the
run's, a CUDA graph's buffers that do not hold what was planned, sinks given to a wrapper, windows given at `run` only.
Pages are read through the tables it was given, in the library's own form, never through ours.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

__version__ = "fake"
FP8 = torch.float8_e4m3fn
decode = sys.modules[__name__]  # flashinfer.decode


def _need(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)


def _is_table(x: torch.Tensor, name: str) -> torch.Tensor:
    _need(x.dtype == torch.int32 and x.device.type == "cpu", f"{name} is to be int32 on the host")
    return x


def dense(
    q: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    rows: list[int],
    sm_scale: float,
    window_left: int,
    softcap: float,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each sequence's last `rows[s]` queries over its keys; the log-sum-exp to the base 2."""
    outs, lses, at = [], [], 0
    for k, v, count in zip(keys, values, rows, strict=True):
        length, repeat = k.shape[0], q.shape[1] // k.shape[1]
        k, v = (x.double().repeat_interleave(repeat, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[at : at + count].double(), k) * sm_scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        query = torch.arange(length - count, length)[:, None]
        key = torch.arange(length)[None, :]
        hidden = key > query
        if window_left >= 0:
            hidden |= key < query - window_left
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.double().view(-1, 1, 1).expand(-1, count, 1)], dim=-1)
        outs.append(torch.einsum("hqk,khe->qhe", torch.softmax(scores, -1)[..., :length], v))
        lses.append((torch.logsumexp(scores, -1) / math.log(2.0)).T)
        at += count
    return torch.cat(outs), torch.cat(lses)


def _gather(pages: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor) -> list[torch.Tensor]:
    found = []
    for s in range(len(last)):
        own = indices[indptr[s] : indptr[s + 1]].long()
        _need(len(own) > 0 and 1 <= int(last[s]) <= pages.shape[1], "a sequence has no page, or a wrong last page")
        length = (len(own) - 1) * pages.shape[1] + int(last[s])
        found.append(pages[own].flatten(0, 1)[:length].float())
    return found


class _Planned:
    """What both wrappers share between plan and run."""

    _plan: Any = None  # a dict, once planned

    def _run(
        self, q: torch.Tensor, cache: Any, rows: list[int], k_scale: float, v_scale: float, out: Any, lse: bool
    ) -> Any:
        plan = self._plan
        _need(plan is not None, "run before plan")
        k_pages, v_pages = cache
        _need(q.dtype == plan["q_data_type"] and k_pages.dtype == plan["kv_data_type"], "planned for another dtype")
        _need(q.shape[1:] == (plan["num_qo_heads"], plan["head_dim"]), "planned for other heads")
        _need(k_pages.shape[1:] == (plan["page_size"], plan["num_kv_heads"], plan["head_dim"]), "other pages")
        _need(k_pages.stride() == v_pages.stride(), "K and V are to have the same strides")
        _need(q.stride(-1) == 1 and out is not None and out.is_contiguous(), "strides")
        _need(out.shape == q.shape and out.dtype == q.dtype, "out is of another shape")
        tables = (plan["indptr"], plan["indices"], plan["last_page_len"])
        got, log2_sum = dense(
            q,
            [k * k_scale for k in _gather(k_pages, *tables)],
            [v * v_scale for v in _gather(v_pages, *tables)],
            rows,
            plan["sm_scale"],
            plan["window_left"],
            plan["logits_soft_cap"],
        )
        out.copy_(got)
        return (out, log2_sum.float()) if lse else out


class BatchPrefillWithPagedKVCacheWrapper(_Planned):
    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
        paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, custom_mask_buf=None,
        mask_indptr_buf=None, backend="auto", jit_args=None, jit_kwargs=None,
    ):  # fmt: skip
        _need(kv_layout == "NHD" and backend in ("fa2", "fa3") and not use_cuda_graph, "prefill wrapper")
        self.backend = backend

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False,
        pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
        rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None, o_data_type=None,
        non_blocking=True, prefix_len_ptr=None, token_pos_in_items_ptr=None, token_pos_in_items_len=0,
        max_item_len_ptr=None, seq_lens=None, seq_lens_q=None, block_tables=None, max_token_per_sequence=None,
        max_sequence_kv=None, fixed_split_size=None, disable_split_kv=False,
    ):  # fmt: skip
        _need(causal, "prefill without causal=True sees the future")
        _need(sm_scale is not None and logits_soft_cap is not None, "give the scale and the soft cap to plan")
        if self.backend == "fa3":
            _need(kv_data_type == q_data_type, "fa3 wants keys of the queries' dtype")
        self.rows = _is_table(qo_indptr, "qo_indptr").diff().tolist()
        self._plan = {
            "indptr": _is_table(paged_kv_indptr, "indptr").clone(),
            "indices": paged_kv_indices,
            "last_page_len": _is_table(paged_kv_last_page_len, "last_page_len").clone(),
            "num_qo_heads": num_qo_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim_qk,
            "page_size": page_size,
            "sm_scale": sm_scale,
            "window_left": window_left,
            "logits_soft_cap": logits_soft_cap,
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type,
        }

    def run(
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False,
        enable_pdl=None, window_left=None, sinks=None, kv_cache_sf=None, skip_softmax_threshold_scale_factor=None,
    ):  # fmt: skip
        _need(sinks is None and window_left is None, "sinks and window at run are ignored without a word")
        _need(q.shape[0] == sum(self.rows), "q has other rows than were planned")
        return self._run(q, paged_kv_cache, self.rows, k_scale, v_scale, out, return_lse)


class BatchDecodeWithPagedKVCacheWrapper(_Planned):
    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False,
        paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None,
        backend="auto", jit_args=None,
    ):  # fmt: skip
        _need(kv_layout == "NHD", "layout")
        self.use_tensor_cores = use_tensor_cores
        self.use_cuda_graph = use_cuda_graph
        self.buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        if use_cuda_graph:
            _need(len(self.buffers[0]) == len(self.buffers[2]) + 1, "buffers of a graph's wrapper")

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
        pos_encoding_mode="NONE", window_left=-1, logits_soft_cap=None, q_data_type="float16", kv_data_type=None,
        o_data_type=None, data_type=None, sm_scale=None, rope_scale=None, rope_theta=None, non_blocking=True,
        block_tables=None, seq_lens=None, fixed_split_size=None, disable_split_kv=False, q_len_per_req=1,
    ):  # fmt: skip
        if self.use_cuda_graph:
            _need(len(last_page_len) == len(self.buffers[2]), "the batch size of a graph's wrapper is fixed")
            for buffer, new in zip(self.buffers, (indptr, indices, last_page_len), strict=True):
                buffer[: len(new)].copy_(new)
        self._keep(locals())

    def _keep(self, given: dict[str, Any]) -> None:
        names = ("num_qo_heads", "num_kv_heads", "head_dim", "page_size", "sm_scale", "window_left", "logits_soft_cap")
        self._plan = {name: given[name] for name in (*names, "q_data_type", "kv_data_type", "indices")}
        self._plan["indptr"] = _is_table(given["indptr"], "indptr").clone()
        self._plan["last_page_len"] = _is_table(given["last_page_len"], "last_page_len").clone()
        _need(self._plan["sm_scale"] is not None and self._plan["logits_soft_cap"] is not None, "scale and soft cap")

    def run(
        self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False,
        enable_pdl=None, window_left=None, sinks=None, q_len_per_req=None, skip_softmax_threshold_scale_factor=None,
        kv_cache_sf=None,
    ):  # fmt: skip
        _need(sinks is None and window_left is None, "sinks and window at run are ignored without a word")
        plan = self._plan
        _need(plan is not None and q.shape[0] == len(plan["last_page_len"]), "q has other rows than were planned")
        if self.use_cuda_graph:  # kernels read the buffers, the plan was made of the host's: they must agree
            indptr, indices, last = self.buffers
            _need(torch.equal(indptr, plan["indptr"]), "the graph's indptr is not what was planned")
            _need(torch.equal(last, plan["last_page_len"]), "the graph's last_page_len is not what was planned")
            self._plan = plan | {"indices": indices[: int(indptr[-1])]}
        return self._run(q, paged_kv_cache, [1] * q.shape[0], k_scale, v_scale, out, return_lse)


def fast_decode_plan(
    self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode="NONE",
    window_left=-1, logits_soft_cap=None, q_data_type=None, kv_data_type=None, data_type=None, sm_scale=None,
    rope_scale=None, rope_theta=None, non_blocking=True, fixed_split_size=None, disable_split_kv=False,
    global_override_indptr_cpu=None,
):  # fmt: skip
    _need(self._plan is not None, "fast_decode_plan wants a wrapper that was planned once")
    _need(global_override_indptr_cpu is not None, "without the host's indptr it waits for the device")
    _need(len(last_page_len) == len(self.buffers[2]), "the batch size of a graph's wrapper is fixed")
    _need(len(indices) <= len(self.buffers[1]), "more pages than the graph's buffer holds")
    self._keep(locals())


def xqa_batch_decode_with_kv_cache(
    query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale=1.0, bmm2_scale=1.0,
    window_left=-1, out=None, sinks=None, kv_layout="NHD", enable_pdl=None, q_len_per_req=1, o_scale=1.0, mask=None,
    kv_cache_sf=None,
):  # fmt: skip
    k_pages, v_pages = kv_cache
    _need(block_tables.dtype == torch.int32 and seq_lens.dtype == torch.uint32, "XQA's tables")
    _need(query.is_contiguous() and out.shape == query.shape and kv_layout == "NHD", "XQA's query")
    _need(k_pages.shape[1] in (16, 32, 64, 128) and block_tables.is_contiguous(), "XQA's pages")
    _need(max_seq_len == block_tables.shape[1] * k_pages.shape[1], "XQA's longest sequence")
    lengths = seq_lens.view(torch.int32).tolist()
    _need(query.shape[0] == len(lengths), "XQA decodes one row for each sequence")
    _need(sinks is None or sinks.dtype == torch.float32, "XQA's sinks")

    def gather(pages: torch.Tensor) -> list[torch.Tensor]:
        size = pages.shape[1]
        tables = [block_tables[s, : -(-n // size)].long() for s, n in enumerate(lengths)]
        return [pages[t].flatten(0, 1)[:n].float() for t, n in zip(tables, lengths, strict=True)]

    got, _ = dense(query, gather(k_pages), gather(v_pages), [1] * len(lengths), bmm1_scale, window_left, 0.0, sinks)
    return out.copy_(got * bmm2_scale)


def append_paged_kv_cache(
    append_key, append_value, batch_indices, positions, paged_kv_cache, kv_indices, kv_indptr, kv_last_page_len,
    kv_layout="NHD",
):  # fmt: skip
    k_pages, v_pages = paged_kv_cache
    _need(append_key.dtype == k_pages.dtype and append_value.dtype == v_pages.dtype, "append casts nothing")
    _need(append_key.stride(-1) == 1 and append_key.shape[0] == len(batch_indices) == len(positions), "append's rows")
    _need(len(kv_indptr) == len(kv_last_page_len) + 1 and kv_layout == "NHD", "append's tables")
    for row, (s, position) in enumerate(zip(batch_indices.tolist(), positions.tolist(), strict=True)):
        page = int(kv_indices[kv_indptr[s] + position // k_pages.shape[1]])
        for pages, rows in ((k_pages, append_key), (v_pages, append_value)):
            pages[page, position % k_pages.shape[1]] = rows[row]


def rmsnorm(input, weight, eps=1e-6, out=None, enable_pdl=None):
    _need(input.dim() in (2, 3) and weight.shape == input.shape[-1:] and weight.dtype == input.dtype, "rmsnorm")
    x = input.float()
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(input.dtype)


def gemma_rmsnorm(input, weight, eps=1e-6, out=None, enable_pdl=None):
    return rmsnorm(input.float(), 1.0 + weight.float(), eps).to(input.dtype)


def fused_add_rmsnorm(input, residual, weight, eps=1e-6, enable_pdl=None):
    _need(input.dim() == 2 and input.is_contiguous() and residual.is_contiguous(), "fused_add_rmsnorm")
    residual.add_(input)
    input.copy_(rmsnorm(residual, weight, eps))


def gemma_fused_add_rmsnorm(input, residual, weight, eps=1e-6, enable_pdl=None):
    residual.add_(input)
    input.copy_(gemma_rmsnorm(residual, weight, eps))


def silu_and_mul(input, out=None, enable_pdl=None):
    gate, up = input.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(input.dtype)


def apply_rope_with_cos_sin_cache(positions, query, key, head_size, cos_sin_cache, is_neox=True):
    _need(cos_sin_cache.dtype == torch.float32 and cos_sin_cache.is_contiguous() and is_neox, "rope's cache")
    _need(query.dim() == 2 and key.dim() == 2 and positions.shape == query.shape[:1], "rope's rows")
    cos, sin = cos_sin_cache[positions.long()].unsqueeze(1).chunk(2, dim=-1)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (-1, head_size))
        low, high = heads[..., : cos.shape[-1]].float(), heads[..., cos.shape[-1] : 2 * cos.shape[-1]].float()
        turned = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)
        return torch.cat([turned, heads[..., 2 * cos.shape[-1] :]], dim=-1).flatten(1)

    return rotated(query), rotated(key)
