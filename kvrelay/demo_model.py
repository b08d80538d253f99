"""make_demo_model writes a Llama-style model with random weights and a real tokenizer as a Hugging Face directory.

For demos, tests and benchmarks where nothing can be downloaded. The weights say nothing sensible; their spread is
wide enough that greedy output wanders instead of repeating one token. The same recipe gives the same files on one
version of Python and of the libraries: weights from a seeded generator, the tokenizer a byte-level BPE trained on
text that ships with Python (its help topics and its library's source).

A directory is written whole or not at all, and one that already holds the same recipe is used as it is.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Size = Literal["tiny", "125m"]

RECIPE_FILE = "kvrelay_recipe.json"
RECIPE_VERSION = 1  # raise it when the same recipe would give other files
DTYPES = ("float32", "bfloat16", "float16")
MAX_POSITIONS = 8192
BOS, EOS = "<s>", "</s>"
ROLES = ("system", "user", "assistant")
BOS_ID, EOS_ID = 0, 1

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] | trim }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {  # 5.0 million parameters
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "125m": {  # 124.7 million parameters
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    },
}


class DemoModelError(ValueError):
    """What was asked for cannot be made: one sentence naming the key, the value and the mend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recipe:
    size: str
    seed: int
    dtype: str
    version: int = RECIPE_VERSION


def make_demo_model(directory: str | Path, *, size: Size = "tiny", seed: int = 0, dtype: str = "bfloat16") -> Path:
    """Write the model, or find it already there, and return its directory.

    Raises DemoModelError for an unknown size or dtype, and for a directory that holds anything else.
    """
    recipe = _Recipe(size=size, seed=seed, dtype=dtype)
    _check(recipe)
    target = Path(directory).expanduser().absolute()
    if _holds(target, recipe):
        return target
    _check_replaceable(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        made.chmod(0o755)
        _write(made, recipe)
        _move_into_place(made, target, recipe)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return target


def _check(recipe: _Recipe) -> None:
    if recipe.size not in SHAPES:
        raise DemoModelError(f"size is {recipe.size!r}; give one of {', '.join(SHAPES)}")
    if recipe.dtype not in DTYPES:
        raise DemoModelError(f"dtype is {recipe.dtype!r}; give one of {', '.join(DTYPES)}")


def _holds(target: Path, recipe: _Recipe) -> bool:
    try:
        return bool(json.loads((target / RECIPE_FILE).read_text()) == asdict(recipe))
    except (OSError, ValueError):
        return False


def _check_replaceable(target: Path) -> None:
    """An older demo model may be replaced; anything else is somebody's."""
    if not target.exists():
        return
    if not target.is_dir():
        raise DemoModelError(f"{target} is a file; name a directory for the model")
    if any(target.iterdir()) and not (target / RECIPE_FILE).exists():
        raise DemoModelError(f"{target} holds files that are no demo model; name another directory or empty this one")


def _move_into_place(made: Path, target: Path, recipe: _Recipe) -> None:
    """A rename is the moment the model exists. Another process may have been first: then its files stay."""
    old = made.with_name(f"{made.name}.old")
    try:
        if target.exists():
            target.rename(old)
        made.rename(target)
    except OSError:
        if not _holds(target, recipe):
            raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _write(directory: Path, recipe: _Recipe) -> None:
    shape = SHAPES[recipe.size]
    train_tokenizer(shape["vocab_size"]).save_pretrained(directory)
    config = LlamaConfig(
        **shape,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        architectures=["LlamaForCausalLM"],
        dtype=recipe.dtype,
    )
    config.save_pretrained(directory)
    GenerationConfig(bos_token_id=BOS_ID, eos_token_id=EOS_ID).save_pretrained(directory)
    model = _random_llama(config, recipe.seed).to(getattr(torch, recipe.dtype))
    save_file(model.state_dict(), directory / "model.safetensors", metadata={"format": "pt"})
    (directory / RECIPE_FILE).write_text(json.dumps(asdict(recipe), indent=1) + "\n")


def _random_llama(config: LlamaConfig, seed: int) -> LlamaForCausalLM:
    """Weights drawn in the order of their names, so that they do not depend on how the library initialises."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.ndim == 1:
                weight.fill_(1.0)
            else:
                weight.normal_(0.0, _spread(name, weight), generator=generator)
    return model.eval()


def _spread(name: str, weight: torch.Tensor) -> float:
    """Standard deviation: linears that keep the size of their input (queries and keys larger, so that attention
    looks at few tokens and the output depends on the context), embeddings of size 1."""
    if "embed_tokens" in name:
        return 1.0
    gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
    return gain / math.sqrt(weight.shape[1])


def train_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE with `vocab_size` entries: it encodes any text, puts BOS first, and has a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, *(f"<|{role}|>" for role in ROLES)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        additional_special_tokens=[f"<|{role}|>" for role in ROLES],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )


def _texts() -> Iterator[str]:
    for name in sorted(topics):
        yield topics[name]
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        yield path.read_text(encoding="utf-8", errors="replace")
