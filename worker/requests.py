"""HeldRequest is what a worker of any role knows of a request that it was given. Each role adds what is its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.types import SampleSpec, SamplingParams, banned_token_ids
from kvrelay.v1 import worker_pb2 as pb


@dataclass(slots=True, kw_only=True)
class HeldRequest:
    state: pb.RequestState
    params: SamplingParams
    tokens: list[int]  # prompt and output so far

    @property
    def id(self) -> str:
        return self.state.request_id

    @property
    def prompt_len(self) -> int:
        return len(self.state.prompt_ids)

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def new_tokens_left(self) -> int:
        return self.params.max_tokens - self.num_outputs

    def sample_spec(self, position: int, eos_token_ids: Sequence[int]) -> SampleSpec:
        """For the token at `position`, counted from the prompt's first. Penalties see the tokens before it."""
        has_penalties = self.params.has_penalties
        return SampleSpec(
            params=self.params,
            position=position,
            prompt_ids=self.state.prompt_ids if has_penalties else (),
            output_ids=self.tokens[self.prompt_len :] if has_penalties else (),
            banned_ids=banned_token_ids(self.params, position - self.prompt_len, eos_token_ids),
        )
