"""The answers of OpenAI's HTTP API, made of Generate's messages: values, as they are written out and documented."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NotRequired

from typing_extensions import TypedDict

from cluster.front.http.parsing import Part
from cluster.front.tokenizer import TextCodec
from kvrelay.v1 import generate_pb2

LEAST_LOGPROB = -9999.0  # vLLM's
Finish = Literal["stop", "length", "tool_calls"]
FINISH: dict[int, Finish] = {  # what is aborted is told as an error
    generate_pb2.FINISH_REASON_STOP: "stop",
    generate_pb2.FINISH_REASON_LENGTH: "length",
}


class PromptDetails(TypedDict):
    cached_tokens: int


class UsageBody(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class CompletionLogprobs(TypedDict):
    """Of an echo, the first token has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(TypedDict):
    logprob: float
    rank: int | None  # 1: the likeliest; None: it is none of the likeliest that were asked for
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # of each token by its id; the first has none


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]  # of its first part
    prompt_logprobs: NotRequired[PromptLogprobs]  # of the first of a prompt's choices
    score: NotRequired[float]  # of a beam search


class CompletionBody(TypedDict):
    """Of one answer, or of a part of it."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[UsageBody | None]


class FunctionBody(TypedDict):
    name: str
    arguments: str


class ToolCallBody(TypedDict):
    id: str
    type: Literal["function"]
    function: FunctionBody
    index: NotRequired[int]


class ChatMessage(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str | None]
    reasoning_content: NotRequired[str | None]
    tool_calls: NotRequired[list[ToolCallBody]]


class ChatTop(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(ChatTop):
    top_logprobs: list[ChatTop]


class ChatLogprobs(TypedDict):
    content: list[ChatTokenLogprob]


class ChatChoice(TypedDict):
    index: int
    message: NotRequired[ChatMessage]  # of a whole answer
    delta: NotRequired[ChatMessage]  # of a part
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int]]
    score: NotRequired[float]  # of a beam search


class ChatBody(TypedDict):
    id: str
    object: Literal["chat.completion", "chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: NotRequired[UsageBody | None]
    prompt_token_ids: NotRequired[list[int]]  # of the first part


class ModelBody(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    parent: NotRequired[str]  # an adapter's model


class ModelsBody(TypedDict):
    object: Literal["list"]
    data: list[ModelBody]


class TokensBody(TypedDict):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None


class PromptBody(TypedDict):
    prompt: str


def usage_body(usages: Sequence[generate_pb2.Usage]) -> UsageBody:
    """Of one request, or of one for each prompt."""
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
    }


@dataclass(frozen=True, slots=True)
class TokenName:
    """`raw`: the text's bytes, or those that it is of a character."""

    text: str
    raw: bytes

    @property
    def name(self) -> str:
        """A part of a character is named by its bytes, as by OpenAI: no two are alike."""
        is_text = self.raw == self.text.encode()
        return self.text if is_text else "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.raw)


@dataclass(frozen=True, slots=True)
class TokenNames:
    """What a token is called where its log-probability is told."""

    codec: TextCodec | None
    by_id: bool = False

    def of(self, token_id: int) -> str:
        return self.token(token_id).name

    def token(self, token_id: int) -> TokenName:
        """One without text has its id for one."""
        if self.codec is not None and not self.by_id and (text := self.codec.token_text(token_id)):
            return TokenName(text, self.codec.token_bytes(token_id, text))
        named = f"token_id:{token_id}"
        return TokenName(named, named.encode())


def finite(logprob: float) -> float:
    """JSON has no infinities."""
    return max(logprob, LEAST_LOGPROB)


def chat_logprobs(names: TokenNames, part: generate_pb2.GenerateResponse) -> ChatLogprobs | None:
    if not part.logprobs:
        return None
    return {
        "content": [
            {**_chat_top(names, each.chosen), "top_logprobs": [_chat_top(names, top) for top in each.top]}
            for each in part.logprobs
        ]
    }


def _chat_top(names: TokenNames, token: generate_pb2.TokenLogprob) -> ChatTop:
    named = names.token(token.token_id)
    return {"token": named.name, "logprob": finite(token.logprob), "bytes": [*named.raw]}


def stop_reason(part: generate_pb2.GenerateResponse, stop_token_ids: Sequence[int]) -> str | int | None:
    """What of the request's own ended it, as vLLM says it."""
    if part.stop_string:
        return part.stop_string
    last = part.token_ids[-1] if part.token_ids else None
    is_own = part.finish_reason == generate_pb2.FINISH_REASON_STOP and last in stop_token_ids
    return last if is_own else None


def delta_of(part: Part, call_number: int, call_id: str) -> ChatMessage:
    """`call_number` and `call_id`: of a call."""
    if part.kind == "called":
        function: FunctionBody = {"name": part.call.name, "arguments": part.call.arguments}
        return {"tool_calls": [{"index": call_number, "id": call_id, "type": "function", "function": function}]}
    return {"reasoning_content": part.text} if part.kind == "thought" else {"content": part.text}


def whole_message(deltas: Sequence[ChatMessage]) -> ChatMessage:
    """All of a choice's, put together."""
    said = "".join(delta.get("content") or "" for delta in deltas)
    thought = "".join(delta.get("reasoning_content") or "" for delta in deltas)
    calls: list[ToolCallBody] = [
        {"id": call["id"], "type": "function", "function": call["function"]}
        for delta in deltas
        for call in delta.get("tool_calls", [])
    ]
    message: ChatMessage = {"role": "assistant", "content": said or None if calls else said}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return message
