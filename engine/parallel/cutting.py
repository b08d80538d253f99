"""What a process of a worker keeps of a model that was probed: its stage's layers, and of those its rank's part."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from engine.attention import hooks
from engine.attention.probe import Probe
from engine.parallel import sharding
from engine.parallel.meetings import Cut
from engine.parallel.shard import Position
from engine.weights import experts, ropes, stage
from engine.weights.loader import run_probe, set_attention
from engine.weights.stage import Part


@dataclass(frozen=True, slots=True)
class CutModel:
    part: Part
    cuts: list[Cut]  # where it meets the other ranks
    probe: Probe  # of this: its own layers have its own heads


def cut_model(module: PreTrainedModel, whole: Probe, position: Position, device: torch.device) -> CutModel:
    """Leave a process its own of the model, on its device. Raises UnsupportedModel.

    The whole model is mapped from its files, and what is kept of it is copied: no memory or GPU ever holds it all.
    """
    set_attention(module, hooks.PROBE)
    part = stage.cut(module, whole, position.stage, lambda: run_probe(module))
    cuts, probe = list[Cut](), whole
    if position.shard.size > 1:
        own = {module_id: layer for module_id, layer in whole.layer_of.items() if layer in part.layers}
        cuts = sharding.shard_model(module, position.shard, replace(whole, layer_of=own))
        probe = sharding.check_shapes(module, whole, part.layers, position.shard)
    set_attention(module, hooks.SERVE)
    ropes.move(module, device)
    experts.choose_form(module, device)
    return CutModel(part, cuts, probe)
