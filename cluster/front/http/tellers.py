"""CompletionTeller words what a completion's choice has to tell, part by part: its text, and log-probabilities of it
and of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.front.http.shapes import (
    FINISH,
    CompletionChoice,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenNames,
    finite,
    stop_reason,
)
from kvrelay.v1 import generate_pb2


@dataclass(slots=True)
class CompletionTeller:
    """What one choice has told, part by part."""

    names: TokenNames
    stop_token_ids: Sequence[int] = ()
    shows_stop: bool = False
    shows_ids: bool = False
    echoed: str = ""  # before the answer
    echoes_logprobs: bool = False
    shows_prompt: bool = False
    offset: int = field(default=0, init=False)
    has_begun: bool = field(default=False, init=False)

    def choice(self, index: int, part: generate_pb2.GenerateResponse, prompt_ids: Sequence[int]) -> CompletionChoice:
        text, self.echoed = self.echoed + part.text + (part.stop_string if self.shows_stop else ""), ""
        choice: CompletionChoice = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(part, prompt_ids),
            "finish_reason": FINISH.get(part.finish_reason),
            "stop_reason": stop_reason(part, self.stop_token_ids),
        }
        if self.shows_prompt and part.prompt_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs(self.names, part)
        if part.HasField("score"):
            choice["score"] = part.score
        if self.shows_ids:
            choice["token_ids"] = list(part.token_ids)
            if not self.has_begun:
                choice["prompt_token_ids"] = list(prompt_ids)
        self.has_begun = True
        return choice

    def _logprobs(self, part: generate_pb2.GenerateResponse, prompt_ids: Sequence[int]) -> CompletionLogprobs | None:
        positions = [*part.logprobs]
        is_echo = self.echoes_logprobs and bool(part.prompt_logprobs)
        if is_echo:
            positions = [*part.prompt_logprobs, *positions]
        if not positions:
            return None
        first = [prompt_ids[0]] if is_echo else []
        tokens = [self.names.token(i) for i in (*first, *(each.chosen.token_id for each in positions))]
        offsets = []
        for token in tokens:
            offsets.append(self.offset)
            self.offset += len(token.text)
        none = [None] if is_echo else []
        return {
            "tokens": [token.name for token in tokens],
            "token_logprobs": [*none, *(finite(each.chosen.logprob) for each in positions)],
            "top_logprobs": [*none, *(_by_name(self.names, each) for each in positions)],
            "text_offset": offsets,
        }


def prompt_logprobs(names: TokenNames, part: generate_pb2.GenerateResponse) -> PromptLogprobs:
    """As vLLM words them."""
    return [None, *(_by_id(names, position) for position in part.prompt_logprobs)]


def _by_id(names: TokenNames, position: generate_pb2.PositionLogprobs) -> dict[str, PromptLogprob]:
    ranks = {top.token_id: rank for rank, top in enumerate(position.top, 1)}
    told = {token.token_id: token for token in (position.chosen, *position.top)}
    return {
        str(token_id): {
            "logprob": finite(token.logprob),
            "rank": ranks.get(token_id),
            "decoded_token": names.of(token_id),
        }
        for token_id, token in told.items()
    }


def _by_name(names: TokenNames, position: generate_pb2.PositionLogprobs) -> dict[str, float]:
    told = {names.of(top.token_id): finite(top.logprob) for top in position.top}
    return told | {names.of(position.chosen.token_id): finite(position.chosen.logprob)}
