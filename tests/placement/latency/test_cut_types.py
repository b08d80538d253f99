"""The planner knows which model types the engine cuts over processes: of all that transformers has, in each version."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.errors import UnsupportedModel
from engine.parallel import sharding
from engine.parallel.cutting import cut_model
from engine.parallel.shard import Position, Shard
from engine.weights import experts
from engine.weights.loader import probe_model
from engine.weights.stage import Stage
from placement.catalogs.base import PlanError
from placement.latency.cut_types import RANKS
from placement.latency.families import INDEXED_TYPES, NO_KV_TYPES
from placement.latency.model_config import shape_of
from placement.latency.tensor_parallel import why_not_cut, why_not_staged
from tests.zoo import EXTRA, HYBRIDS, MORE_HYBRIDS, OTHERS, TEN, Builder

BY_VERSION = {  # cut by some of transformers 5.17 to 5.23, and not by others
    *("aria_text", "granite_swa", "granitemoe_swa", "mimo_v2_flash", "nemotron"),
}
NOT_SERVED = {*INDEXED_TYPES, "gemma3n_text", "hrm_text"}  # in one process neither


def default_configs() -> dict[str, PreTrainedConfig]:
    """By the type of the text, of every causal model of the installed transformers."""
    configs = {}
    for model_type, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        try:
            config = CONFIG_MAPPING[model_type]()
            text_type = config.get_text_config().model_type
        except (ValueError, StrictDataclassError):  # it has no default, or no text alone
            continue
        config.architectures = [names if isinstance(names, str) else names[0]]
        configs[text_type] = config
    assert RANKS & MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() <= configs.keys()
    return configs


def is_cut(config: PreTrainedConfig, size: int) -> bool:
    try:
        sharding.check_config(config, size)
    except UnsupportedModel:
        return False
    return True


def plain(config: PreTrainedConfig) -> dict[str, Any]:
    keys: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return keys


def test_a_type_is_planned_in_ranks_just_where_the_engine_cuts_it() -> None:
    wrong = {}
    for model_type, config in default_configs().items():
        if model_type in BY_VERSION | NOT_SERVED | set(NO_KV_TYPES):
            continue
        try:
            plan = sharding.plan_of(config, 2)
        except UnsupportedModel:
            plan = {}
        if bool(plan) != (model_type in RANKS):
            wrong[model_type] = "is cut" if plan else "is refused"
    assert not wrong
    assert not RANKS & (BY_VERSION | NOT_SERVED | set(NO_KV_TYPES))


def test_its_degrees_are_those_that_the_engine_loads() -> None:
    wrong = []
    for model_type, config in default_configs().items():
        try:
            shape = shape_of(plain(config), model_type)
        except PlanError:
            continue
        planned = [size for size in (2, 4, 8, 16) if not why_not_cut(shape, size)]
        wrong += [(model_type, size) for size in planned if not is_cut(config, size)]
    assert not wrong


# refused on one GPU, too; and those whose configs the planner cannot read
NO_CASE = ("falcon_alibi", "gemma3n_text")
TINY: dict[str, Builder] = {name: make for name, make in {**TEN, **EXTRA, **OTHERS}.items() if name not in NO_CASE}


@pytest.mark.parametrize("name", TINY)
def test_a_model_is_planned_in_two_just_where_it_is_cut_in_two(name: str) -> None:
    shape = shape_of(plain(TINY[name]()), name)
    planned = {"ranks": not why_not_cut(shape, 2), "stages": not why_not_staged(shape, 2)}
    positions = {"ranks": Position(Stage(1, 1), Shard(0, 2)), "stages": Position(Stage(1, 2), Shard(0, 1))}
    loaded = {what: is_loaded(TINY[name](), position) for what, position in positions.items()}
    if shape.model_type in BY_VERSION:
        loaded["ranks"] = False
    assert planned == loaded


def is_loaded(config: PreTrainedConfig, position: Position) -> bool:
    """Whether a process finds its part; of a model that is probed whole."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation=experts.EAGER)
    with torch.inference_mode():
        probe = probe_model(model.eval(), 256)
        try:
            cut_model(model, probe, position, torch.device("cpu"))
        except UnsupportedModel:
            return False
    return True


@pytest.mark.parametrize("name", [*HYBRIDS, *MORE_HYBRIDS])
def test_a_model_with_a_state_is_planned_by_no_roofline(name: str) -> None:
    """Its type says so where its config does not list its layers."""
    keys = plain({**HYBRIDS, **MORE_HYBRIDS}[name]())
    if name != "granitemoehybrid":  # whose layers may all be of attention
        keys.pop("layer_types", None)
    with pytest.raises(PlanError, match="which is not KV in pages"):
        shape_of(keys, name)
