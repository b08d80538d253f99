"""Models whose layers do not call transformers' attention interface: for each a few lines that stand in place of its
own attention. How q, k, v come of the hidden states is theirs, and what becomes of the result.

Nothing is believed because of a name: the parity check at load holds every one against its own eager code.

Shapes: T packed rows, H query heads, G key/value heads, D key width, E value width.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from engine.attention.forward_pass import ForwardPass
from engine.attention.held import held_by
from engine.attention.hooks import serve_attention
from engine.attention.probe import Probe, probe_attention


def adopt(model: nn.Module) -> bool:
    """Put ours in the place of every attention that is known not to call the interface. Whether there is one."""
    attentions = [module for module in model.modules() if type(module).__module__.startswith("transformers.")]
    adopted = [FAMILIES[name](module) for module in attentions if (name := type(module).__name__) in FAMILIES]
    return any(adopted)


def wants_masks(model: nn.Module) -> bool:
    """Its own code fails without, though nothing reads them: rows by rows of booleans for each pass."""
    return any(type(module).__name__ == "MptAttention" for module in model.modules())


def _attend(
    module: nn.Module,
    q_1HTD: torch.Tensor,
    k_1GTD: torch.Tensor,
    v_1GTE: torch.Tensor,
    scaling: float,
    *,
    window: int = 0,
    slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """[1, T, H, E]. Keys and queries that a model widens are narrowed to its values' dtype, as pages hold one."""
    attention = probe_attention if isinstance(held_by(module), Probe) else serve_attention
    q_1HTD, k_1GTD = (x.to(v_1GTE.dtype) for x in (q_1HTD, k_1GTD))
    return attention(module, q_1HTD, k_1GTD, v_1GTE, None, scaling, sliding_window=window, slopes=slopes)[0]


def _projected(module: Any, hidden_1TN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v of three Linears, [1, heads, T, D] each."""
    projected = (projection(hidden_1TN) for projection in (module.q_proj, module.k_proj, module.v_proj))
    q, k, v = (x.unflatten(2, (-1, module.head_dim)).transpose(1, 2) for x in projected)
    return q, k, v


def _put(module: Any, name: str, method: Callable[..., Any]) -> bool:
    object.__setattr__(module, name, method)
    return True


def _method(module: Any, scaling: float, window: int = 0) -> bool:
    """GPT-J, CodeGen, GPT-Neo, GPT-NeoX Japanese: `_attn` of q, k, v [1, H, T, D] -> [1, H, T, E], and weights."""

    def attn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        return _attend(module, q, k, v, scaling, window=window).transpose(1, 2), None

    return _put(module, "_attn", attn)


def _bloom(module: Any) -> bool:
    if module.pretraining_tp > 1 and module.slow_but_exact:
        return False
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    two_keys = torch.ones(1, 2, dtype=torch.long, device=module.dense.weight.device)
    slopes = build_alibi_tensor(two_keys, module.num_heads, torch.float32)[:, 0, 1].contiguous()  # of the second

    def forward(hidden: torch.Tensor, residual: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        q, k, v = module._reshape(module.query_key_value(hidden))
        attended = _attend(module, q, k, v, module.inv_norm_factor, slopes=slopes)
        return residual + module.dense(attended.flatten(2)), None

    return _put(module, "forward", forward)


def _mpt(module: Any) -> bool:
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    bias = build_mpt_alibi_tensor(module.n_heads, 2, device=module.out_proj.weight.device)
    slopes = (bias[:, 0, 1] - bias[:, 0, 0]).float().contiguous()

    def forward(hidden: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        qkv = module.Wqkv(hidden)
        if module.clip_qkv:
            qkv = qkv.clamp(min=-module.clip_qkv, max=module.clip_qkv)
        q, k, v = (x.unflatten(2, (module.n_heads, module.head_dim)).transpose(1, 2) for x in qkv.chunk(3, dim=2))
        attended = _attend(module, q, k, v, module.softmax_scale, slopes=slopes)
        return module.out_proj(attended.flatten(2)), None

    return _put(module, "forward", forward)


def _falcon(module: Any) -> bool:
    if module.config.alibi:
        return False  # its eager code adds the slopes twice, its fused one once
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    def forward(
        hidden: torch.Tensor, *_: Any, position_embeddings: tuple[torch.Tensor, torch.Tensor], **__: Any
    ) -> tuple[torch.Tensor, None]:
        q, k, v = (x.transpose(1, 2) for x in _falcon_heads(module, module.query_key_value(hidden)))
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        return module.dense(_attend(module, q, k, v, module.inv_norm_factor).flatten(2)), None

    return _put(module, "forward", forward)


def _falcon_heads(module: Any, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[1, T, heads, D] each; its own code repeats K and V for each query head of a group."""
    if not module.new_decoder_architecture:
        heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = module._split_heads(qkv)
        return heads
    group = module.num_heads // module.num_kv_heads
    qkv = qkv.view(*qkv.shape[:2], module.num_kv_heads, group + 2, module.head_dim)
    return qkv[:, :, :, :-2].flatten(2, 3), qkv[:, :, :, -2], qkv[:, :, :, -1]


def _xglm(module: Any) -> bool:
    def forward(hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        q, k, v = _projected(module, hidden_states)
        return module.out_proj(_attend(module, q, k, v, module.scaling).flatten(2)), None

    return _put(module, "forward", forward)


def _llama4(module: Any) -> bool:
    """Its attention is the interface's; where its queries have temperatures, they are by positions that it asks a cache
    for."""
    if module.use_rope or not module.attn_temperature_tuning:
        return False
    own = MethodType(type(module).forward, module)

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        state = held_by(module)
        if isinstance(state, ForwardPass):
            kwargs["past_key_values"] = _RowPositions(state.meta.positions)
        return own(hidden_states, *args, **kwargs)

    return _put(module, "forward", forward)


class _RowPositions:
    """In the place of a cache that holds nothing."""

    def __init__(self, positions_T: torch.Tensor) -> None:
        self._ahead_T = positions_T - torch.arange(len(positions_T), device=positions_T.device)

    def get_seq_length(self, layer: int) -> torch.Tensor:
        """By how much each row is further than its place in the step."""
        return self._ahead_T

    def update(self, k: torch.Tensor, v: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return k, v


def _diffllama(module: Any) -> bool:
    """The Differential Transformer (arXiv 2410.05258): two calls over the same keys, as one over wide values."""
    from transformers.models.diffllama.modeling_diffllama import apply_rotary_pos_emb

    def forward(
        hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None]:
        q, k, v = _projected(module, hidden_states)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        v = torch.cat([half.repeat(1, 2, 1, 1) for half in v.chunk(2, dim=1)], dim=-1)
        attended, taken = _attend(module, q, k, v, module.scaling).chunk(2, dim=2)
        first, second = (
            torch.exp((x * y).sum(-1, dtype=torch.float32)).to(q.dtype)
            for x, y in ((module.lambda_q1, module.lambda_k1), (module.lambda_q2, module.lambda_k2))
        )
        attended = module.groupnorm(attended - (first - second + module.lambda_init) * taken)
        return module.o_proj(((1 - module.lambda_init) * attended).flatten(2)), None

    return _put(module, "forward", forward)


FAMILIES: dict[str, Callable[[Any], bool]] = {  # by the class of attention
    "BloomAttention": _bloom,
    "CodeGenAttention": lambda module: _method(module, 1.0 / float(module.scale_attn)),
    "DiffLlamaAttention": _diffllama,
    "FalconAttention": _falcon,
    "GPTJAttention": lambda module: _method(module, 1.0 / float(module.scale_attn)),
    "GPTNeoSelfAttention": lambda module: _method(
        module, 1.0, module.config.window_size if module.attention_type == "local" else 0
    ),
    "GPTNeoXJapaneseAttention": lambda module: _method(module, 1.0 / float(module.norm_factor)),
    "Llama4TextAttention": _llama4,
    "MptAttention": _mpt,
    "XGLMAttention": _xglm,
}
