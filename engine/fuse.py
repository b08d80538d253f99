"""Faster forwards for layers that are recognised: joined projections, and one pass over memory where torch has many.

Nothing is assumed from a class's name. A norm or an MLP is taken over when, on random rows, the fused version gives
what the module itself gives; an attention or a decoder layer when its source is, word for word, one that is known.
What is not recognised stays as transformers wrote it, and the parity check runs after all of this. Modules stay in
place; only `forward` is replaced, and weights that were joined are given up.

Shapes: T tokens, N width of the model, H query heads, G key/value heads, D head_dim, I width of the MLP.
"""

from __future__ import annotations

import ctypes
import inspect
import re
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from engine import native
from engine.attention.base import AttentionCall
from engine.attention.cpu_backend import DTYPE_CODE
from engine.attention.hooks import Forward
from engine.linear import PackedLinear

TRIAL_ROWS = 5
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}  # of single elements, relative; two units in the last place
MLP_CLOSE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # of a product's norm


class _Rotary(ctypes.Structure):
    """KvrelayRotary of csrc/fused.cpp, field for field."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("qkv", "cos", "sin", "q_norm", "k_norm", "q", "k_pages", "v_pages", "slots")
        ),
        *((name, ctypes.c_int64) for name in ("rows", "written", "heads", "kv_heads", "dim")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("plus_one", "dtype", "threads")),
    )


class _Kernels:
    def __init__(self) -> None:
        library = native.library()
        pointer, size, code = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
        self.rotate_and_write = library.kvrelay_rotate_and_write
        self.rotate_and_write.argtypes = (ctypes.POINTER(_Rotary),)
        self.rms_norm = library.kvrelay_rms_norm
        self.rms_norm.argtypes = (pointer,) * 3 + (size,) * 2 + (ctypes.c_float,) + (code,) * 3
        self.add_norm = library.kvrelay_add_norm
        self.add_norm.argtypes = (pointer,) * 5 + (size,) * 2 + (ctypes.c_float,) + (code,) * 3
        self.silu_mul = library.kvrelay_silu_mul
        self.silu_mul.argtypes = (pointer,) * 2 + (size,) * 2 + (code,) * 2
        for function in (self.rotate_and_write, self.rms_norm, self.add_norm, self.silu_mul):
            function.restype = None


@dataclass(frozen=True, slots=True)
class Norm:
    """x / rms(x) * weight, or * (1 + weight)."""

    kernels: _Kernels
    weight: torch.Tensor
    eps: float
    plus_one: bool

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        n = self.weight.shape[0]
        self.kernels.rms_norm(
            x.data_ptr(), self.weight.data_ptr(), out.data_ptr(), x.numel() // n, n, self.eps, self.plus_one,
            DTYPE_CODE[x.dtype], torch.get_num_threads(),
        )  # fmt: skip
        return out

    def after_adding(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(x + y, the norm of x + y)"""
        x, y = x.contiguous(), y.contiguous()
        total, out = torch.empty_like(x), torch.empty_like(x)
        n = self.weight.shape[0]
        self.kernels.add_norm(
            x.data_ptr(), y.data_ptr(), self.weight.data_ptr(), total.data_ptr(), out.data_ptr(), x.numel() // n, n,
            self.eps, self.plus_one, DTYPE_CODE[x.dtype], torch.get_num_threads(),
        )  # fmt: skip
        return total, out


@dataclass(frozen=True, slots=True)
class Mlp:
    """down(silu(gate(x)) * up(x)) with gate and up joined."""

    kernels: _Kernels
    gate_up: PackedLinear
    down: PackedLinear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        joined = self.gate_up(x)
        hidden = joined.new_empty(*joined.shape[:-1], joined.shape[-1] // 2)
        self.kernels.silu_mul(
            joined.data_ptr(), hidden.data_ptr(), hidden.numel() // hidden.shape[-1], hidden.shape[-1],
            DTYPE_CODE[x.dtype], torch.get_num_threads(),
        )  # fmt: skip
        result: torch.Tensor = self.down(hidden)
        return result


@dataclass(frozen=True, slots=True)
class Attention:
    """Joined q, k, v; the norms of heads, the rotation and the writing of pages in one pass; attention; out."""

    kernels: _Kernels
    qkv: PackedLinear
    out: PackedLinear
    q_norm: Norm | None
    k_norm: Norm | None
    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    scaling: float

    def __call__(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        *,
        kvrelay: Forward,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        meta, memory = kvrelay.meta, kvrelay.memory
        cos, sin = position_embeddings
        assert cos.shape[-1] == self.head_dim, "a rotation of part of the head is not what the source says"
        qkv, cos, sin = self.qkv(hidden_states), cos.contiguous(), sin.contiguous()
        k_pages, v_pages = memory.k(self.layer), memory.v(self.layer)
        q_THD = qkv.new_empty(meta.num_rows, self.heads, self.head_dim)
        self.kernels.rotate_and_write(
            _Rotary(
                qkv=qkv.data_ptr(),
                cos=cos.data_ptr(),
                sin=sin.data_ptr(),
                q_norm=None if self.q_norm is None else self.q_norm.weight.data_ptr(),
                k_norm=None if self.k_norm is None else self.k_norm.weight.data_ptr(),
                q=q_THD.data_ptr(),
                k_pages=k_pages.data_ptr(),
                v_pages=v_pages.data_ptr(),
                slots=meta.slots.data_ptr(),
                rows=meta.num_rows,
                written=meta.slots.shape[0],
                heads=self.heads,
                kv_heads=self.kv_heads,
                dim=self.head_dim,
                eps=0.0 if self.q_norm is None else self.q_norm.eps,
                plus_one=self.q_norm is not None and self.q_norm.plus_one,
                dtype=DTYPE_CODE[qkv.dtype],
                threads=torch.get_num_threads(),
            )
        )
        if kvrelay.on_layer is not None:
            kvrelay.on_layer(self.layer)
        call = AttentionCall(scaling=self.scaling, window=kvrelay.probe.layers[self.layer].window)
        attended = kvrelay.backend.attend(q_THD, k_pages, v_pages, meta, call)
        return self.out(attended.view(1, meta.num_rows, -1)), None


@dataclass(frozen=True, slots=True)
class Layer:
    """Llama's decoder layer: norm, attention, add, norm, MLP, add."""

    input_norm: Callable[[torch.Tensor], torch.Tensor]
    attention: Attention
    middle_norm: Norm
    mlp: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        attended, _ = self.attention(self.input_norm(hidden_states), *args, **kwargs)
        hidden_states, normed = self.middle_norm.after_adding(hidden_states, attended)
        return hidden_states + self.mlp(normed)


def fuse(model: nn.Module, layer_of: dict[int, int]) -> int:
    """Replace the forwards of the layers that are recognised; how many. To be called before the weights are packed.

    `layer_of` gives the layer of each attention module by its id. Raises NativeUnavailable where nothing can be built.
    """
    kernels = _Kernels()
    fused: dict[int, Any] = {}
    recognisers: tuple[Callable[[nn.Module], Any], ...] = (
        lambda module: _norm(module, kernels),
        lambda module: _mlp(module, kernels),
        lambda module: _attention(module, kernels, layer_of, fused),  # wants to know the norms inside it
        lambda module: _layer(module, fused),  # and this one all its parts
    )
    modules = list(model.modules())
    for recognise in recognisers:
        fused |= {id(m): found for m in modules if id(m) not in fused and (found := recognise(m)) is not None}
    for module in modules:
        if id(module) in fused:
            object.__setattr__(module, "forward", fused[id(module)])
    return len(fused)


def _norm(module: nn.Module, kernels: _Kernels) -> Norm | None:
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None or weight.dim() != 1 or not isinstance(eps, float) or weight.dtype not in DTYPE_CODE:
        return None
    if isinstance(module, nn.LayerNorm):
        return None
    x = _trial(weight.shape[0], weight.dtype)
    wanted = _quietly(module, x)
    if wanted is None or wanted.dtype != x.dtype:
        return None
    for plus_one in (False, True):
        norm = Norm(kernels, weight.detach().clone(), eps, plus_one)
        if torch.allclose(norm(x).float(), wanted.float(), rtol=CLOSE[x.dtype], atol=CLOSE[x.dtype] / 16):
            return norm
    return None


def _mlp(module: nn.Module, kernels: _Kernels) -> Mlp | None:
    names = ("gate_proj", "up_proj", "down_proj")
    gate, up, down = (getattr(module, name, None) for name in names)
    if type(gate) is not nn.Linear or type(up) is not nn.Linear or type(down) is not nn.Linear:
        return None
    if gate.weight.shape != up.weight.shape or gate.weight.dtype not in DTYPE_CODE:
        return None
    x = _trial(gate.in_features, gate.weight.dtype)
    wanted = _quietly(module, x)
    mlp = Mlp(kernels, _joined((gate, up)), _joined((down,)))
    if wanted is None or (mlp(x) - wanted).float().norm() > MLP_CLOSE[x.dtype] * wanted.float().norm():
        return None
    for name in names:
        delattr(module, name)
    return mlp


def _attention(
    module: nn.Module, kernels: _Kernels, layer_of: dict[int, int], fused: dict[int, Any]
) -> Attention | None:
    if id(module) not in layer_of or _body(type(module).forward) not in _KNOWN_ATTENTION:
        return None
    if any(_source_of(type(module), name) != _body(getattr(modeling_llama, name)) for name in _ROTARY_FUNCTIONS):
        return None
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    projections = [getattr(module, name) for name in names]
    norms = [fused.get(id(getattr(module, name, None))) for name in ("q_norm", "k_norm")]
    dim = int(module.head_dim)  # type: ignore[arg-type]
    if any(type(p) is not nn.Linear or p.weight.dtype not in DTYPE_CODE for p in projections) or dim % 2:
        return None
    if hasattr(module, "q_norm") and not _are_alike(norms, dim):
        return None
    q, k, v, o = projections
    if k.out_features != v.out_features:
        return None
    attention = Attention(
        kernels=kernels,
        qkv=_joined((q, k, v)),
        out=_joined((o,)),
        q_norm=norms[0],
        k_norm=norms[1],
        layer=layer_of[id(module)],
        heads=q.out_features // dim,
        kv_heads=k.out_features // dim,
        head_dim=dim,
        scaling=float(module.scaling),  # type: ignore[arg-type]
    )
    for name in names:
        delattr(module, name)
    return attention


def _are_alike(norms: list[Any], dim: int) -> bool:
    """Whether both are norms of a head, different in their weights only."""
    if not all(isinstance(norm, Norm) and norm.weight.shape == (dim,) for norm in norms):
        return False
    q_norm, k_norm = norms
    return bool(q_norm.eps == k_norm.eps and q_norm.plus_one == k_norm.plus_one)


def _layer(module: nn.Module, fused: dict[int, Any]) -> Layer | None:
    if _body(type(module).forward) != _LLAMA_LAYER:
        return None
    parts = [getattr(module, n) for n in ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")]
    before, attention, middle, mlp = (fused.get(id(part), part) for part in parts)
    if not isinstance(attention, Attention) or not isinstance(middle, Norm):
        return None
    return Layer(before, attention, middle, mlp)


def _joined(linears: tuple[nn.Linear, ...]) -> PackedLinear:
    weight = torch.cat([linear.weight.detach() for linear in linears])
    biases = [linear.bias for linear in linears]
    if all(bias is None for bias in biases):
        return PackedLinear(weight, None)
    filled = [
        weight.new_zeros(linear.out_features) if bias is None else bias.detach()
        for linear, bias in zip(linears, biases, strict=True)
    ]
    return PackedLinear(weight, torch.cat(filled))


def _trial(width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(1, TRIAL_ROWS, width, generator=torch.Generator().manual_seed(0)).to(dtype)


def _quietly(module: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
    """What the module makes of x, if it takes one tensor and gives one."""
    try:
        result = module(x)
    except Exception:  # another kind of module than was guessed
        return None
    return result if isinstance(result, torch.Tensor) else None


def _body(function: Callable[..., Any]) -> str:
    """A function's code without signature, comments, docstring and what it says of windows (the probe knows them)."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    except (OSError, TypeError):
        return ""
    source = re.sub(r'""".*?"""', "", source, flags=re.DOTALL)
    source = source[re.search(r"\)(\s*->.*?)?:\n", source, flags=re.DOTALL).end() :]  # type: ignore[union-attr]
    lines = (re.sub(r"\s*#.*", "", line).strip() for line in source.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("sliding_window="))


def _source_of(owner: type, name: str) -> str:
    function = getattr(sys.modules[owner.__module__], name, None)
    return "" if function is None else _body(function)


_ROTARY_FUNCTIONS = ("apply_rotary_pos_emb", "rotate_half")
_LLAMA_LAYER = _body(modeling_llama.LlamaDecoderLayer.forward)
_KNOWN_ATTENTION = (
    _body(modeling_llama.LlamaAttention.forward),
    _body(modeling_qwen3.Qwen3Attention.forward),
)
