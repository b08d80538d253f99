"""ChatAnswer is the answer to a chat: what each choice says, thinks and calls."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from string import ascii_letters, digits
from typing import Any

from cluster.front.generation import Generation
from cluster.front.http.answers import Answer, Made
from cluster.front.http.chat import ChatTemplate, ChatTemplates
from cluster.front.http.forms import chat_form
from cluster.front.http.guard import HttpCall
from cluster.front.http.parsing import AnswerParser, texts_of
from cluster.front.http.schemas import ChatRequest, Prompted
from cluster.front.http.shapes import (
    FINISH,
    ChatChoice,
    ChatLogprobs,
    ChatMessage,
    UsageBody,
    chat_logprobs,
    delta_of,
    stop_reason,
    whole_message,
)
from engine.types import InvalidRequest
from kvrelay.v1 import generate_pb2

CALL_ID_CHARS = 9  # Mistral's templates take no other number, and no other characters


def _call_id() -> str:
    return "".join(secrets.choice(ascii_letters + digits) for _ in range(CALL_ID_CHARS))


async def chat_ids(
    generation: Generation, templates: ChatTemplates, asked: Prompted, model: str, **more: Any
) -> tuple[ChatTemplate, str, list[int]]:
    """The model's template, the prompt that it makes of a chat, and the token ids of that. Raises InvalidRequest,
    RequestFailed."""
    template = templates.of(generation.open_model(model))
    if template is None:
        raise InvalidRequest("messages cannot be read: no tokenizer is loaded; use /v1/completions with token ids")
    prompt = template.prompt(asked, more)
    return template, prompt, await generation.encode(prompt, model, special_tokens=False)


class ChatAnswer(Answer):
    prefix, whole_object, part_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        generation: Generation,
        call: HttpCall,
        asked: ChatRequest,
        template: ChatTemplate,
        prompt: str,
        prompt_ids: list[int],
    ) -> None:
        """Raises InvalidRequest."""
        request = asked.to_proto(call.request_id)
        request.token_ids.ids.extend(prompt_ids)
        marks, codec = template.marks, generation.catalog.probably(asked.model or "").codec
        if (form := chat_form(asked, marks, codec, prompt)) is not None:
            request.sampling.structured.CopyFrom(form)
        shown = frozenset[int]()
        if codec is not None:
            read = marks.all if asked.may_call else marks.reasoning
            shown = codec.ids_of(read) if asked.skip_special_tokens else codec.special_ids
        super().__init__(generation, call, asked, [request], shown_special=shown)
        is_thinking = bool(marks.reasoning[0]) and prompt.rstrip().endswith(marks.reasoning[0])
        texts = texts_of(asked.tools or ())
        self._parsers = [
            AnswerParser(marks, finds_calls=asked.may_call, is_thinking=is_thinking, texts=texts)
            for _ in range(asked.num_choices)
        ]
        self._shows_thoughts = asked.include_reasoning
        self._is_one_call = asked.parallel_tool_calls is False
        self._shows_stop = asked.include_stop_str_in_output
        self._shows_ids = bool(asked.return_token_ids)
        self._prompt = {"prompt_token_ids": prompt_ids} if self._shows_ids else {}  # as it is told, once
        self._begun: set[int] = set()  # choices

    async def whole(self) -> dict[str, Any]:
        return await super().whole() | self._prompt

    def _event_body(self, choices: list[Any], usage: UsageBody | None) -> dict[str, Any]:
        body, self._prompt = super()._event_body(choices, usage) | self._prompt, {}
        return body

    def told(self, made: Made) -> Iterator[ChatChoice]:
        part, index = made.part, made.part.index
        if index not in self._begun:
            self._begun.add(index)
            yield self._choice(index, {"role": "assistant", "content": ""})
        choices = [self._choice(index, delta) for delta in self._deltas(part)]
        logprobs = chat_logprobs(self.names, part)
        if not choices and (logprobs or part.finish_reason or self._shows_ids):
            choices.append(self._choice(index, {}))
        if choices:
            self._conclude(choices[-1], part, logprobs)
        yield from choices

    def _deltas(self, part: generate_pb2.GenerateResponse) -> Iterator[ChatMessage]:
        parser = self._parsers[part.index]
        text = part.text + (part.stop_string if self._shows_stop else "")
        parts = parser.push(text)
        if part.finish_reason:
            parts += parser.finish()
        number = parser.num_calls - sum(each.kind == "called" for each in parts)
        for each in parts:
            if each.kind == "thought" and not self._shows_thoughts:
                continue
            if each.kind == "called" and number and self._is_one_call:
                continue
            yield delta_of(each, number, _call_id())
            number += each.kind == "called"

    def _conclude(self, choice: ChatChoice, part: generate_pb2.GenerateResponse, logprobs: ChatLogprobs | None) -> None:
        choice["logprobs"] = logprobs
        choice["finish_reason"] = FINISH.get(part.finish_reason)
        if part.finish_reason:
            choice["stop_reason"] = stop_reason(part, self.stop_token_ids)
            if choice["finish_reason"] == "stop" and self._parsers[part.index].num_calls:
                choice["finish_reason"] = "tool_calls"
        if part.HasField("score"):
            choice["score"] = part.score
        if self._shows_ids:
            choice["token_ids"] = list(part.token_ids)

    def _choice(self, index: int, delta: ChatMessage) -> ChatChoice:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def whole_choice(self, told: list[ChatChoice]) -> ChatChoice:
        logprobs = [token for each in told if (own := each["logprobs"]) for token in own["content"]]
        whole: ChatChoice = {
            "index": told[-1]["index"],
            "message": whole_message([each["delta"] for each in told]),
            "logprobs": {"content": logprobs} if logprobs else None,
            "finish_reason": told[-1]["finish_reason"],
            "stop_reason": told[-1].get("stop_reason"),
        }
        if "score" in told[-1]:
            whole["score"] = told[-1]["score"]
        if self._shows_ids:
            whole["token_ids"] = [token for each in told for token in each.get("token_ids", [])]
        return whole
