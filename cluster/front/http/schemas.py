"""What clients send over HTTP: OpenAI's requests with the fields that vLLM adds, checked as far as their form goes.

Each becomes GenerateRequests (cluster/front/requests.py checks the values). A field that would change the answer and
cannot be served is refused in a sentence; one that is not known is passed over, as vLLM does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from cluster.front.requests import AS_MANY_AS_FIT, MAX_ID_CHARS
from engine.kept import POLICY_KEYS
from engine.types import MAX_LOGPROBS, MAX_N, InvalidRequest, SamplingParams
from kvrelay.v1 import generate_pb2
from worker.convert import EARLY_STOPPING_TO_PROTO

Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
TokenIds = Annotated[
    list[Annotated[int, Field(ge=0, lt=2**32)]], Field(fail_fast=True)
]  # one error is told, not a million
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
MAX_MESSAGES = 8192
MAX_PROMPTS = 128  # in one request
MAX_CHOICES = 896  # of all its prompts: what one token may have waiting in an idle router, by default
UNSERVED: Mapping[str, tuple[Any, ...]] = {  # and what may stand there
    "audio": (None,),
    "bad_token_ids": (None, []),
    "beam_search": (None,),
    "chat_template": (None,),
    "echo": (None, False),  # a chat's
    "function_call": (None, "none"),
    "functions": (None, []),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "kv_policy": (None,),
    "logits_processors": (None, []),
    "modalities": (None, ["text"]),
    "prompt_embeds": (None,),
    "prompt_logprobs": (None,),
    "structured": (None,),
    "suffix": (None, ""),
    "thinking_token_budget": (None,),
    "truncate_prompt_tokens": (None,),
}
NAMED_HERE: Mapping[str, str] = {  # what gRPC, older versions of vLLM and OpenAI's first tools call otherwise
    "bad_token_ids": "bad_words",
    "beam_search": "use_beam_search",
    "function_call": "tool_choice",
    "functions": "tools",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "kv_policy": "kv_window_tokens",
    "structured": "structured_outputs",
}


class StreamOptions(BaseModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(BaseModel):
    """OpenAI's: `strict` or not, the schema is kept."""

    model_config = ConfigDict(extra="allow")

    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")


class ResponseFormat(BaseModel):
    """OpenAI's."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(BaseModel):
    """vLLM's: one of these."""

    model_config = ConfigDict(extra="forbid")

    json_: dict[str, Any] | str | bool | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Sampled(BaseModel):
    """What completions and chats have in common."""

    model_config = ConfigDict(extra="allow")
    usual_max_tokens: ClassVar[int] = SamplingParams().max_tokens
    adds_special_tokens: ClassVar[bool] = True  # to a prompt

    model: str | None = None
    max_tokens: Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    top_n_sigma: float | None = None
    typical_p: float | None = None
    seed: Int64 | None = None
    n: Int32 | None = None
    use_beam_search: bool | None = False
    length_penalty: float | None = None  # these two are a beam search's
    early_stopping: bool | Literal["never"] | None = None
    best_of: Int32 | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[Int32], Field(fail_fast=True)] | None = None
    include_stop_str_in_output: bool = False
    min_tokens: Int32 | None = None
    ignore_eos: bool = False
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[Int32, float] | None = None
    allowed_token_ids: Annotated[list[Int32], Field(fail_fast=True)] | None = None
    bad_words: Annotated[list[str], Field(fail_fast=True)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    skip_special_tokens: bool = True
    add_special_tokens: bool | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    request_id: str = ""
    cache_salt: str | None = None
    adapter: str | None = None
    priority: Int32 = 0
    kv_window_tokens: Int32 | None = None
    kv_sink_tokens: Int32 | None = None
    kv_heavy_tokens: Int32 | None = None
    slo_ttft_ms: float = 0.0
    slo_tpot_ms: float = 0.0

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def shows_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def always_shows_usage(self) -> bool:
        return self.shows_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def stop_strings(self) -> Sequence[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or ()

    @property
    def num_logprobs(self) -> int | None:
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        return None

    def check_served(self) -> None:
        """Raises InvalidRequest for a field that would change the answer and cannot be served."""
        for key, value in (self.model_extra or {}).items():
            if key in UNSERVED and value not in UNSERVED[key]:
                named = NAMED_HERE.get(key)
                mend = f"give {named} instead" if named else "this server does not do that, so leave it out"
                raise InvalidRequest(f"{key} is {str(value)[:80]}; {mend}")
        if not 1 <= self.num_choices <= MAX_N:
            raise InvalidRequest(f"n is {self.num_choices}; give a whole number of 1 to {MAX_N}")
        if self.best_of is not None and self.best_of != self.num_choices:
            raise InvalidRequest(f"best_of is {self.best_of}; this server returns all that it draws, so give n alone")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is given without stream; give both or neither")
        if self.add_special_tokens not in (None, self.adds_special_tokens):
            raise InvalidRequest(f"add_special_tokens is {self.add_special_tokens}; leave it out here")

    def to_proto(self, request_id: str) -> generate_pb2.GenerateRequest:
        """Without the prompt."""
        return generate_pb2.GenerateRequest(
            model=self.model or "",
            sampling=self._sampling(),
            request_id=request_id,
            cache_salt=self.cache_salt or "",
            adapter=self.adapter or "",
            priority=self.priority,
            slo_ttft_ms=self.slo_ttft_ms,
            slo_tpot_ms=self.slo_tpot_ms,
            kv_policy=self._kv_policy(),
        )

    def _kv_policy(self) -> generate_pb2.KvPolicy | None:
        given = {key: tokens for key in POLICY_KEYS if (tokens := getattr(self, f"kv_{key}")) is not None}
        return generate_pb2.KvPolicy(**given) if given else None

    def _sampling(self) -> generate_pb2.SamplingParams:
        same = ("temperature", "top_p", "min_p", "top_n_sigma", "typical_p", "seed", "n", "min_tokens", "ignore_eos")
        penalties = ("presence_penalty", "frequency_penalty", "repetition_penalty")
        given = {key: value for key in (*same, *penalties) if (value := getattr(self, key)) is not None}
        if self.top_k is not None:
            given["top_k"] = 0 if self.top_k == -1 else self.top_k  # vLLM's -1 is off, as 0
        counts = {"logprobs": self.num_logprobs, "prompt_logprobs": self.num_prompt_logprobs}
        given |= {key: count for key, count in counts.items() if count is not None}
        return generate_pb2.SamplingParams(
            **given,
            max_tokens=self.most_tokens,
            stop=self.stop_strings,
            stop_token_ids=self.stop_token_ids or (),
            logit_bias=self.logit_bias or {},
            allowed_token_ids=self.allowed_token_ids or (),
            bad_words=self.bad_words or (),
            structured=self.form(),
            beam_search=self._search() if self.use_beam_search else None,
        )

    def _search(self) -> generate_pb2.BeamSearch:
        """As wide as many choices are wanted: vLLM's."""
        return generate_pb2.BeamSearch(
            num_beams=self.num_choices,
            length_penalty=self.length_penalty,
            early_stopping=EARLY_STOPPING_TO_PROTO[self.early_stopping or False],
        )

    def form(self) -> generate_pb2.StructuredOutput | None:
        """That of the answer's text; None: any. Raises InvalidRequest where it has two, or none where one is meant."""
        forms = [*_formatted(self.response_format), *_structured(self.structured_outputs)]
        if len(forms) > 1:
            raise InvalidRequest("response_format and structured_outputs give an answer two forms; give one")
        return forms[0] if forms else None

    @property
    def most_tokens(self) -> int:
        return self.usual_max_tokens if self.max_tokens is None else self.max_tokens


def _formatted(given: ResponseFormat | None) -> Iterator[generate_pb2.StructuredOutput]:
    if given is None or given.type == "text":
        return
    if given.type == "json_object":
        if (given.model_extra or {}).get("schema") is not None:  # as llama.cpp and others take it
            raise InvalidRequest("response_format has a schema; give it as json_schema.schema, with type json_schema")
        yield generate_pb2.StructuredOutput(json_object=True)
    elif given.json_schema is None or given.json_schema.schema_ is None:
        raise InvalidRequest("response_format is json_schema without a schema; give it as json_schema.schema")
    else:
        yield generate_pb2.StructuredOutput(json_schema=_schema(given.json_schema.schema_))


def _schema(given: dict[str, Any] | bool) -> str:
    try:
        return json.dumps(given)
    except RecursionError as error:
        raise InvalidRequest("the answer's JSON Schema is nested too deep; give a flatter one") from error


def _structured(given: StructuredOutputs | None) -> Iterator[generate_pb2.StructuredOutput]:
    if given is None:
        return
    if given.json_ is not None:
        text = given.json_ if isinstance(given.json_, str) else _schema(given.json_)
        yield generate_pb2.StructuredOutput(json_schema=text)
    if given.json_object:
        yield generate_pb2.StructuredOutput(json_object=True)
    if given.regex is not None:
        yield generate_pb2.StructuredOutput(regex=given.regex)
    if given.choice is not None:
        yield generate_pb2.StructuredOutput(choice=generate_pb2.Choices(texts=given.choice))
    if given.grammar is not None:
        yield generate_pb2.StructuredOutput(grammar=given.grammar)


class CompletionRequest(Sampled):
    """OpenAI's legacy completion."""

    prompt: (
        str | TokenIds | Annotated[list[str], Field(fail_fast=True)] | Annotated[list[TokenIds], Field(fail_fast=True)]
    )
    echo: bool | None = False
    logprobs: Int32 | None = None
    prompt_logprobs: Int32 | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echoes_logprobs and self.prompt_logprobs is None else self.prompt_logprobs

    @property
    def echoes_logprobs(self) -> bool:
        return bool(self.echo) and self.logprobs is not None

    @property
    def echoes_alone(self) -> bool:
        """Nothing but the prompt is wanted."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def most_tokens(self) -> int:
        return 1 if self.echoes_alone else super().most_tokens

    def check_served(self) -> None:
        super().check_served()
        if self.echoes_logprobs and self.num_choices > 1:
            raise InvalidRequest(f"n is {self.n} with echo and logprobs; give 1")
        if self.echoes_logprobs and self.prompt_logprobs not in (None, self.logprobs):
            raise InvalidRequest(
                f"prompt_logprobs is {self.prompt_logprobs} with echo; leave it out, logprobs says both"
            )
        if (num_prompts := len(self.prompts())) * self.num_choices > MAX_CHOICES:
            most = MAX_CHOICES // num_prompts
            raise InvalidRequest(f"n is {self.num_choices} with {num_prompts} prompts; give at most {most}")

    def prompts(self) -> Sequence[str | list[int]]:
        """Raises InvalidRequest where there is none, or too many."""
        prompts: Any = self.prompt
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            return [prompts]
        if not 0 < len(prompts) <= MAX_PROMPTS:
            raise InvalidRequest(f"prompt has {len(prompts)} prompts; give 1 to {MAX_PROMPTS}")
        return list(prompts)


class FunctionChoice(BaseModel):
    type: Literal["function"]
    function: dict[str, Any]


class Message(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: str
    content: str | Objects | None = None
    tool_calls: Objects | None = None


class Prompted(BaseModel):
    """What a chat's prompt is made of."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    tools: Objects | None = None
    documents: Objects | None = None  # vLLM's
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class ChatRequest(Prompted, Sampled):
    """OpenAI's chat completion."""

    usual_max_tokens: ClassVar[int] = AS_MANY_AS_FIT
    adds_special_tokens: ClassVar[bool] = False  # the template does

    max_completion_tokens: Int32 | None = None
    logprobs: bool | None = False
    top_logprobs: Int32 | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool = True

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most_tokens(self) -> int:
        return super().most_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def may_call(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    def check_served(self) -> None:
        super().check_served()
        if self.max_completion_tokens is not None and self.max_completion_tokens < 1:
            raise InvalidRequest(
                f"max_completion_tokens is {self.max_completion_tokens}; give a whole number from 1 on"
            )
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise InvalidRequest(f"top_logprobs is {self.top_logprobs}; give a whole number of 0 to {MAX_LOGPROBS}")
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest(f"top_logprobs is {self.top_logprobs} without logprobs; give both")
        if self.tool_choice == "auto" and self.tools is None:
            raise InvalidRequest("tool_choice is auto, and there are no tools; give both or neither")


class TokenizeRequest(BaseModel):
    """Of a prompt as a completion has it."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = False


class TokenizeChatRequest(Prompted):
    """Of a prompt as a chat has it."""

    model: str | None = None
    return_token_strs: bool | None = False


class DetokenizeRequest(BaseModel):
    model: str | None = None
    tokens: TokenIds


def proto_prompts(request: CompletionRequest, request_id: str) -> Iterator[generate_pb2.GenerateRequest]:
    """One for each prompt; the name of each is its own."""
    prompts = request.prompts()
    for number, prompt in enumerate(prompts):
        suffix = "" if len(prompts) == 1 else f"-{number}"
        asked = request.to_proto(f"{request_id[: MAX_ID_CHARS - len(suffix)]}{suffix}")
        if isinstance(prompt, str):
            asked.text = prompt
        else:
            asked.token_ids.ids.extend(prompt)
        yield asked
