"""Sharding cuts a loaded model down to one rank's part, by transformers' own tensor-parallel plan read as data.

    colwise   a rank keeps a run of the outputs: q, k, v, gate, up (and their biases)
    rowwise   a rank keeps a run of the inputs, and the ranks' products are summed: o, down (the bias is rank 0's)
    lm_head   a run of the vocabulary where it divides, gathered at rank 0

Embeddings and norms stay whole on every rank. Heads, KV heads and the MLP's width must divide. A model whose plan says
anything else is refused by name, and so is one whose attention does not shrink as its plan promises.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.attention.probe import Probe
from engine.errors import UnsupportedModel
from engine.parallel.meetings import Cut
from engine.parallel.shard import Shard
from engine.weights.loader import probe_model

COLWISE, ROWWISE = "colwise", "rowwise"
WHOLE = ("replicated_with_grad_allreduce", "embedding_rowwise", "sequence_parallel")  # right when not cut, too


def check_config(config: Any, size: int) -> None:
    """Raise UnsupportedModel for a model that cannot be cut in `size`: what its config says, before its weights."""
    text = config.get_text_config()
    name = (config.architectures or [type(config).__name__])[0]
    if getattr(text, "kv_lora_rank", None):
        raise UnsupportedModel(
            f"{name} keeps its KV as latents (multi-head latent attention), and tensor_parallel is {size}; "
            "give tensor_parallel 1"
        )
    plan = getattr(text, "base_model_tp_plan", None)
    if not plan:
        raise UnsupportedModel(
            f"{name} has no tensor-parallel plan in transformers, and tensor_parallel is {size}; give tensor_parallel 1"
        )
    for pattern, style in plan.items():
        if style not in (COLWISE, ROWWISE, *WHOLE):
            raise UnsupportedModel(
                f"{name} cuts {pattern} as {style} by its tensor-parallel plan, and only {COLWISE} and {ROWWISE} are "
                f"known here; give tensor_parallel 1, and not {size}"
            )
    _check_sizes(text, size)


def _check_sizes(text: Any, size: int) -> None:
    heads = int(text.num_attention_heads)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    counts = {"KV heads": kv_heads, "attention heads": heads}
    if width := getattr(text, "intermediate_size", None):
        counts["columns of the MLP (intermediate_size)"] = int(width)
    for what, count in sorted(counts.items(), key=lambda item: item[1]):
        if count % size:
            common = math.gcd(*counts.values())
            good = [str(n) for n in range(1, common + 1) if common % n == 0]
            raise UnsupportedModel(
                f"tensor_parallel is {size}, which does not divide {count} {what}; give {_listed(good)}"
            )


def _listed(words: list[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def shard_model(model: PreTrainedModel, shard: Shard, layer_of: dict[int, int]) -> list[Cut]:
    """Keep this rank's part of every weight that the plan names; the rest is given up.

    `layer_of` gives the layer of each attention module by its id. Raises UnsupportedModel.
    """
    cuts: list[Cut] = []
    for parent, name, linear, style in _planned(model):
        if type(linear) is not nn.Linear:
            raise UnsupportedModel(
                f"{type(model).__name__} has a {type(linear).__name__} for {name} where only plain linear layers can "
                f"be cut; give tensor_parallel 1, and not {shard.size}"
            )
        if style == COLWISE:
            _cut_outputs(linear, shard)
        else:
            _cut_inputs(linear, shard)
            cuts.append(Cut(parent, name, layer_of.get(id(parent))))
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and head.out_features % shard.size == 0:
        _cut_outputs(head, shard)
        cuts.append(Cut(*_place_of(model, head), is_head=True))
    missing = set(layer_of.values()) - {cut.layer for cut in cuts}
    if missing:
        raise UnsupportedModel(
            f"{type(model).__name__} does not cut the attention of layer {min(missing)} by its tensor-parallel plan; "
            f"give tensor_parallel 1, and not {shard.size}"
        )
    return cuts


def _planned(model: PreTrainedModel) -> Iterator[tuple[nn.Module, str, nn.Module, str]]:
    """(parent, name, module, style) of each module that is cut, in the model's order."""
    base = model.base_model
    plan = {
        re.compile(re.escape(pattern).replace(r"\*", r"\d+")): style
        for pattern, style in (base.config.get_text_config().base_model_tp_plan or {}).items()
        if style in (COLWISE, ROWWISE)
    }
    modules = dict(base.named_modules())
    for path, module in modules.items():
        style = next((style for pattern, style in plan.items() if pattern.fullmatch(path)), None)
        if style is not None:
            parent, _, name = path.rpartition(".")
            yield modules[parent], name, module, style


def _place_of(model: nn.Module, wanted: nn.Module) -> tuple[nn.Module, str]:
    return next(
        (parent, name) for parent in model.modules() for name, child in parent.named_children() if child is wanted
    )


def _cut_outputs(linear: nn.Linear, shard: Shard) -> None:
    run = shard.run(linear.out_features)
    linear.weight = _kept(linear.weight[run])  # one of its own, where it was tied to the embeddings
    if linear.bias is not None:
        linear.bias = _kept(linear.bias[run])
    linear.out_features //= shard.size


def _cut_inputs(linear: nn.Linear, shard: Shard) -> None:
    linear.weight = _kept(linear.weight[:, shard.run(linear.in_features)])
    if linear.bias is not None and shard.rank > 0:
        linear.bias = None  # type: ignore[assignment]
    linear.in_features //= shard.size


def _kept(part: torch.Tensor) -> nn.Parameter:
    """A copy: the whole weight, which may be a view of the mapped checkpoint, is not kept for its part."""
    return nn.Parameter(part.detach().clone(memory_format=torch.contiguous_format), requires_grad=False)


def check_shapes(model: PreTrainedModel, whole: Probe, max_len: int, shard: Shard) -> None:
    """Raise UnsupportedModel unless every layer of the cut model has its share of the heads of the whole one."""
    try:
        part = probe_model(model, max_len)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"cut for tensor_parallel {shard.size}, {error}; give tensor_parallel 1") from error
    for layer, (all_of_it, ours) in enumerate(zip(whole.attentions, part.attentions, strict=True)):
        has_share = (
            ours.kv.kv_heads * shard.size == all_of_it.kv.kv_heads
            and ours.num_heads * shard.size == all_of_it.num_heads
            and (ours.kv.k_dim, ours.kv.v_dim) == (all_of_it.kv.k_dim, all_of_it.kv.v_dim)
        )
        if not has_share:
            raise UnsupportedModel(
                f"{type(model).__name__} has {ours.num_heads} heads over {ours.kv.kv_heads} KV heads in layer {layer} "
                f"when cut for tensor_parallel {shard.size}, of {all_of_it.num_heads} over {all_of_it.kv.kv_heads}; "
                "give tensor_parallel 1"
            )
