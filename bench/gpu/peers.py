"""transformers on the same GPU: `generate`, and its continuous batching. What it cannot run is told, not hidden."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Peer:
    """`run(prompts, new_tokens)` generates so many tokens for each and returns the seconds it took."""

    name: str
    run: Callable[[Prompts, int], float]

    def decode_s(self, prompts: Prompts, new_tokens: int) -> float:
        """Of one step: the time of 1 + N tokens less that of 1, over N."""
        self.run(prompts, 2)  # warm
        first_s = self.run(prompts, 1)
        return (self.run(prompts, 1 + new_tokens) - first_s) / new_tokens

    def prefill_s(self, prompts: Prompts) -> float:
        self.run(prompts, 1)
        return self.run(prompts, 1)


def peers(model: Any, device: torch.device) -> list[Peer]:
    return [Peer("generate", _generate(model, device)), Peer("continuous batching", _batching(model, device))]


def _timed(device: torch.device, run: Callable[[], object]) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began_s = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began_s


def _generate(model: Any, device: torch.device) -> Callable[[Prompts, int], float]:
    def run(prompts: Prompts, new_tokens: int) -> float:
        ids = torch.tensor(prompts, device=device)
        return _timed(
            device,
            lambda: model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
            ),
        )

    return run


def _batching(model: Any, device: torch.device) -> Callable[[Prompts, int], float]:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    pages = ContinuousBatchingConfig(max_batch_tokens=8192, allow_block_sharing=False)  # no prefix is reused

    def run(prompts: Prompts, new_tokens: int) -> float:
        return _timed(
            device,
            lambda: model.generate_batch(
                [list(prompt) for prompt in prompts],
                generation_config=config,
                continuous_batching_config=pages,
                persistent_manager=True,
                max_new_tokens=new_tokens,
            ),
        )

    return run
