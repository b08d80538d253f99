"""Which of transformers' decoders are served token for token, which are refused and why.

    python -m bench.families [NAMES...]

Every model type that transformers has a causal language model for is made small (a few layers, random weights), saved
and loaded with the real loading code. Greedy tokens of five prompts through packed, chunked, paged steps in random
order are compared with transformers' own `generate`. A model is *exact*, *wrong* (it was served, with other tokens),
*refused* (with our sentence), or *not made* (transformers cannot build, save or run it so small here, it is no decoder,
or its own forward and its own `generate` disagree). Exit code 1 when one is wrong. Writes bench/results/families.json.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.progress import track
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from bench.common import about, save
from engine.errors import UnsupportedModel
from engine.process import set_environment
from kvrelay.demo_model import EOS_ID
from tests import zoo
from tests.engine.test_zoo import generated, load, random_prompts, served
from tests.greedy import eager_model

LAYERS = 3
MOST_PARAMS = 20_000_000
SMALL: Mapping[str, Any] = {
    **zoo.SHAPE,
    **zoo.MOE,
    **dict.fromkeys(("n_layer", "n_layers", "num_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("n_head", "n_heads", "num_heads", "attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("n_embd", "d_model", "embedding_size", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("ffn_dim", "n_inner", "d_ff", "ffn_hidden_size", "decoder_ffn_dim", "intermediate_size_mlp"), 128),
    **dict.fromkeys(("n_positions", "max_seq_len", "seq_length"), zoo.MAX_POSITIONS),
    **dict.fromkeys(("num_kv_heads", "moe_topk", "moe_k", "num_shared_experts", "n_shared_experts"), 2),
    **dict.fromkeys(("num_local_experts", "n_routed_experts", "moe_num_experts", "n_group"), 4),
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_nope_head_dim", "kv_channels", "attention_head_dim"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "moe_intermediate_size", "expert_dim"), 32),
    "shared_expert_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "qk_rope_head_dim": 8,
    "rotary_dim": 8,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "sliding_window": zoo.WINDOW,
    "window_size": zoo.WINDOW,
    "attention_window_size": zoo.WINDOW,
    "lru_width": 64,
    "pad_token_id": EOS_ID,
}
ALIKE: Mapping[str, Any] = {"num_key_value_heads": 4}  # latent attention has as many as query heads
UNGROUPED: Mapping[str, Any] = {"n_group": 1, "topk_group": 1}
VARIANTS: Sequence[Mapping[str, Any]] = (  # tried one after another, where SMALL is no model of the kind
    {},
    ALIKE,
    UNGROUPED,
    {**ALIKE, **UNGROUPED},
    {**ALIKE, **UNGROUPED, "head_dim": 8},
    {**ALIKE, **UNGROUPED, "num_experts_per_tok": 1},
    {**ALIKE, "num_experts": 8, "n_routed_experts": 8, "n_group": 2, "topk_group": 1},
    {"hidden_size_per_layer_input": 0},
)
WHOLE: Mapping[str, str] = {zoo_config().model_type: name for name, zoo_config in reversed(zoo.ZOO.items())}


def config_of(kind: str, variant: Mapping[str, Any]) -> Any:
    """As tests/zoo.py has it, or by SMALL, and the variant, what the class knows of it."""
    if kind in WHOLE:
        return zoo.ZOO[WHOLE[kind]]()
    text = CONFIG_MAPPING[kind]().get_text_config()
    known = {*text.to_dict(), *getattr(type(text), "attribute_map", {})}
    changes = {name: value for name, value in {**SMALL, **variant}.items() if name in known}
    changes = {name: value for name, value in changes.items() if _can_set(type(text), name)}
    if (layer_types := getattr(text, "layer_types", None)) is not None and _can_set(type(text), "layer_types"):
        changes["layer_types"] = list(dict.fromkeys(layer_types))[:LAYERS]
        changes["layer_types"] += [layer_types[-1]] * (LAYERS - len(changes["layer_types"]))
    return type(text)(**changes)


def _can_set(config_class: type, name: str) -> bool:
    computed = getattr(config_class, name, None)
    return not isinstance(computed, property) or computed.fset is not None


def made(kind: str, folder: Path) -> list[list[int]]:
    """Save one; what transformers generates. Raises whatever transformers does with the first variant."""
    first: Exception | None = None
    for variant in VARIANTS:
        try:
            _make(kind, variant, folder)
            outputs = generated(folder, random_prompts())
            _check_forward(folder, outputs)
            return outputs
        except Exception as error:  # each model's own code fails in its own way
            first = first or error
    assert first is not None
    raise first


def _check_forward(folder: Path, outputs: Sequence[Sequence[int]]) -> None:
    """That the model says the same in one forward as with a cache: else there is nothing to be equal to."""
    model = eager_model(folder)
    for prompt, output in zip(random_prompts(), outputs, strict=True):
        ids = torch.tensor([[*prompt, *output[:-1]]])
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
        logits[:, EOS_ID] = float("-inf")
        if logits[len(prompt) - 1 :].argmax(-1).tolist() != list(output):
            raise ValueError("its own forward and its own generate disagree")


def _make(kind: str, variant: Mapping[str, Any], folder: Path) -> None:
    config = config_of(kind, variant)
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError("it is an encoder-decoder")
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    model_class = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])
    with torch.device("meta"):
        count = model_class(config).num_parameters()
    if count > MOST_PARAMS:
        raise ValueError(f"it has {count / 1e6:.0f}M parameters when made small")
    torch.manual_seed(0)
    zoo.save_spread(model_class(config), folder)


def verdict_of(kind: str, folder: Path) -> tuple[str, str]:
    """exact, wrong, refused or not made; and why."""
    try:
        wanted = made(kind, folder)
    except Exception as error:  # each model's own code fails in its own way
        return "not made", _sentence(error)
    try:
        tokens = served(load(folder), random_prompts())
    except (UnsupportedModel, ValueError) as error:
        return "refused", _sentence(error)
    except Exception as error:  # a defect of ours: it was loaded, and could not be run
        return "wrong", f"{type(error).__name__}: {_sentence(error)}"
    return ("exact", "") if tokens == wanted else ("wrong", "other tokens than transformers' generate")


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split())[:240] or type(error).__name__


def sweep(kinds: Sequence[str]) -> list[dict[str, str]]:
    rows = []
    for kind in track(kinds, description="model types", console=_console()):
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
            verdict, why = verdict_of(kind, Path(folder))
        rows.append({"model_type": kind, "class": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind], "is": verdict, "why": why})
    return rows


def _console() -> Any:
    from rich.console import Console

    return Console(stderr=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.families", description=__doc__.split("\n", 1)[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="model types; all when none is given; writes no file")
    args = parser.parse_args()
    set_environment(1)
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rows = sweep(args.names or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    for row in rows:
        if args.names or row["is"] == "wrong":
            print(row)
    counts = Counter(row["is"] for row in rows)
    print(dict(counts))
    if not args.names:
        result = about() | {"transformers": transformers.__version__, "counts": dict(counts), "models": rows}
        print(f"written to {save('families', result)}")
    sys.exit(1 if counts["wrong"] else 0)


if __name__ == "__main__":
    main()
