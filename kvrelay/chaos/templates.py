"""Templates are the requests that a round may play, drawn from a seed; the oracle learns what each must bring."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvrelay.client.types import GenerateOptions

FIRST_ID, LAST_ID = 5, 4000  # of the demo model's vocabulary, without special tokens
SHORT, LONG = (4, 40), (60, 200)  # tokens of a prompt
OUTPUTS = (24, 120)  # tokens


@dataclass(frozen=True, slots=True)
class Template:
    prompt: list[int]
    options: GenerateOptions
    tokens: tuple[int, ...] = ()

    @property
    def is_long(self) -> bool:
        return len(self.prompt) >= LONG[0]


def draw(rng: random.Random) -> Template:
    low, high = rng.choice((SHORT, LONG, LONG))
    prompt = [rng.randrange(FIRST_ID, LAST_ID) for _ in range(rng.randrange(low, high))]
    options = GenerateOptions(
        max_tokens=rng.randrange(*OUTPUTS),
        temperature=rng.choice((0.0, 0.8, 1.1)),
        seed=rng.randrange(1 << 40),
        ignore_eos=True,
    )
    if rng.random() < 0.25:
        options["repetition_penalty"] = 1.1
    return Template(prompt, options)
