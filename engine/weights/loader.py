"""A model as transformers loads and runs it: its weights, what it is, and a forward of packed tokens.

Every failure of transformers' from_pretrained, and of a model that is probed, leaves here as one sentence.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import xxhash
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.attention import families, hooks
from engine.attention.held import hold
from engine.attention.probe import Probe
from engine.errors import UnsupportedModel
from engine.hub import keep_as_main, name_and_commit, why_not_had
from engine.state import mixers
from engine.types import InvalidRequest, LengthRope, ModelInfo, SamplingParams
from engine.weights import experts, int8, quantised, ropes, unread
from engine.weights.config import ServedConfig, check_beside, first_sentence
from engine.weights.files import folder_of, held_twice, why_unreadable
from engine.weights.fp8_blocks import whole_blocks
from engine.weights.mixed_schemes import each_by_its_own
from engine.weights.stage import PassLeaves

logger = logging.getLogger(__name__)

LOADING = threading.Lock()  # transformers patches its own classes while it loads: two at once leave them patched
READ_OTHERWISE = {"fp8": whole_blocks, "compressed-tensors": each_by_its_own}  # than transformers does
NOT_RUN = "a .bin has more than tensors, which may be code and is not run, or is damaged; give one in safetensors"
PROBE_TOKENS = 2
USUAL_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # vLLM's, too
PASSED_OVER = (  # by vLLM, too; others that change what `generate` answers
    *("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias", "no_repeat_ngram_size"),
    *("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty", "min_length", "min_new_tokens"),
    *("stop_strings", "num_beams", "penalty_alpha", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h"),
    *("guidance_scale", "watermarking_config"),
)
VOLATILE_KEYS = (
    "_name_or_path",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "attn_implementation",
    "kvrelay_max_len",
)


def load_model(model: str, config: Any, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """transformers' own class with its weights on `device`, in eager attention; those of a quantised checkpoint in the
    full width of `dtype`. Raises UnsupportedModel."""
    quantised.check(model, config)
    if device.type == "cpu":
        placed: dict[str, Any] = {"experts_implementation": experts.EAGER}
    else:  # straight to the GPU, file by file, and experts as transformers chooses
        placed = {"device_map": {"": device}}
    method = quantised.method_of(config)
    name, commit = name_and_commit(model)
    try:
        with LOADING, READ_OTHERWISE.get(method or "", nullcontext)():
            loaded, report = AutoModelForCausalLM.from_pretrained(
                name,
                revision=commit,
                config=config,
                dtype=dtype,
                attn_implementation="eager",
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # which are refused below, by name
                **placed,
            )
    except Exception as error:  # as above: OSError, ValueError, SafetensorError, KeyError, RuntimeError, ...
        found = why_not_had(model, error) or quantised.why_not_converted(config, error)
        found = found or why_unreadable(folder_of(model))
        why = found or (NOT_RUN if isinstance(error, pickle.UnpicklingError) else first_sentence(error))
        raise UnsupportedModel(f"model {model!r} cannot be loaded: {why}") from error
    keep_as_main(model)
    check_beside(model)
    if twice := held_twice(folder_of(model)):
        raise UnsupportedModel(f"model {model!r} has {twice}; give each weight in one file, that which its index names")
    quantised.check_read(model, loaded, report["unexpected_keys"], method)
    if mismatched := sorted(report["mismatched_keys"]):
        weight, held, wanted = mismatched[0]
        raise UnsupportedModel(
            f"model {model!r} has {len(mismatched)} of its weights in another shape than config.json says, "
            f"first {weight}: {tuple(held)} for {tuple(wanted)}; give both of one model"
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise UnsupportedModel(
            f"model {model!r} lacks {len(missing)} of its weights, first {missing[0]}; give a complete checkpoint"
        )
    unread.check(model, loaded, report["unexpected_keys"], method)
    quantised.widen(loaded, dtype)
    result: PreTrainedModel = loaded.eval().requires_grad_(False)
    mixers.adopt(result)
    return result


def probe_model(model: PreTrainedModel, max_len: int) -> Probe:
    """Run two tokens to learn each attention call's KV, and what layers keep beside it. Raises UnsupportedModel when it
    cannot be served so."""
    name = type(model).__name__
    hooks.install()
    for config in (model.config, model.config.get_text_config()):
        config.kvrelay_max_len = max_len
    set_attention(model, hooks.PROBE)
    with _refused_if_it_fails(name):
        probe = run_probe(model)
    expected = model.config.get_text_config().num_hidden_layers
    if not probe.layers:
        raise UnsupportedModel(f"{name} does not call transformers' attention interface, so its KV cannot be paged")
    if len(probe.layers) != expected and not probe.has_states:  # among those that have some, others may have neither
        raise UnsupportedModel(
            f"{name} has {expected} layers but {len(probe.layers)} calls to the attention interface; "
            "a layer that keeps another kind of state cannot be served from pages"
        )
    if len({layer.dtype for layer in probe.attentions}) > 1:
        raise UnsupportedModel(f"{name} has layers whose keys are of different dtypes; one is wanted for all pages")
    return probe


def probe_cut(model: PreTrainedModel, whole: Probe, layers: range) -> Probe:
    """What a pass through these layers shows, which are all that is left of the model, and of the others what `whole`
    does. Raises UnsupportedModel."""
    set_attention(model, hooks.PROBE)
    probe = Probe(num_tokens=PROBE_TOKENS, layers=whole.layers[: layers.start])
    with suppress(PassLeaves), _refused_if_it_fails(type(model).__name__):
        _run_tokens(model, probe)
    probe.layers += whole.layers[layers.stop :]
    return probe


@contextmanager
def _refused_if_it_fails(name: str) -> Iterator[None]:
    """Any architecture may fail in its own way where it is probed; none may take the server down."""
    try:
        yield
    except (UnsupportedModel, PassLeaves):
        raise
    except Exception as error:
        raise UnsupportedModel(f"{name} cannot run on packed tokens: {first_sentence(error)}") from error


def load_probed(model: str, served: ServedConfig) -> tuple[PreTrainedModel, Probe]:
    """Mapped from its files on the host, and looked at: of what one of several processes keeps its part. Raises
    UnsupportedModel."""
    module = load_model(model, served.config, served.dtype, torch.device("cpu"))
    ropes.adopt(module, served.rope)
    return module, probe_model(module, served.max_len)


def run_probe(model: PreTrainedModel) -> Probe:
    """What a pass of a few tokens shows, in the attention that probes."""
    probe = Probe(num_tokens=PROBE_TOKENS)
    _run_tokens(model, probe)
    return probe


def _run_tokens(model: PreTrainedModel, probe: Probe) -> None:
    positions = torch.arange(probe.num_tokens, device=model.device)
    run_packed(model, torch.zeros_like(positions), positions, positions[-1:], probe)


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Switch every part of the model to the attention called `name`."""
    if name in (hooks.PROBE, hooks.SERVE) and families.adopt(model):
        if not families.wants_masks(model):
            for config in (model.config, model.config.get_text_config()):
                config._attn_implementation = name  # so that none are made
        return
    if not model._can_set_attn_implementation():
        if model.config._attn_implementation == name:
            return  # as it was loaded
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
    arguments = {
        "position_ids": positions[None],
        "attention_mask": torch.ones(1, token_ids.shape[0], dtype=torch.long, device=token_ids.device),
        "logits_to_keep": 0 if rows is None else rows,
        "kvrelay": state,
    }
    known = _keywords(type(model).forward)
    held = hold(model)
    held.state = state
    try:
        output = model(
            input_ids=token_ids[None],
            use_cache=False,
            return_dict=True,
            **{name: value for name, value in arguments.items() if known is None or name in known},
        )
    finally:
        held.state = None
    logits: torch.Tensor = output.logits[0]
    if rows is not None and logits.shape[0] != rows.shape[0]:
        logits = logits[rows]  # an architecture that ignores logits_to_keep
    return logits


@cache
def _keywords(forward: Callable[..., Any]) -> frozenset[str] | None:
    """That it takes; None: any."""
    parameters = inspect.signature(forward).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return frozenset(parameters)


def describe(
    model: PreTrainedModel,
    name: str,
    dtype: torch.dtype,
    max_len: int,
    num_layers: int,
    rope: LengthRope | None = None,
    *,
    has_usual_sampling: bool = True,
) -> ModelInfo:
    """What the cluster needs to know; to be called before the weights are packed."""
    parameters = dict(model.named_parameters())
    text = model.config.get_text_config()
    return ModelInfo(
        name=os.path.basename(os.path.normpath(name)) if os.path.isdir(name) else name_and_commit(name)[0],
        architecture=type(model).__name__,
        fingerprint=_fingerprint(model),
        dtype=str(dtype).removeprefix("torch."),
        vocab_size=int(text.vocab_size),
        max_model_len=max_len,
        eos_token_ids=_eos_token_ids(model, int(text.vocab_size)),
        num_layers=num_layers,
        num_params=sum(p.numel() for p in parameters.values()),
        weight_bytes=sum(p.numel() * p.element_size() for p in parameters.values()) - int8.saved_bytes(model),
        rope=rope,
        usual_sampling=_usual_sampling(model, int(text.vocab_size)) if has_usual_sampling else {},
    )


def _usual_sampling(model: PreTrainedModel, vocab_size: int) -> dict[str, float]:
    """What its generation_config.json says of how to draw, where that can be done."""
    generation = getattr(model, "generation_config", None)
    given = {} if generation is None else generation.to_diff_dict()
    usual: dict[str, Any] = {}
    for key in USUAL_SAMPLING:
        value = given.get(key)
        if value is None or (key == "top_k" and value == -1):  # vLLM's word for off
            continue
        try:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{key} is {value!r}")
            usual[key] = min(int(value), vocab_size) if key == "top_k" else float(value)
            replace(SamplingParams(), **{key: usual[key]}).validate(vocab_size)
        except (InvalidRequest, TypeError, ValueError, OverflowError) as error:
            usual.pop(key, None)
            logger.warning("the model's generation_config.json is not gone by: %s", error)
    if passed_over := [key for key in PASSED_OVER if given.get(key) not in (None, 0, 1, [])]:  # which are off
        logger.warning(
            "the model's generation_config.json has %s, which transformers' generate goes by, and requests here do not",
            ", ".join(passed_over),
        )
    return usual


def _eos_token_ids(model: PreTrainedModel, vocab_size: int) -> tuple[int, ...]:
    """Without those that it cannot draw: of -1, or of a tokenizer with more."""
    generation = getattr(model, "generation_config", None)
    ids = generation.eos_token_id if generation is not None else None
    if ids is None:
        ids = getattr(model.config.get_text_config(), "eos_token_id", None)
    if ids is None:
        return ()
    ids = tuple(ids) if isinstance(ids, (list, tuple)) else (ids,)
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise UnsupportedModel(f"eos_token_id of the model is {ids!r:.80}; give a token id, or a list of them")
    if strange := [i for i in ids if not 0 <= i < vocab_size]:
        logger.warning("eos_token_id of the model has %s, and its ids end at %d: left out", strange, vocab_size - 1)
    return tuple(i for i in ids if 0 <= i < vocab_size)


def _fingerprint(model: PreTrainedModel) -> str:
    """A hash of the config and of the name, shape, dtype and bytes of each weight and of each buffer that a checkpoint
    holds, such as a router's bias."""
    kept = model.state_dict()  # references only; a tied weight is there under each of its names
    weights = dict(model.named_parameters()) | {name: b for name, b in model.named_buffers() if name in kept}
    config = {k: v for k, v in model.config.to_dict().items() if k not in VOLATILE_KEYS}
    digest = hashlib.blake2b(json.dumps(config, sort_keys=True, default=str).encode(), digest_size=16)
    for name, weight in sorted(weights.items()):
        raw = weight.detach().contiguous().view(-1).view(torch.uint8)
        digest.update(f"{name}{tuple(weight.shape)}{weight.dtype}".encode())
        digest.update(xxhash.xxh3_128_digest(raw.cpu().numpy().data))
    return digest.hexdigest()
