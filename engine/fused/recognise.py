"""Which layers of a model may be run fused (layers.py), and the putting of the fused ones in their place.

Nothing is assumed from a class's name. A norm or an MLP is taken over when, on random rows, the fused version gives
what the module itself gives; an attention or a decoder layer when its source is, word for word, one that is known.
What is not recognised stays as transformers wrote it, and the parity check runs after all of this. Modules stay in
place; only `forward` is replaced, and weights that were joined are given up.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from engine.adapters.products import site_of
from engine.fused.kernels import Heads, Kernels, NormWeight
from engine.fused.layers import Attention, Decoder, Layer, Mlp, Norm
from engine.fused.one_call import LayersInOneCall
from engine.weights.int8 import scales_of
from engine.weights.stage import Elsewhere

DTYPES = (torch.float32, torch.bfloat16)
TRIAL_ROWS = 5
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}  # of single elements, relative; two units in the last place
MLP_CLOSE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # of a product's norm


def fuse(model: nn.Module, layer_of: dict[int, int], kernels: Kernels, max_len: int = 0) -> int:
    """Replace the forwards of the layers that are recognised; how many. To be called before the weights are packed.

    `layer_of` gives the layer of each attention module by its id; positions go up to `max_len`.
    """
    fused: dict[int, Any] = {}
    recognisers: tuple[Callable[[nn.Module], Any], ...] = (
        lambda module: _norm(module, kernels),
        lambda module: _mlp(module, kernels),
        lambda module: _attention(module, kernels, layer_of, fused),  # wants to know the norms inside it
        lambda module: _layer(module, fused),  # and this one all its parts
        lambda module: _decoder(module, kernels, fused, max_len),
    )
    modules = list(model.modules())
    for recognise in recognisers:
        fused |= {id(m): fast for m in modules if id(m) not in fused and (fast := recognise(m)) is not None}
    for module in modules:
        if id(module) in fused:
            object.__setattr__(module, "forward", fused[id(module)])
    return len(fused)


def _norm(module: nn.Module, kernels: Kernels) -> Norm | None:
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None or weight.dim() != 1 or not isinstance(eps, float) or weight.dtype not in DTYPES:
        return None
    if isinstance(module, nn.LayerNorm) or len(inspect.signature(type(module).forward).parameters) != 2:
        return None  # with a gate, say
    x = _random_rows(weight.shape[0], weight)
    wanted = _quietly(module, x)
    if wanted is None or wanted.dtype != x.dtype:
        return None
    for plus_one in (False, True):
        norm = Norm(kernels, NormWeight(weight.detach().clone(), eps, plus_one), module.forward)
        if torch.allclose(norm(x).float(), wanted.float(), rtol=CLOSE[x.dtype], atol=CLOSE[x.dtype] / 16):
            return norm
    return None


def _mlp(module: nn.Module, kernels: Kernels) -> Mlp | None:
    names = ("gate_proj", "up_proj", "down_proj")
    gate, up, down = (getattr(module, name, None) for name in names)
    if type(gate) is not nn.Linear or type(up) is not nn.Linear or type(down) is not nn.Linear:
        return None
    if gate.weight.shape != up.weight.shape or gate.weight.dtype not in DTYPES:
        return None
    x = _random_rows(gate.in_features, gate.weight)
    wanted = _quietly(module, x)
    mlp = Mlp(kernels, _joined(kernels, (gate, up)), _joined(kernels, (down,)))
    if wanted is None or (mlp(x) - wanted).float().norm() > MLP_CLOSE[x.dtype] * wanted.float().norm():
        return None
    _give_up(module, names)
    return mlp


def _attention(
    module: nn.Module, kernels: Kernels, layer_of: dict[int, int], fused: dict[int, Any]
) -> Attention | None:
    if id(module) not in layer_of or _body(type(module).forward) not in _KNOWN_ATTENTION:
        return None
    if any(_source_of(type(module), name) != _body(getattr(modeling_llama, name)) for name in _ROTARY_FUNCTIONS):
        return None
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    projections = [getattr(module, name) for name in names]
    norms = [fused.get(id(getattr(module, name, None))) for name in ("q_norm", "k_norm")]
    dim = int(module.head_dim)  # type: ignore[arg-type]
    if any(type(p) is not nn.Linear or p.weight.dtype not in DTYPES for p in projections) or dim % 2:
        return None
    if hasattr(module, "q_norm") and not _are_alike(norms, dim):
        return None
    q, k, v, o = projections
    if k.out_features != v.out_features:
        return None
    q_norm, k_norm = (None if norm is None else norm.weight for norm in norms)
    attention = Attention(
        kernels=kernels,
        qkv=_joined(kernels, (q, k, v)),
        out=_joined(kernels, (o,)),
        heads=Heads(q.out_features // dim, k.out_features // dim, dim, q_norm, k_norm),
        layer=layer_of[id(module)],
        scaling=float(module.scaling),  # type: ignore[arg-type]
    )
    _give_up(module, names)
    return attention


def _give_up(module: nn.Module, names: Sequence[str]) -> None:
    """Their weights at once, whoever still has the modules: the next product's take their place in memory."""
    for name in names:
        linear = getattr(module, name)
        linear.weight = linear.bias = None
        delattr(module, name)


def _are_alike(norms: list[Any], dim: int) -> bool:
    """Whether both are norms of a head, different in their weights only."""
    if not all(isinstance(norm, Norm) and norm.weight.weight.shape == (dim,) for norm in norms):
        return False
    q_norm, k_norm = (norm.weight for norm in norms)
    return bool(q_norm.eps == k_norm.eps and q_norm.plus_one == k_norm.plus_one)


def _layer(module: nn.Module, fused: dict[int, Any]) -> Layer | None:
    if _body(type(module).forward) != _LLAMA_LAYER:
        return None
    parts = [getattr(module, n) for n in ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")]
    before, attention, middle, mlp = (fused.get(id(part), part) for part in parts)
    if not isinstance(attention, Attention) or not isinstance(middle, Norm):
        return None
    return Layer(before, attention, middle, mlp)


def _decoder(module: nn.Module, kernels: Kernels, fused: dict[int, Any], max_len: int) -> Decoder | None:
    """For a model whose every layer was recognised and that does nothing else with what goes through them."""
    if _body(type(module).forward) not in _KNOWN_MODELS:
        return None
    elsewhere = [layer for layer in module.layers if isinstance(layer, Elsewhere)]  # type: ignore[union-attr]
    own = [layer for layer in module.layers if not isinstance(layer, Elsewhere)]  # type: ignore[union-attr]
    layers: tuple[Any, ...] = tuple(fused.get(id(layer)) for layer in own)
    norm = fused.get(id(module.norm))
    if not isinstance(norm, Norm) or type(module.embed_tokens) is not nn.Embedding:
        return None
    if not all(isinstance(layer, Layer) and isinstance(layer.input_norm, Norm) for layer in layers):
        return None
    dim = layers[0].attention.heads.head_dim
    rotation = kernels.rotation(module.rotary_emb, norm.weight.weight, dim, max_len)  # type: ignore[arg-type]
    if rotation is None:
        return None
    entry = next((layer.entry for layer in elsewhere if layer.entry is not None), None)
    return Decoder(
        embed=module.embed_tokens if entry is None else entry.take,
        layers=layers,
        norm=norm,
        rotation=rotation,
        in_one_call=LayersInOneCall(layers, norm),
        leaves=any(layer.is_behind for layer in elsewhere),
    )


def _joined(kernels: Kernels, linears: tuple[nn.Linear, ...]) -> Callable[[torch.Tensor], torch.Tensor]:
    """One product for all of them, over their weights side by side in storage."""
    weights = [linear.weight.detach() for linear in linears]
    scales = [scales_of(linear) for linear in linears]
    joined = None if any(each is None for each in scales) else torch.cat([each for each in scales if each is not None])
    biases = [linear.bias for linear in linears]
    if all(bias is None for bias in biases):
        return kernels.linear(weights, None, joined, site_of(linears))
    filled = [
        weights[0].new_zeros(linear.out_features) if bias is None else bias.detach()
        for linear, bias in zip(linears, biases, strict=True)
    ]
    return kernels.linear(weights, torch.cat(filled), joined, site_of(linears))


def _random_rows(width: int, like: torch.Tensor) -> torch.Tensor:
    rows = torch.randn(1, TRIAL_ROWS, width, generator=torch.Generator().manual_seed(0))
    return rows.to(like.device, like.dtype)


def _quietly(module: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
    """What the module makes of x, if it takes one tensor and gives one."""
    try:
        result = module(x)
    except Exception:  # another kind of module than was guessed
        return None
    return result if isinstance(result, torch.Tensor) else None


@cache
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
_KNOWN_MODELS = (
    _body(modeling_llama.LlamaModel.forward),
    _body(modeling_mistral.MistralModel.forward),
    _body(modeling_qwen2.Qwen2Model.forward),
    _body(modeling_qwen3.Qwen3Model.forward),
)
