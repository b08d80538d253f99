"""Sharding cuts a loaded model down to one rank's part, by transformers' own tensor-parallel plan read as data.

    colwise         a rank keeps a run of the outputs: q, k, v, gate, up (and their biases)
    rowwise         a rank keeps a run of the inputs, and the ranks' products are summed: o, down (the bias is rank 0's)
    packed_colwise  gate and up behind each other: a run of each
    experts         a run of the width of each, or a run of them; their sum is met for, and the router is whole
    lm_head         a run of the vocabulary where it divides, gathered at rank 0

Embeddings and norms stay whole on every rank, but a norm over all heads: it is cut, and its mean is met for. Where
there are fewer KV heads than ranks, each has the one that its query heads read. A model whose plan says anything else
is refused by name, and so is one whose attention does not shrink as its plan promises.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.attention.probe import Probe
from engine.errors import UnsupportedModel
from engine.parallel.meetings import Cut, WideNorm
from engine.parallel.shard import Shard
from engine.weights.config import architecture_of
from engine.weights.experts import OwnExperts
from engine.weights.loader import probe_cut

COLWISE, ROWWISE, PACKED, EXPERTS = "colwise", "rowwise", "packed_colwise", "moe_tp_experts"
WHOLE = ("replicated_with_grad_allreduce", "embedding_rowwise", "sequence_parallel", "mla_kv_a_proj")  # not cut
LATENT_PLAN = {  # of attention whose KV comes from latents, which every rank computes
    "layers.*.self_attn.q_proj": COLWISE,
    "layers.*.self_attn.q_b_proj": COLWISE,
    "layers.*.self_attn.kv_b_proj": COLWISE,
    "layers.*.self_attn.o_proj": ROWWISE,
}
WIDE_NORMS = {"q_proj": "q_norm", "k_proj": "k_norm", "v_proj": ""}  # over all heads, behind what is gathered for them
NUM_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")  # in configs
GATHERED, SPLIT = "colwise_gather_output", "rowwise_split_input"
ATTENTION = "att"  # in patterns: self_attn, attention


def plan_of(config: Any, size: int) -> Mapping[str, str]:
    """How each module is cut, by the pattern of its name. Raises UnsupportedModel."""
    text, name = config.get_text_config(), architecture_of(config)
    plan = dict(getattr(text, "base_model_tp_plan", None) or {})
    if not plan:
        raise UnsupportedModel(
            f"{name} has no tensor-parallel plan in transformers, and tensor_parallel is {size}; give tensor_parallel 1"
        )
    try:
        has_latents = bool(getattr(text, "kv_lora_rank", None))
    except RuntimeError as error:  # transformers' of a config whose layers differ in it
        raise UnsupportedModel(
            f"{name} has layers whose kv_lora_rank differs, which are not cut; give tensor_parallel 1, and not {size}"
        ) from error
    if has_latents:
        plan |= LATENT_PLAN
    for pattern, style in plan.items():
        last = pattern.rpartition(".")[2]
        if style == GATHERED and last in WIDE_NORMS:
            plan[pattern] = COLWISE
        elif style == SPLIT and last == "o_proj":
            plan[pattern] = ROWWISE
        elif style not in (COLWISE, ROWWISE, PACKED, EXPERTS, *WHOLE):
            raise UnsupportedModel(
                f"{name} cuts {pattern} as {style} by its tensor-parallel plan, which is not known here; "
                f"give tensor_parallel 1, and not {size}"
            )
    if not any(style == ROWWISE and ATTENTION in pattern for pattern, style in plan.items()):  # experts alone
        raise UnsupportedModel(
            f"{name} does not cut its attention by its tensor-parallel plan; give tensor_parallel 1, and not {size}"
        )
    return plan


def check_config(config: Any, size: int, has_whole_experts: bool = False) -> None:
    """Raise UnsupportedModel for a model that cannot be cut in `size`: what its config says, before its weights."""
    are_experts_cut = EXPERTS in plan_of(config, size).values()
    text = config.get_text_config()
    if isinstance(getattr(text, "intermediate_size", None), list):
        raise UnsupportedModel(
            f"{architecture_of(config)} has an intermediate_size for each layer, which are not cut; "
            f"give tensor_parallel 1, and not {size}"
        )
    num_experts = next((n for key in NUM_EXPERTS if (n := getattr(text, key, None))), 0)
    if has_whole_experts and not (num_experts and are_experts_cut):
        why = "does not cut its experts by its tensor-parallel plan" if num_experts else "has no experts"
        raise UnsupportedModel(f"expert_parallel is true, and {architecture_of(config)} {why}; leave it out")
    counts = _counts(text, num_experts if has_whole_experts else 0)
    good = _degrees(text, counts)
    if size in good:
        return
    what, count = next(
        ((what, count) for what, count in counts.items() if count % size),
        ("KV heads", _kv_heads(text)),
    )
    mends = [str(degree) for degree in good]
    if num_experts and are_experts_cut and not has_whole_experts and size in _degrees(text, _counts(text, num_experts)):
        mends.append(f"{size} with expert_parallel: true")
    raise UnsupportedModel(f"tensor_parallel is {size}, which does not divide {count} {what}; give {_listed(mends)}")


def _kv_heads(text: Any) -> int:
    heads = int(text.num_attention_heads)
    return heads if getattr(text, "kv_lora_rank", None) else int(getattr(text, "num_key_value_heads", None) or heads)


def _counts(text: Any, num_experts: int) -> dict[str, int]:
    """What ranks share out evenly. `num_experts`: where each has whole ones."""
    widths = {key: int(getattr(text, key, None) or 0) for key in ("intermediate_size", "moe_intermediate_size")}
    if num_experts and widths["moe_intermediate_size"]:  # also of those that all tokens go to, which are cut by it
        widths["moe_intermediate_size"] *= int(getattr(text, "n_shared_experts", None) or 0)
    elif num_experts:
        widths["intermediate_size"] = 0  # it is theirs
    counts = {"attention heads": int(text.num_attention_heads), "experts": num_experts}
    counts |= {f"columns of the MLP ({key})": width for key, width in widths.items()}
    return {what: count for what, count in counts.items() if count}


def _degrees(text: Any, counts: Mapping[str, int]) -> list[int]:
    kv_heads = _kv_heads(text)
    return [
        n
        for n in range(1, int(text.num_attention_heads) + 1)
        if not any(count % n for count in counts.values()) and (kv_heads % n == 0 or n % kv_heads == 0)
    ]


def _listed(words: list[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def shard_model(model: PreTrainedModel, shard: Shard, probe: Probe) -> list[Cut]:
    """Keep this rank's part of every weight that the plan names; the rest is given up.

    `probe` is of the whole model. Raises UnsupportedModel.
    """
    cuts: list[Cut] = []
    for parent, name, module, style in _planned(model, shard.size):
        layer = probe.layer_of.get(id(parent))
        if style == EXPERTS:
            cuts.append(Cut(parent, name))
            if shard.has_whole_experts:
                setattr(parent, name, OwnExperts(module, shard.run(module.num_experts)))
        elif isinstance(module, nn.Parameter):
            if not shard.has_whole_experts:
                _cut_experts(model, parent, name, module, style, shard)
        elif type(module) is not nn.Linear:
            raise UnsupportedModel(
                f"{type(model).__name__} has a {type(module).__name__} for {name} where only plain linear layers can "
                f"be cut; give tensor_parallel 1, and not {shard.size}"
            )
        elif style == ROWWISE:
            _cut_inputs(module, shard)
            cuts.append(Cut(parent, name, layer))
        else:
            run = _run_of_heads(module, name, layer, shard, probe)
            cuts += _cut_wide_norm(parent, name, module.out_features, run, shard)
            _cut_outputs(module, run)
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and head.out_features % shard.size == 0:
        _cut_outputs(head, shard.run(head.out_features))
        cuts.append(Cut(*_place_of(model, head), is_head=True))
    missing = set(probe.layer_of.values()) - {cut.layer for cut in cuts}
    if missing:
        raise UnsupportedModel(
            f"{type(model).__name__} does not cut the attention of layer {min(missing)} by its tensor-parallel plan; "
            f"give tensor_parallel 1, and not {shard.size}"
        )
    _count_groups(model, probe, shard)
    return cuts


def _planned(model: PreTrainedModel, size: int) -> Iterator[tuple[nn.Module, str, Any, str]]:
    """(parent, name, module or parameter, style) of all that is cut, in the model's order."""
    base = model.base_model
    plan = {
        re.compile(re.escape(pattern).replace(r"\*", r"\d+")): style
        for pattern, style in plan_of(base.config, size).items()
        if style not in WHOLE
    }
    modules = dict(base.named_modules())
    weights = {path: weight for path, weight in base.named_parameters() if ".experts." in path}
    for path, found in [*modules.items(), *weights.items()]:
        style = next((style for pattern, style in plan.items() if pattern.fullmatch(path)), None)
        if style is not None:
            parent, _, name = path.rpartition(".")
            yield modules[parent], name, found, style


def _place_of(model: nn.Module, wanted: nn.Module) -> tuple[nn.Module, str]:
    return next(
        (parent, name) for parent in model.modules() for name, child in parent.named_children() if child is wanted
    )


def _run_of_heads(linear: nn.Linear, name: str, layer: int | None, shard: Shard, probe: Probe) -> slice:
    """Which outputs are this rank's. K and V have a head of their own where others have the same."""
    if layer is None or name not in ("k_proj", "v_proj"):
        return shard.run(linear.out_features)
    count = probe.attention(layer).kv.kv_heads
    heads, width = shard.share.heads(count), linear.out_features // count
    return slice(heads.start * width, heads.stop * width)


def _cut_outputs(linear: nn.Linear, run: slice) -> None:
    linear.weight = _kept(linear.weight[run])  # one of its own, where it was tied to the embeddings
    if linear.bias is not None:
        linear.bias = _kept(linear.bias[run])
    linear.out_features = run.stop - run.start


def _cut_inputs(linear: nn.Linear, shard: Shard) -> None:
    linear.weight = _kept(linear.weight[:, shard.run(linear.in_features)])
    if linear.bias is not None and shard.rank > 0:
        linear.bias = None  # type: ignore[assignment]
    linear.in_features //= shard.size


def _cut_experts(
    model: PreTrainedModel, experts: nn.Module, name: str, weight: nn.Parameter, style: str, shard: Shard
) -> None:
    """[experts, gate and up, hidden] or [experts, hidden, width]."""
    if getattr(experts, "is_transposed", False) or getattr(experts, "has_bias", False):
        raise UnsupportedModel(
            f"{type(model).__name__} keeps its experts' {name} in another order than can be cut; "
            f"give tensor_parallel 1, and not {shard.size}"
        )
    if style == PACKED:
        halves = weight.chunk(2, dim=1)
        setattr(experts, name, _kept(torch.cat([half[:, shard.run(half.shape[1])] for half in halves], dim=1)))
    else:
        setattr(experts, name, _kept(weight[:, :, shard.run(weight.shape[2])]))


def _cut_wide_norm(attention: nn.Module, name: str, width: int, run: slice, shard: Shard) -> list[Cut]:
    """A norm over all heads, which stands behind q or k."""
    norm_name = WIDE_NORMS.get(name, "")
    norm: Any = getattr(attention, norm_name, None)
    weight = getattr(norm, "weight", None)
    eps = getattr(norm, "variance_epsilon", None)
    if eps is None or weight is None or weight.shape != (width,) or width == getattr(attention, "head_dim", None):
        return []
    added = (run.stop - run.start) * shard.size  # by all ranks, of which several may have a head
    setattr(attention, norm_name, WideNorm(_kept(weight[run]), float(eps), added))
    return [Cut(attention, norm_name)]


def _count_groups(model: PreTrainedModel, probe: Probe, shard: Shard) -> None:
    """Of transformers' own attention: how many query heads read each KV head that is here."""
    for module in model.modules():
        layer = probe.layer_of.get(id(module))
        if layer is not None and hasattr(module, "num_key_value_groups"):
            heads, kv_heads = probe.attention(layer).num_heads, probe.attention(layer).kv.kv_heads
            here = len(shard.share.heads(kv_heads))
            module.num_key_value_groups = heads // shard.size // here


def _kept(part: torch.Tensor) -> nn.Parameter:
    """A copy: the whole weight, which may be a view of the mapped checkpoint, is not kept for its part."""
    return nn.Parameter(part.detach().clone(memory_format=torch.contiguous_format), requires_grad=False)


def check_shapes(model: PreTrainedModel, whole: Probe, layers: range, shard: Shard) -> Probe:
    """What a probe of the cut model shows, which has these layers. Raises UnsupportedModel unless each has its share of
    the heads."""
    try:
        part = probe_cut(model, whole, layers)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"cut for tensor_parallel {shard.size}, {error}; give tensor_parallel 1") from error
    for layer in layers:
        all_of_it, ours = whole.attention(layer), part.attention(layer)
        has_share = (
            ours.kv.kv_heads == len(shard.share.heads(all_of_it.kv.kv_heads))
            and ours.num_heads * shard.size == all_of_it.num_heads
            and (ours.kv.k_dim, ours.kv.v_dim) == (all_of_it.kv.k_dim, all_of_it.kv.v_dim)
        )
        if not has_share:
            raise UnsupportedModel(
                f"{type(model).__name__} has {ours.num_heads} heads over {ours.kv.kv_heads} KV heads in layer {layer} "
                f"when cut for tensor_parallel {shard.size}, of {all_of_it.num_heads} over {all_of_it.kv.kv_heads}; "
                "give tensor_parallel 1"
            )
    return part
