"""The form of a chat's answer: thoughts, if the model has any, and then what was asked for; or calls of tools between
the model's marks, with arguments that keep the tools' schemas.

    chat --Lark--> thoughts? then @answer | calls          @answer, @call: grammars of their own, by llguidance

A mark that is a token of its own is asked for as that token; another one as text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.front.http.chat import Marks
from cluster.front.http.schemas import ChatRequest, FunctionChoice
from cluster.front.structured import form_of
from cluster.front.tokenizer import TextCodec
from engine.types import InvalidRequest
from kvrelay.v1 import generate_pb2

TERMINALS = r"""TEXT: /(.|\n)*/
PLAIN: /[\s\x1c-\x1f]*([^\s\x1c-\x1f{](.|\n)*)?/
SPACE: /[ \n\r\t]{1,8}/
"""  # PLAIN: a text that AnswerParser takes for no call of Llama 3 without its mark
ANY_ARGUMENTS = {"type": "object"}


@dataclass(frozen=True, slots=True)
class _Mark:
    """As a grammar has it: alone, and behind any text that ends with it."""

    name: str
    text: str
    token_id: int | None

    @property
    def alone(self) -> str:
        return json.dumps(self.text) if self.token_id is None else f"<[{self.token_id}]>"

    def after(self, text: str) -> str:
        """A terminal. Rules, of which the first is `until_NAME`."""
        if self.token_id is None:
            return f"until_{self.name}[lazy]: {text} {self.alone}\n"
        return f"until_{self.name}: {text} {self.alone}\n"


def chat_form(
    asked: ChatRequest, marks: Marks, codec: TextCodec | None, prompt: str
) -> generate_pb2.StructuredOutput | None:
    """None: any. Raises InvalidRequest."""
    own, must_call = asked.form(), _must_call(asked)
    may_call = asked.may_call and bool(marks.tools[0])
    is_strict = may_call and any(function.get("strict") for function in _functions(asked))
    if own is not None and must_call:
        raise InvalidRequest("response_format is given with a tool_choice that must be called; give one of them")
    if own is None and not must_call and not is_strict:
        return None
    if codec is None:
        raise InvalidRequest("a form is asked of the answer but no tokenizer is loaded; leave it out")
    thought = _thought(marks, codec, prompt)
    if own is not None and not thought and not may_call:
        return own
    grammars: list[dict[str, Any]] = []
    rules, ways = "", []
    if own is not None:
        grammars += _named("answer", *form_of(own))
        ways.append("@answer")
    if own is None or may_call:
        made, of_arguments = _calls(asked, marks, codec, must_call=must_call or own is not None)
        rules, ways = rules + made, [*ways, "calls"]
        grammars += of_arguments
    start = f"start: {'thought ' if thought else ''}({' | '.join(ways)})\n"
    chat = {"name": "chat", "lark_grammar": f"%llguidance {{}}\n{start}{rules}{thought}{TERMINALS}"}
    return generate_pb2.StructuredOutput(grammar=json.dumps({"grammars": [chat, *grammars]}, ensure_ascii=False))


def _must_call(asked: ChatRequest) -> bool:
    return isinstance(asked.tool_choice, FunctionChoice) or asked.tool_choice == "required"


def _mark(name: str, text: str, codec: TextCodec) -> _Mark:
    return _Mark(name, text, codec.id_of_mark(text))


def _thought(marks: Marks, codec: TextCodec, prompt: str) -> str:
    """The rule `thought`, which may be nothing; empty where the model has none, or the prompt has ended them."""
    begin, end = marks.reasoning
    if not end or prompt.rstrip().endswith(end):
        return ""
    close = _mark("thought", end, codec)
    is_thinking = bool(begin) and prompt.rstrip().endswith(begin)
    inside = f"inside: until_thought SPACE?\n{close.after('TEXT')}"
    if is_thinking:
        return f"thought: inside\n{inside}"
    return f"thought: (SPACE? {_mark('begin', begin, codec).alone} inside)?\n{inside}"


def _functions(asked: ChatRequest) -> Iterator[Mapping[str, Any]]:
    return (_function(number, tool) for number, tool in enumerate(asked.tools or ()))


def _function(number: int, tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"tools.{number} has no function.name; give one")
    return function


def _calls(asked: ChatRequest, marks: Marks, codec: TextCodec, *, must_call: bool) -> tuple[str, list[dict[str, Any]]]:
    """The rule `calls` with those it needs, and the grammars of the arguments. Each function's schema is a grammar of
    its own: what it refers to is in itself."""
    begin, end = marks.tools
    if not begin:
        shown = asked.tool_choice.function if isinstance(asked.tool_choice, FunctionChoice) else asked.tool_choice
        raise InvalidRequest(f"tool_choice is {str(shown)[:80]}; the model's chat template shows no call, so give none")
    functions = _wanted(asked)
    is_one = isinstance(asked.tool_choice, FunctionChoice) or asked.parallel_tool_calls is False
    key = "parameters" if begin == "<|python_tag|>" else "arguments"
    rules, grammars = [f"call: {' | '.join(f'call_{i}' for i in range(len(functions)))}"], list[dict[str, Any]]()
    for i, function in enumerate(functions):
        head = json.dumps(f'{{"name": {json.dumps(function["name"])}, "{key}": ')
        rules.append(f'call_{i}: {head} @arguments_{i} SPACE? "}}"')
        schema = function.get("parameters") if _must_call(asked) or function.get("strict") else None
        grammars += _named(f"arguments_{i}", "json_schema", json.dumps(schema or ANY_ARGUMENTS))
    mark = _mark("call", begin, codec)
    body = "SPACE? call"
    if begin == "[TOOL_CALLS]":
        more = "" if is_one else ' (SPACE? "," SPACE? call)*'
        body = f'SPACE? "[" SPACE? call{more} SPACE? "]"'
    elif end:
        body = f"SPACE? call SPACE? {_mark('end', end, codec).alone}"
    is_one = is_one or not end
    if must_call:
        first = f"{mark.alone}? {body}" if begin == "<|python_tag|>" else f"{mark.alone} {body}"
        rules.append(f"calls: SPACE? {first}" + ("" if is_one else f" (SPACE? {first})*"))
    elif end:
        rules += [f"calls: (until_call {body}){'?' if is_one else '*'} TEXT", mark.after("TEXT").rstrip()]
    elif begin == "<|python_tag|>":
        rules += [f"calls: SPACE? call | until_call {body} | PLAIN", mark.after("PLAIN").rstrip()]
    else:
        rules += [f"calls: until_call {body} | TEXT", mark.after("TEXT").rstrip()]
    return "\n".join(rules) + "\n", grammars


def _wanted(asked: ChatRequest) -> Sequence[Mapping[str, Any]]:
    functions = list(_functions(asked))
    if isinstance(asked.tool_choice, FunctionChoice):
        name = asked.tool_choice.function.get("name")
        functions = [each for each in functions if each["name"] == name]
        if not functions:
            raise InvalidRequest(f"tool_choice is {str(name)[:80]!r}, which is none of tools; give one of them")
    if not functions:
        raise InvalidRequest("tool_choice is required, and there are no tools; give both or neither")
    return functions


def _named(name: str, form: str, text: str) -> Sequence[dict[str, Any]]:
    """The grammars of a form, the first by this name. Raises InvalidRequest."""
    from engine.sampling.structured import grammar_of  # llguidance comes with it

    grammar = grammar_of(form, text)
    if not grammar.lstrip().startswith("{"):  # Lark, as which all is made but a JSON Schema
        return [{"name": name, "lark_grammar": grammar}]
    try:
        first, *others = json.loads(grammar)["grammars"]
        return [{**first, "name": name}, *others]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidRequest(f"structured.{form} cannot be read: {error!r}"[:300]) from error
