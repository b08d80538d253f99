"""What a model's config says before its weights are read: how it can be served, and why it cannot.

Features that are known to be wrong under packed, paged execution are refused by name; the parity check catches those
that nobody has named yet.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, GenerationConfig, PreTrainedConfig

from engine.errors import UnsupportedModel
from engine.hub import name_and_commit, why_not_had
from engine.options import EngineOptions
from engine.types import LengthRope
from engine.weights.files import file_of, why_not_there

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ROPES_BY_LENGTH = ("dynamic", "longrope")
ANEW = ("Phi3ForCausalLM", "Phi4MultimodalForCausalLM", "PhimoeForCausalLM")  # give their cache up to switch factors
LENGTHS = ("max_position_embeddings", "max_seq_len", "seq_length")  # MPT's and BLOOM's, which was trained on so many


@dataclass(frozen=True, slots=True)
class ServedConfig:
    """A model's config, and how it is to be served."""

    config: Any
    dtype: torch.dtype
    max_len: int  # tokens of a sequence
    rope: LengthRope | None = None


def served_config(options: EngineOptions) -> ServedConfig:
    """Raises UnsupportedModel for a model that cannot be read or served, ValueError for an option out of range."""
    config = load_config(options.model)
    dtype = resolve_dtype(options.dtype, config)
    check_config(config)
    max_len = resolve_max_len(options.max_model_len, config)
    return ServedConfig(config, dtype, max_len, length_rope(config, max_len))


def load_config(model: str) -> Any:
    """The model's config. Raises UnsupportedModel with one sentence when there is none that can be read."""
    if why := why_not_there(model):
        raise UnsupportedModel(why)
    if os.path.isdir(model) and not os.path.exists(os.path.join(model, "config.json")):
        raise UnsupportedModel(f"model {model!r} has no config.json; give a Hugging Face model directory")
    check_beside(model)
    name, commit = name_and_commit(model)
    try:
        _check_sections(model, PreTrainedConfig.get_config_dict(name, revision=commit)[0])
        return AutoConfig.from_pretrained(name, revision=commit, trust_remote_code=False)
    except UnsupportedModel:
        raise
    except Exception as error:  # transformers raises nearly every type for a config that it cannot read
        if "trust_remote_code" in str(error):
            raise UnsupportedModel(
                f"model {model!r} has code of its own, which is not run; give one of a type that transformers knows"
            ) from error
        why = why_not_had(model, error) or first_sentence(error)
        raise UnsupportedModel(f"model {model!r} cannot be read: {why}") from error


def _check_sections(model: str, config: dict[str, Any]) -> None:
    """What transformers stumbles at without a word of the key."""
    text = config.get("text_config")
    for section in (config, text if isinstance(text, dict) else {}):
        _check_dtype(model, section)
        told = section.get("quantization_config")
        if told is not None and not isinstance(told, dict):
            raise UnsupportedModel(
                f"quantization_config in config.json of model {model!r} is {told!r:.80}; it is an object, and a model "
                "that is not quantised has none"
            )


def _check_dtype(model: str, section: dict[str, Any]) -> None:
    for key in ("dtype", "torch_dtype"):
        name = section.get(key)
        if isinstance(name, str) and not isinstance(getattr(torch, name, None), torch.dtype):
            raise UnsupportedModel(
                f"{key} in config.json of model {model!r} is {name!r:.80}; give one of torch's, such as 'bfloat16'"
            )


def check_beside(model: str) -> None:
    """What is beside config.json and the weights. Of a name on the hub it is there once it is loaded. Raises
    UnsupportedModel."""
    _check_no_adapter(model)
    _check_generation_config(model)


def _check_no_adapter(model: str) -> None:
    """transformers adds one to the weights where peft is installed, and else passes it over."""
    if file_of(model, "adapter_config.json") is not None:
        raise UnsupportedModel(
            f"model {model!r} has an adapter beside its weights (adapter_config.json), which may be merged in them "
            "already; move it elsewhere, and where it is not merged serve it by `kvrelay adapter add`"
        )


def _check_generation_config(model: str) -> None:
    """transformers passes one over that is no JSON, and the sampling and EOS with it. Others that it cannot read it
    refuses once the weights are loaded, and says of no value which file it is in."""
    path = file_of(model, "generation_config.json")
    if path is None:
        return
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        told = None
    if not isinstance(told, dict):
        raise UnsupportedModel(f"{path} holds no JSON object that can be read; mend it, or remove it")
    try:
        GenerationConfig.from_dict(told)
    except Exception as error:  # of any type: it compares what it is given with numbers, and hands objects on
        why = first_sentence(error).rstrip(".")
        raise UnsupportedModel(f"{path} cannot be read by transformers: {why}; mend it, or remove it") from error


def resolve_dtype(asked: str, config: Any) -> torch.dtype:
    """`auto` is the config's own; float16, which CPUs compute slowly, becomes bfloat16."""
    if asked != "auto":
        return DTYPES[asked]
    own = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None) or torch.float32
    return torch.bfloat16 if own in (torch.float16, torch.bfloat16) else torch.float32


def resolve_max_len(asked: int | None, config: Any) -> int:
    """The longest sequence to serve. Raises ValueError when more is asked for than the model's positions, or those that
    its dynamic, linear or YaRN RoPE stretches them to."""
    text = config.get_text_config()
    own = next((value for key in LENGTHS if (value := getattr(text, key, None)) is not None), None)
    if own is not None and own < 1:
        own = None  # xlnet says -1: no limit
    most = None if own is None else _stretched(text, own)
    if own is None and asked is None:
        raise ValueError("the model's config names no max_position_embeddings; give max_model_len")
    if (own if asked is None else asked) == 1:
        raise ValueError("a sequence has 1 token at most; a prompt and its answer have 2 or more")
    if asked is None:
        return int(own or 0)
    if most is not None and asked > most:
        raise ValueError(f"max_model_len is {asked}, but the model has {most} positions; give at most {most}")
    return asked


def _stretched(text: Any, own: int) -> int:
    """By a plain factor; and of YaRN that was added to a config, whose max_position_embeddings stays as it was: Qwen's
    cards say so."""
    rope = getattr(text, "rope_parameters", None) or {}
    kind, factor = rope.get("rope_type"), float(rope.get("factor") or 1.0)
    if kind in ("dynamic", "linear"):
        return int(own * factor)
    original = rope.get("original_max_position_embeddings")
    return max(own, int(original * factor)) if kind == "yarn" and original else own


def architecture_of(config: Any) -> str:
    """Its name, for a sentence."""
    return str((config.architectures or [type(config).__name__])[0])


def check_config(config: Any) -> None:
    """Raise UnsupportedModel for features that need more than pages of K and V."""
    text = config.get_text_config()
    _check_names("architectures", config.architectures)
    _check_names("layer_types", getattr(text, "layer_types", None))
    name = architecture_of(config)
    layers = getattr(text, "num_hidden_layers", 1)
    if isinstance(layers, int) and layers < 1:
        raise UnsupportedModel(f"{name} has no layers: num_hidden_layers in config.json is {layers}")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is an encoder-decoder; only decoder-only models can be served")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(_why_no_text_model(config, name))
    if getattr(text, "attn_temperature_tuning", False) and "Llama4" not in name:
        raise UnsupportedModel(
            f"{name} tunes its attention temperature (attn_temperature_tuning) by positions that it reads "
            "from a cache object, which pages do not have"
        )


def _why_no_text_model(config: Any, name: str) -> str:
    if config.get_text_config() is not config:
        return (
            f"{name} is a model of text with images or sound; kvrelay serves text models: give its text part, by itself"
        )
    return (
        f"{name} is of type {config.model_type}, which transformers has no causal language model of; give one of text"
    )


def _check_names(key: str, given: object) -> None:
    if given is not None and not (isinstance(given, list) and all(isinstance(name, str) for name in given)):
        raise UnsupportedModel(f"{key} in config.json is {given!r:.80}; it is a list of names")


def length_rope(config: Any, max_len: int) -> LengthRope | None:
    """How the rotary frequencies go by a request's length, of sequences up to `max_len`; None: they do not. Raises
    UnsupportedModel where layers differ in that."""
    text = config.get_text_config()
    name = architecture_of(config)
    for rope in _rope_parameters(text):
        kind = str(rope.get("rope_type", "default"))
        if not any(by_length in kind for by_length in ROPES_BY_LENGTH):
            continue
        limit = _limit(kind, rope, text)
        if max_len <= limit:
            continue
        if rope is not getattr(text, "rope_parameters", None):
            raise UnsupportedModel(
                f"{name} has {kind} RoPE in some of its layers, whose frequencies follow the longest request of a "
                f"batch beyond {limit} tokens; set max_model_len to at most {limit}"
            )
        return LengthRope(limit=limit, is_dynamic=kind != "longrope", is_anew=kind == "longrope" and name in ANEW)
    return None


def _limit(kind: str, rope: dict[str, Any], text: Any) -> int:
    """Tokens up to which frequencies are the same."""
    own = int(getattr(text, "max_position_embeddings", 0))
    if kind != "longrope":
        return own
    return int(getattr(text, "original_max_position_embeddings", None) or rope["original_max_position_embeddings"])


def _rope_parameters(text: Any) -> Iterator[dict[str, Any]]:
    parameters = getattr(text, "rope_parameters", None) or {}
    nested = [p for p in parameters.values() if isinstance(p, dict)]
    yield from nested or [parameters]


def first_sentence(error: Exception) -> str:
    """With the error's type where it was not made to be read."""
    told = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    head = (" ".join(told.split()) or type(error).__name__).split(". ")[0]
    if isinstance(error, KeyError) and " " not in head:  # no sentence of its own
        return f"transformers finds no {head!r:.200}: config.json gives what it does not know, or lacks what it needs"
    if isinstance(error, TypeError | AttributeError | LookupError) and not isinstance(error, KeyError):
        head = f"{type(error).__name__}: {head}"
    return head if len(head) <= 300 else head[:297] + "..."
