"""HeldRequest is what a worker of any role knows of a request that it was given. Each role adds what is its own."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.kept import KeptPages
from engine.pages.pool import PageHash, chain_root, pages_for
from engine.types import (
    Adapter,
    InvalidRequest,
    LengthRope,
    ModelInfo,
    NextTokens,
    SampleSpec,
    SamplingParams,
    banned_token_ids,
    read_before_search,
)
from kv_transfer.lease import MOVE_ROOM_TOKENS
from kvrelay.v1 import worker_pb2 as pb
from kvrelay.v1.generate_pb2 import KvPolicy
from worker.convert import sampling_from_proto
from worker.tracing import RequestTrace

if TYPE_CHECKING:  # torch and llguidance come with them
    from engine.adapters.weights import AdapterWeights
    from engine.engine import Engine
    from engine.sampling.structured import Constraint


LEAST_WINDOW = 2  # tokens: so that one that is handed over holds a page


@dataclass(slots=True, kw_only=True)
class HeldRequest:
    state: pb.RequestState
    params: SamplingParams
    tokens: list[int]  # prompt and output so far
    trace: RequestTrace = field(default_factory=RequestTrace)
    constraint: Constraint | None = None  # made with the first token that it is for
    id: str = field(init=False)  # asked for at every step: a message is slow to say so
    prompt_len: int = field(init=False)
    rope: LengthRope | None = None  # of the model
    rope_len: int = field(init=False)  # as in Chunk
    adapter: Adapter | None = field(init=False)
    weights: Future[AdapterWeights] | None = None  # of its adapter, which are in memory for as long as this is held
    kept: KeptPages | None = None  # None: all, or not known yet

    def __post_init__(self) -> None:
        self.id, self.prompt_len = self.state.request_id, len(self.state.prompt_ids)
        self.adapter = adapter_of(self.state)
        self.rope_len = 0 if self.rope is None else _rope_len(self.state, self.rope)

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def new_tokens_left(self) -> int:
        """That are drawn before it ends, or has its KV computed anew."""
        if self.params.beam_search is not None:
            return self.params.max_tokens + 1  # the prompt's last token is handed over as the first one is elsewhere
        left = self.params.max_tokens - self.num_outputs
        if self.rope is None or not self.rope.is_anew or self.rope_len > self.rope.limit:
            return left
        return min(left, self.rope.limit + 1 - len(self.tokens))

    def must_begin_anew(self, num_tokens: int) -> bool:
        """With so many tokens its KV is turned for too short a sequence: the router sends it again."""
        return self.rope is not None and self.rope.is_anew and self.rope_len <= self.rope.limit < num_tokens

    @property
    def num_beams(self) -> int:
        """0: it is no beam search."""
        return 0 if self.params.beam_search is None else self.params.beam_search.num_beams

    @property
    def num_read_twice(self) -> int:
        """Tokens that are read before its beam search, and computed again by it: a prompt's only one."""
        return int(self.num_beams > 0 and self.prompt_len == 1)

    def sample_spec(self, position: int, engine: Engine, guesses: Sequence[int] = ()) -> SampleSpec:
        """For the token at `position`, counted from the prompt's first. Penalties see the tokens before it, also those
        that are guessed to follow all that are known."""
        if self.params.beam_search is not None:
            return SampleSpec(params=SamplingParams(temperature=0.0), position=position)  # which nobody reads
        eos_token_ids = engine.info.eos_token_ids
        output_ids: Sequence[int] = self.tokens[self.prompt_len :] if self.params.reads_output else ()
        if guesses and self.params.reads_output:
            output_ids = [*output_ids, *guesses]
        return SampleSpec(
            params=self.params,
            position=position,
            prompt_ids=self.state.prompt_ids if self.params.has_penalties else (),
            output_ids=output_ids,
            banned_ids=banned_token_ids(self.params, output_ids, position - self.prompt_len, eos_token_ids),
            form=self._form(output_ids, len(guesses), engine) if self.params.grammar else None,
        )

    def _form(self, output_ids: Sequence[int], num_guesses: int, engine: Engine) -> NextTokens:
        if self.constraint is None:
            self.constraint = engine.structured.constraint(self.params.grammar)
        return self.constraint.after(output_ids, num_guesses)

    def score_specs(self, start: int, end: int) -> list[SampleSpec]:
        """For the prompt's tokens that follow those at [start, end), where their log-probabilities are wanted."""
        if self.params.prompt_logprobs is None:
            return []
        params = SamplingParams(temperature=0.0, logprobs=self.params.prompt_logprobs)
        following = range(start + 1, min(end + 1, self.prompt_len))
        return [SampleSpec(params=params, position=at, given_id=self.tokens[at]) for at in following]


def kept_of(state: pb.RequestState, page_size: int) -> KeptPages | None:
    """What it keeps; None: all, or that is not known before its first token is."""
    policy = state.kv_policy
    if not policy.window_tokens or (policy.heavy_tokens and not state.output_ids and not state.heavy_pages):
        return None
    prompt_len = len(state.prompt_ids)
    sinks = range(pages_for(min(policy.sink_tokens, prompt_len), page_size))
    pages = tuple(sorted({*sinks, *state.heavy_pages}))
    window = max(LEAST_WINDOW, policy.window_tokens)
    return KeptPages(pages=pages, window=window, prompt_len=prompt_len, page_size=page_size)


def most_kept_pages(policy: KvPolicy, page_size: int) -> int:
    """That are held behind the prompt at most: none goes while a request moves."""
    counts = (policy.sink_tokens, policy.heavy_tokens, policy.window_tokens, MOVE_ROOM_TOKENS)
    return sum(pages_for(count, page_size) for count in counts) + 1


def adapter_of(state: pb.RequestState) -> Adapter | None:
    if not state.HasField("adapter"):
        return None
    return Adapter(name=state.adapter.name, path=state.adapter.path, digest=state.adapter.digest)


def root_of(state: pb.RequestState, rope: LengthRope | None) -> PageHash:
    """Of the chain of its pages' hashes. `rope`: the model's."""
    salt = "" if rope is None else rope.salt(_rope_len(state, rope))
    return chain_root(state.cache_salt, state.adapter.digest, salt)


def _rope_len(state: pb.RequestState, rope: LengthRope) -> int:
    return rope.length(len(state.prompt_ids), len(state.prompt_ids) + len(state.output_ids))


def read_request(state: pb.RequestState, model: ModelInfo) -> tuple[SamplingParams, list[int]]:
    """How to sample, and the tokens so far; of a beam search those that are read before it. Raises InvalidRequest for
    what the model cannot compute.

    The front has checked it before; but on a GPU one id without a row in the embedding ends the whole process.
    """
    params = sampling_from_proto(state.sampling)
    params.validate(model.vocab_size)
    tokens = [*state.prompt_ids, *state.output_ids]
    if not state.prompt_ids:
        raise InvalidRequest("prompt_ids is empty; give a token or more")
    if (largest := max(tokens)) >= model.vocab_size:
        raise InvalidRequest(f"its tokens have id {largest}; the model's go from 0 to {model.vocab_size - 1}")
    if len(state.output_ids) >= params.max_tokens:
        raise InvalidRequest(f"output_ids has {len(state.output_ids)} tokens; max_tokens is {params.max_tokens}")
    if (length := len(state.prompt_ids) + params.max_tokens) > model.max_model_len:
        raise InvalidRequest(f"prompt and max_tokens are {length} tokens; the model takes {model.max_model_len}")
    rope, prompt_len = model.rope, len(state.prompt_ids)
    if params.beam_search is not None and rope is not None and rope.is_anew and prompt_len <= rope.limit < length:
        why = f"prompt and max_tokens of a beam search are {length} tokens, and {model.architecture} begins anew"
        raise InvalidRequest(f"{why} where it has more than {rope.limit}; give max_tokens of {rope.limit - prompt_len}")
    if params.beam_search is not None:
        tokens = tokens[: read_before_search(len(state.prompt_ids))]
    return params, tokens
