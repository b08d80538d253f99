"""ChatTemplate makes a prompt of a chat's messages, by the template that the model's tokenizer brings, and knows by
which marks the model's answers say that they reason or call a tool."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from jinja2 import TemplateError

from cluster.front.http.schemas import Message, Prompted
from cluster.front.models.catalog import Served
from engine.types import InvalidRequest

MARKS_IN_CALLS = ("[CALL_ID]", "[ARGS]")  # Mistral's
TOOL_MARKS = (("<tool_call>", "</tool_call>"), ("[TOOL_CALLS]", ""), ("<|python_tag|>", ""))  # Hermes, Mistral, Llama 3
LLAMA_TOOLS = "Environment: ipython"  # in all templates of Llama 3's with tools; 3.2's shows calls without their mark
FOR_TEMPLATES = ("documents",)  # of the names that transformers itself has
# of a template, for messages that it does not expect; and of one that is no program, such as a `break` in no loop
UNREAD = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    SyntaxError,
)
TEXTS = {  # by a part's type, which key has its text; as vLLM reads them
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
SHOWN = "kvrelay shows this"  # a message, to see whether it is in a prompt
CHATS = (("user",), ("user", "assistant"), ("user", "assistant", "tool"), ("system", "user"))  # each with one role more
REASONING_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


@dataclass(frozen=True, slots=True)
class Marks:
    """Where a part of an answer begins and ends; empty: it has none, or ends with the answer."""

    reasoning: tuple[str, str] = ("", "")
    tools: tuple[str, str] = ("", "")
    in_calls: tuple[str, ...] = ()  # between parts of a call

    @property
    def all(self) -> Sequence[str]:
        return [mark for mark in (*self.reasoning, *self.tools, *self.in_calls) if mark]


class ChatTemplates:
    """Each model's, made when it is first asked for."""

    def __init__(self) -> None:
        self._made: WeakKeyDictionary[Served, ChatTemplate] = WeakKeyDictionary()

    def of(self, served: Served) -> ChatTemplate | None:
        """None: it has no tokenizer."""
        if served.codec is None:
            return None
        if served not in self._made:
            self._made[served] = ChatTemplate(served.codec.tokenizer)
        return self._made[served]


class ChatTemplate:
    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer`: of transformers."""
        self._tokenizer = tokenizer
        template = getattr(tokenizer, "chat_template", None)
        if isinstance(template, Mapping):  # by name
            template = "\n".join(template.values())
        self.is_there = bool(template)
        named = inspect.signature(tokenizer.apply_chat_template).parameters if template else ()
        self._own_names = ("messages", *named)  # which transformers calls the conversation
        self._in_parts = _in_parts(tokenizer) if self.is_there else {}
        self._knows_developers = "developer" in (template or "")
        self.marks = _marks_of(template or "")

    def prompt(self, asked: Prompted, more: Mapping[str, Any] | None = None) -> str:
        """`more`: what the template may want to know. Raises InvalidRequest."""
        if not self.is_there:
            raise InvalidRequest("messages cannot be read: the model has no chat template; use /v1/completions")
        if asked.add_generation_prompt and asked.continue_final_message:
            raise InvalidRequest("continue_final_message is true with add_generation_prompt; give one of them")
        for key in asked.chat_template_kwargs or ():
            if key in self._own_names and key not in FOR_TEMPLATES:
                raise InvalidRequest(f"chat_template_kwargs has {key}, which is not the template's to know")
        messages = [self._read(number, message) for number, message in enumerate(asked.messages)]
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages,
                    tools=asked.tools or None,
                    add_generation_prompt=asked.add_generation_prompt,
                    continue_final_message=asked.continue_final_message,
                    tokenize=False,
                    **{"documents": asked.documents, **(more or {}), **(asked.chat_template_kwargs or {})},
                )
            )
        except UNREAD as error:
            raise InvalidRequest(f"messages cannot be read by the model's template: {str(error)[:300]}") from error

    def _read(self, number: int, message: Message) -> dict[str, Any]:
        """As the template wants it: one text, or texts as parts, and a call's arguments as an object."""
        read = message.model_dump(exclude_none=True)
        if message.role == "developer" and not self._knows_developers:
            read["role"] = "system"  # what the role was called
        texts = _texts(number, message.content)
        read["content"] = [_part(text) for text in texts] if self._takes_parts(read["role"]) else "\n".join(texts)
        if message.tool_calls:
            read["tool_calls"] = [_called(number, call) for call in message.tool_calls]
        return read

    def _takes_parts(self, role: str) -> bool:
        return self._in_parts.get(role, self._in_parts["user"])


def _marks_of(template: str) -> Marks:
    reasoning = next((marks for marks in REASONING_MARKS if marks[1] in template), ("", ""))
    bare = TOOL_MARKS[2] if LLAMA_TOOLS in template else ("", "")
    tools = next((marks for marks in TOOL_MARKS if marks[0] in template), bare)
    in_calls = tuple(mark for mark in MARKS_IN_CALLS if tools[0] == "[TOOL_CALLS]" and mark in template)
    return Marks(reasoning, tools, in_calls)


def _in_parts(tokenizer: Any) -> dict[str, bool]:
    """Whether the template reads a role's parts, and no text that it is given in their place. One whose messages it
    does not show is as a user."""
    known: dict[str, bool] = {}
    for roles in CHATS:
        asked = next(role for role in roles if role not in known)
        shows_text, shows_parts = (_shows(tokenizer, roles, known | {asked: form}) for form in (False, True))
        known[asked] = not shows_text and (shows_parts or known.get("user", False))
    return known


def _shows(tokenizer: Any, roles: Sequence[str], in_parts: Mapping[str, bool]) -> bool:
    """Whether the message of the one role that was added last is in a prompt of these."""
    asked = list(in_parts)[-1]
    texts = {role: SHOWN if role == asked else role for role in roles}
    chat = [{"role": role, "content": [_part(text)] if in_parts[role] else text} for role, text in texts.items()]
    with suppress(*UNREAD):
        return SHOWN in str(tokenizer.apply_chat_template(chat, tokenize=False))
    return False


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _texts(number: int, content: str | list[dict[str, Any]] | None) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [_text(number, part) for part in content or ()]


def _text(number: int, part: Mapping[str, Any]) -> str:
    kind = str(part.get("type", "text"))
    if kind not in TEXTS:
        raise InvalidRequest(f"messages.{number}.content has a part of type {kind[:80]}; this model reads text alone")
    text = part.get(TEXTS[kind])
    if not isinstance(text, str):
        raise InvalidRequest(f"messages.{number}.content has a part of type {kind} without a text as its {TEXTS[kind]}")
    return text


def _called(number: int, call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(arguments := function.get("arguments"), str):
        return dict(call)
    try:
        return {**call, "function": {**function, "arguments": json.loads(arguments or "{}")}}
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"messages.{number}.tool_calls has arguments that are no JSON: {error}") from None
