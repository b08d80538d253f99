"""What transformers generates, greedily and of exactly so many tokens."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def eager_model(directory: Path) -> Any:
    """In float32, with its own eager attention."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")


def greedy_tokens(model: Any, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """Of the prompt alone, by a model that has seen no other: dynamic RoPE goes by the longest so far.

    Phi reads all anew once its other frequencies begin. From its cache transformers 5.17 does that wrongly:
    it reads the last token alone. Without a cache every version does what 5.23 does with it."""
    ids = torch.tensor([list(prompt)])
    whole = copy.deepcopy(model).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        use_cache=model.config.model_type != "phi3",
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
    )
    tokens: list[int] = whole[0, len(prompt) :].tolist()
    return tokens
