"""Loading: from a model's name to its weights, what it is, and what of it cannot be served.

Every failure of transformers' from_pretrained leaves here as one sentence. Features that are known to be wrong under
packed, paged execution are refused by name; the parity check catches those that nobody has named yet.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from engine.attention import hooks
from engine.attention.hooks import UnsupportedModel
from engine.types import ModelInfo

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LOADING = threading.Lock()  # transformers patches its own classes while it loads: two at once leave them patched
PROBE_TOKENS = 2
SAMPLED_BYTES = 64  # of each tensor's two ends, for the fingerprint
STATE_LAYERS = ("linear_attention", "recurrent", "mamba", "conv", "lightning", "delta", "rwkv", "retention")
TRUE_LENGTH_ROPES = ("dynamic", "longrope")
VOLATILE_KEYS = (
    "_name_or_path",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "attn_implementation",
    "kvrelay_max_len",
)


def load_config(model: str) -> Any:
    """The model's config. Raises UnsupportedModel with one sentence when there is none that can be read."""
    if os.path.isdir(model) and not os.path.exists(os.path.join(model, "config.json")):
        raise UnsupportedModel(f"model {model!r} has no config.json; give a Hugging Face model directory")
    try:
        return AutoConfig.from_pretrained(model)
    except Exception as error:  # transformers raises nearly every type for a config that it cannot read
        raise UnsupportedModel(f"model {model!r} cannot be read: {_first_sentence(error)}") from error


def resolve_dtype(asked: str, config: Any) -> torch.dtype:
    """`auto` is the config's own; float16, which CPUs compute slowly, becomes bfloat16."""
    if asked != "auto":
        if asked not in DTYPES:
            raise ValueError(f"dtype is {asked!r}; give one of auto, {', '.join(DTYPES)}")
        return DTYPES[asked]
    own = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None) or torch.float32
    return torch.bfloat16 if own in (torch.float16, torch.bfloat16) else torch.float32


def resolve_max_len(asked: int | None, config: Any) -> int:
    """The longest sequence to serve. Raises ValueError when more is asked for than the model's positions."""
    own = getattr(config.get_text_config(), "max_position_embeddings", None)
    if own is not None and own < 1:
        own = None  # xlnet says -1: no limit
    if own is None and asked is None:
        raise ValueError("the model's config names no max_position_embeddings; give max_model_len")
    if asked is None:
        return int(own or 0)
    if asked < 1:
        raise ValueError(f"max_model_len is {asked}; give a whole number of 1 or more")
    if own is not None and asked > own:
        raise ValueError(f"max_model_len is {asked}, but the model has {own} positions; give at most {own}")
    return asked


def check_config(config: Any) -> None:
    """Raise UnsupportedModel for features that need more than pages of K and V."""
    text = config.get_text_config()
    name = (config.architectures or [type(config).__name__])[0]
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is an encoder-decoder; only decoder-only models can be served")
    stateful = sorted({t for t in getattr(text, "layer_types", None) or [] if any(s in t for s in STATE_LAYERS)})
    if stateful:
        raise UnsupportedModel(
            f"{name} has layers of type {', '.join(stateful)}, whose state is not KV and is not kept in pages"
        )
    if getattr(text, "attn_temperature_tuning", False):
        raise UnsupportedModel(
            f"{name} tunes its attention temperature (attn_temperature_tuning) by positions that it reads "
            "from a cache object, which pages do not have"
        )


def check_ropes(config: Any, max_len: int) -> None:
    """Raise UnsupportedModel for rotary embeddings that read the whole batch."""
    text = config.get_text_config()
    name = (config.architectures or [type(config).__name__])[0]
    for rope in _rope_parameters(text):
        _check_rope(name, rope, text, max_len)


def _rope_parameters(text: Any) -> Iterator[dict[str, Any]]:
    parameters = getattr(text, "rope_parameters", None) or {}
    nested = [p for p in parameters.values() if isinstance(p, dict)]
    yield from nested or [parameters]


def _check_rope(name: str, rope: dict[str, Any], text: Any, max_len: int) -> None:
    """Ropes that change with the longest request of a forward are exact only up to the length where they change."""
    kind = rope.get("rope_type", "default")
    if not any(true_length in kind for true_length in TRUE_LENGTH_ROPES):
        return
    own = getattr(text, "max_position_embeddings", 0)
    limit = rope.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
    if kind == "longrope" and limit and max_len <= limit:
        return
    mend = f"; set max_model_len to at most {limit} to serve it" if kind == "longrope" and limit and limit < own else ""
    raise UnsupportedModel(
        f"{name} uses {kind} RoPE, whose frequencies follow the longest request of a batch, "
        f"so requests would change each other's tokens{mend}"
    )


def load_model(model: str, config: Any, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """transformers' own class with its weights on `device`, in eager attention. Raises UnsupportedModel."""
    placed = {} if device.type == "cpu" else {"device_map": {"": device}}  # straight to the GPU, file by file
    try:
        with LOADING:
            loaded, report = AutoModelForCausalLM.from_pretrained(
                model,
                config=config,
                dtype=dtype,
                attn_implementation="eager",
                experts_implementation="eager",
                output_loading_info=True,
                **placed,
            )
    except Exception as error:  # as above: OSError, ValueError, SafetensorError, KeyError, RuntimeError, ...
        raise UnsupportedModel(f"model {model!r} cannot be loaded: {_first_sentence(error)}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise UnsupportedModel(
            f"model {model!r} lacks {len(missing)} of its weights, first {missing[0]}; give a complete checkpoint"
        )
    result: PreTrainedModel = loaded.eval().requires_grad_(False)
    return result


def _first_sentence(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    head = text.split(". ")[0]
    return head if len(head) <= 300 else head[:297] + "..."


def probe_model(model: PreTrainedModel, max_len: int) -> hooks.Probe:
    """Run two tokens to learn each attention call's KV. Raises UnsupportedModel when it cannot be served so."""
    name = type(model).__name__
    hooks.install()
    for config in (model.config, model.config.get_text_config()):
        config.kvrelay_max_len = max_len
    set_attention(model, hooks.PROBE)
    probe = hooks.Probe(num_tokens=PROBE_TOKENS)
    try:
        positions = torch.arange(PROBE_TOKENS, device=model.device)
        run_packed(model, torch.zeros_like(positions), positions, None, probe)
    except UnsupportedModel:
        raise
    except Exception as error:  # any architecture may fail here in its own way; none may take the server down
        raise UnsupportedModel(f"{name} cannot run on packed tokens: {_first_sentence(error)}") from error
    expected = model.config.get_text_config().num_hidden_layers
    if not probe.layers:
        raise UnsupportedModel(f"{name} does not call transformers' attention interface, so its KV cannot be paged")
    if len(probe.layers) != expected:
        raise UnsupportedModel(
            f"{name} has {expected} layers but {len(probe.layers)} calls to the attention interface; "
            "a layer that keeps another kind of state cannot be served from pages"
        )
    if len({layer.dtype for layer in probe.layers}) != 1:
        raise UnsupportedModel(f"{name} has layers whose keys are of different dtypes; one is wanted for all pages")
    return probe


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Switch every part of the model to the attention called `name`."""
    if not model._can_set_attn_implementation():
        raise UnsupportedModel(
            f"{type(model).__name__} does not call transformers' attention interface, so its KV cannot be paged"
        )
    model.set_attn_implementation(name)


def run_packed(
    model: PreTrainedModel, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None, state: Any
) -> torch.Tensor:
    """Logits [rows, vocab] of packed tokens [T]; all rows when `rows` is None.

    The mask of ones says that nothing is padding: without it transformers looks for packed sequences by itself.
    """
    output = model(
        input_ids=token_ids[None],
        position_ids=positions[None],
        attention_mask=torch.ones(1, token_ids.shape[0], dtype=torch.long, device=token_ids.device),
        use_cache=False,
        return_dict=True,
        logits_to_keep=0 if rows is None else rows,
        kvrelay=state,
    )
    logits: torch.Tensor = output.logits[0]
    if rows is not None and logits.shape[0] != rows.shape[0]:
        logits = logits[rows]  # an architecture that ignores logits_to_keep
    return logits


def describe(model: PreTrainedModel, name: str, dtype: torch.dtype, max_len: int, num_layers: int) -> ModelInfo:
    """What the cluster needs to know; to be called before the weights are packed."""
    parameters = dict(model.named_parameters())
    text = model.config.get_text_config()
    return ModelInfo(
        name=os.path.basename(os.path.normpath(name)) if os.path.isdir(name) else name,
        architecture=type(model).__name__,
        fingerprint=_fingerprint(model, parameters),
        dtype=str(dtype).removeprefix("torch."),
        vocab_size=int(text.vocab_size),
        max_model_len=max_len,
        eos_token_ids=_eos_token_ids(model),
        num_layers=num_layers,
        num_params=sum(p.numel() for p in parameters.values()),
        weight_bytes=sum(p.numel() * p.element_size() for p in parameters.values()),
    )


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    generation = getattr(model, "generation_config", None)
    ids = generation.eos_token_id if generation is not None else None
    if ids is None:
        ids = getattr(model.config.get_text_config(), "eos_token_id", None)
    if ids is None:
        return ()
    return tuple(int(i) for i in ids) if isinstance(ids, (list, tuple)) else (int(ids),)


def _fingerprint(model: PreTrainedModel, parameters: dict[str, torch.nn.Parameter]) -> str:
    """A hash of the config and of each weight's name, shape, dtype and two ends."""
    config = {k: v for k, v in model.config.to_dict().items() if k not in VOLATILE_KEYS}
    digest = hashlib.blake2b(json.dumps(config, sort_keys=True, default=str).encode(), digest_size=16)
    for name, parameter in sorted(parameters.items()):
        raw = parameter.detach().contiguous().view(-1).view(torch.uint8)
        digest.update(f"{name}{tuple(parameter.shape)}{parameter.dtype}".encode())
        digest.update(bytes(raw[:SAMPLED_BYTES].tolist()) + bytes(raw[-SAMPLED_BYTES:].tolist()))
    return digest.hexdigest()
