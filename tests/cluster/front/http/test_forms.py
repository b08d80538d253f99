"""The form of a chat's answer: whatever is drawn of what it allows, thoughts come first, calls can be read, and their
arguments keep the tools' schemas."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Literal, get_args

import jsonschema
import pytest
from transformers import PreTrainedTokenizerFast

from cluster.front.http.chat import REASONING_MARKS, TOOL_MARKS, Marks
from cluster.front.http.forms import chat_form
from cluster.front.http.parsing import AnswerParser, Part
from cluster.front.http.schemas import ChatRequest, Message
from cluster.front.structured import form_of
from cluster.front.tokenizer import TextCodec
from engine.sampling.structured import StructuredOutputs, check_grammar, grammar_of, vocabulary
from engine.types import InvalidRequest
from tests.forms import EOS_ID, MODEL, allowed, byte_tokenizer, walk

ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": [1, 2, 3]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
STOP = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "add", "parameters": ADD, "strict": True}},
    {"type": "function", "function": {"name": "stop", "parameters": STOP, "strict": True}},
]
SCHEMAS = {"add": ADD, "stop": STOP}
THOUGHTS = REASONING_MARKS[0]
NAMED = {"type": "function", "function": {"name": "add"}}


Kind = Literal["special", "added", "texts"]
KINDS = get_args(Kind)


class Model:
    """One whose marks are special tokens, added ones that are not (as Qwen's), or texts."""

    def __init__(self, marks: Marks, directory: Path, kind: Kind = "special") -> None:
        tokenizer = byte_tokenizer(() if kind == "texts" else marks.all, are_special=kind == "special")
        tokenizer.save(str(directory / "tokenizer.json"))
        self.marks = marks
        self.codec = TextCodec(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
        self.tokens = vocabulary(tokenizer.to_str(), MODEL.vocab_size, MODEL.eos_token_ids)
        self.outputs = StructuredOutputs(str(directory), MODEL)

    def answer(self, asked: ChatRequest, seed: int, prompt: str = "") -> list[Part]:
        form = chat_form(asked, self.marks, self.codec, prompt)
        assert form is not None
        grammar = grammar_of(*form_of(form))
        check_grammar("grammar", grammar, self.tokens)
        liked = [self.codec.backend.encode(text).ids for text in ("]", "}", *self.marks.all)]
        text = self.codec.text_of(walk(self.outputs, grammar, random.Random(seed), liked))
        is_thinking = bool(self.marks.reasoning[0]) and prompt.endswith(self.marks.reasoning[0])
        parser = AnswerParser(self.marks, finds_calls=asked.may_call, is_thinking=is_thinking)
        return [*parser.push(text), *parser.finish()]

    def takes(self, asked: ChatRequest, text: str) -> bool:
        """Whether it may be a whole answer."""
        form = chat_form(asked, self.marks, self.codec, "")
        assert form is not None
        constraint = self.outputs.constraint(grammar_of(*form_of(form)))
        return EOS_ID in allowed(constraint, self.codec.backend.encode(text).ids)


def asking(**given: Any) -> ChatRequest:
    return ChatRequest(messages=[Message(role="user", content="x")], **given)


def calls_of(parts: list[Part]) -> list[str]:
    """The names of those called, whose arguments are as they should."""
    for part in parts:
        if part.kind == "called":
            jsonschema.validate(json.loads(part.call.arguments), SCHEMAS[part.call.name])
    return [part.call.name for part in parts if part.kind == "called"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tools", TOOL_MARKS, ids=["hermes", "mistral", "llama"])
@pytest.mark.parametrize("thoughts", [("", ""), THOUGHTS], ids=["", "thinks"])
def test_a_call_that_must_be_is_made(
    tools: tuple[str, str], thoughts: tuple[str, str], kind: Kind, tmp_path: Path
) -> None:
    model = Model(Marks(reasoning=thoughts, tools=tools), tmp_path, kind)
    for seed in range(4):
        parts = model.answer(asking(tools=TOOLS, tool_choice="required"), seed)
        assert calls_of(parts)
        assert not [part for part in parts if part.kind == "said" and part.text.strip()]
        assert calls_of(model.answer(asking(tools=TOOLS, tool_choice=NAMED), seed)) == ["add"]
        if tools[1]:
            one = asking(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
            assert len(calls_of(model.answer(one, seed))) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tools", TOOL_MARKS, ids=["hermes", "mistral", "llama"])
def test_strict_calls_may_be_made_or_not_and_keep_their_schemas(
    tools: tuple[str, str], kind: Kind, tmp_path: Path
) -> None:
    model = Model(Marks(tools=tools), tmp_path, kind)
    found = [calls_of(model.answer(asking(tools=TOOLS), seed)) for seed in range(30)]
    assert any(found)
    assert not all(found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("tools", "call"),
    [
        (TOOL_MARKS[1], '[TOOL_CALLS][{"name": "stop", "arguments": {}}]'),
        (TOOL_MARKS[2], '<|python_tag|>{"name": "stop", "parameters": {}}'),
    ],
    ids=["mistral", "llama"],
)
def test_nothing_stands_behind_calls_whose_mark_has_no_end(
    tools: tuple[str, str], call: str, kind: Kind, tmp_path: Path
) -> None:
    model, asked = Model(Marks(tools=tools), tmp_path, kind), asking(tools=TOOLS)
    assert model.takes(asked, call)
    assert model.takes(asked, f"So: {call}")
    assert model.takes(asked, "So: none.")
    for more in ("\nDone.", "; " + call, call):
        assert not model.takes(asked, call + more)


@pytest.mark.parametrize(
    ("kind", "thoughts"),
    [("special", ""), ("added", ""), ("texts", ""), ("special", "<think>{</think>"), ("added", "<think>{</think>")],
)
def test_a_strict_call_of_llama_keeps_its_schema_without_the_mark(kind: Kind, thoughts: str, tmp_path: Path) -> None:
    marks = Marks(reasoning=THOUGHTS if thoughts else ("", ""), tools=TOOL_MARKS[2])
    model, asked = Model(marks, tmp_path, kind), asking(tools=TOOLS)
    call = '{"name": "add", "parameters": {"a": 1, "b": 2}}'
    for before in ("", "\n ", "<|python_tag|>", "x <|python_tag|>"):
        assert model.takes(asked, thoughts + before + call)
        assert not model.takes(asked, thoughts + before + call.replace("2", "4"))
    for text in ("", " ", 'x {"a": 1}', '\n[{"a": 1}]'):
        assert model.takes(asked, thoughts + text)
    for text in ('{"a": 1}', '\u00a0\x1c{"name": 1}', "\n" * 20 + call):
        assert not model.takes(asked, thoughts + text)


def test_what_a_function_s_schema_refers_to_is_in_itself(tmp_path: Path) -> None:
    tree = {"type": "object", "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/leaf"}]}}}
    schema = {**tree, "required": ["next"], "additionalProperties": False, "$defs": {"leaf": {"enum": ["x", 1]}}}
    tools = [{"type": "function", "function": {"name": "walk", "parameters": schema}}]
    model = Model(Marks(tools=TOOL_MARKS[1]), tmp_path)
    for seed in range(6):
        parts = model.answer(asking(tools=tools, tool_choice="required"), seed)
        called = [json.loads(part.call.arguments) for part in parts if part.kind == "called"]
        assert called
        for arguments in called:
            jsonschema.validate(arguments, schema)


def test_an_answer_has_its_form_or_is_a_call(tmp_path: Path) -> None:
    model = Model(Marks(tools=TOOL_MARKS[0]), tmp_path)
    asked = asking(tools=TOOLS, response_format={"type": "json_schema", "json_schema": {"schema": ADD}})
    found = [model.answer(asked, seed) for seed in range(20)]
    assert {bool(calls_of(parts)) for parts in found} == {True, False}
    for parts in found:
        if not calls_of(parts):
            jsonschema.validate(json.loads("".join(part.text for part in parts)), ADD)


def test_a_strict_function_is_as_any_other_where_no_call_is_known(tmp_path: Path) -> None:
    model = Model(Marks(), tmp_path)
    assert chat_form(asking(tools=TOOLS), model.marks, model.codec, "") is None


def test_an_answer_of_a_form_comes_behind_thoughts(tmp_path: Path) -> None:
    model = Model(Marks(reasoning=THOUGHTS), tmp_path)
    asked = asking(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": ADD}})
    kinds = set()
    for seed in range(12):
        for prompt in ("", THOUGHTS[0], f"{THOUGHTS[0]}\n\n{THOUGHTS[1]}\n\n"):
            parts = model.answer(asked, seed, prompt)
            said = "".join(part.text for part in parts if part.kind == "said")
            jsonschema.validate(json.loads(said), ADD)
            kinds.add((prompt[-8:], any(part.kind == "thought" for part in parts)))
    assert ("", True) in kinds
    assert ("", False) in kinds
    assert (f"{THOUGHTS[1]}\n\n"[-8:], True) not in kinds


@pytest.mark.parametrize(
    "form",
    [
        {"choice": ["ab", "ab}"]},
        {"regex": "ab}?"},
        {"grammar": 'start: "ab" "}"?'},
        {"grammar": 'root ::= "ab" "}"?'},
        {"grammar": '{"grammars": [{"lark_grammar": "start: /ab}?/"}]}'},
    ],
    ids=["choice", "regex", "lark", "gbnf", "json"],
)
@pytest.mark.parametrize("marks", [Marks(reasoning=THOUGHTS), Marks(tools=TOOL_MARKS[0])], ids=["thinks", "calls"])
def test_any_form_may_have_thoughts_or_calls_beside_it(form: dict[str, Any], marks: Marks, tmp_path: Path) -> None:
    model = Model(marks, tmp_path)
    asked = asking(structured_outputs=form, **({"tools": TOOLS} if marks.tools[0] else {}))
    found = [model.answer(asked, seed) for seed in range(12)]
    said = ["".join(part.text for part in parts if part.kind == "said") for parts in found if not calls_of(parts)]
    assert said
    assert {text.strip() for text in said} <= {"ab", "ab}"}


@pytest.mark.parametrize(
    "text",
    ["{", '{"foo":1}', '{"grammars":[]}', '{"grammars":[1]}', '{"grammars":' + "[" * 10**5],
    ids=["open", "other", "empty", "number", "deep"],
)
def test_a_grammar_that_is_no_json_of_one_is_refused(text: str, tmp_path: Path) -> None:
    model = Model(Marks(reasoning=THOUGHTS), tmp_path)
    with pytest.raises(InvalidRequest, match=r"structured\.grammar cannot be read"):
        chat_form(asking(structured_outputs={"grammar": text}), model.marks, model.codec, "")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"tools": TOOLS, "tool_choice": {**NAMED, "function": {"name": "sub"}}},
            "tool_choice is 'sub', which is none",
        ),
        ({"tool_choice": "required"}, "tool_choice is required, and there are no tools"),
        ({"tools": [{"type": "function"}], "tool_choice": "required"}, "tools.0 has no function.name"),
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            "response_format is given with a tool_choice that must be called",
        ),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "response_format and structured_outputs give an answer two forms",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format is json_schema without a schema"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format has a schema; give it as"),
    ],
)
def test_what_contradicts_itself_is_refused(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    model = Model(Marks(tools=TOOL_MARKS[0]), tmp_path)
    with pytest.raises(InvalidRequest) as caught:
        chat_form(asking(**given), model.marks, model.codec, "")
    assert str(caught.value).startswith(said)


def test_a_model_that_shows_no_calls_cannot_be_made_to_call(tmp_path: Path) -> None:
    model = Model(Marks(), tmp_path)
    with pytest.raises(InvalidRequest, match="the model's chat template shows no call"):
        chat_form(asking(tools=TOOLS, tool_choice="required"), model.marks, model.codec, "")
