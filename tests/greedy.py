"""What transformers generates, greedily and of exactly so many tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def eager_model(directory: Path) -> Any:
    """In float32, with its own eager attention."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")


def greedy_tokens(model: Any, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """Of the prompt alone."""
    ids = torch.tensor([list(prompt)])
    whole = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
    )
    tokens: list[int] = whole[0, len(prompt) :].tolist()
    return tokens
