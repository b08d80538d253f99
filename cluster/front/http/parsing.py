"""AnswerParser takes a chat's answer apart, as it comes: what the model says, what it thinks, which tools it calls.

    text --push--> held back while it may begin a mark --> said | thought | in a call, until that is whole --> Parts

A call that cannot be read is text, marks and all: nothing is lost. So is what stands behind calls if their mark has no
end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from cluster.front.http.chat import Marks

PARAMETER = re.compile(r"<parameter=([^<>]+)>\n?(.*?)\n?</parameter>", re.DOTALL)  # Qwen3-Coder's
FUNCTION = re.compile(r"<function=([^<>]+)>(.*?)</function>", re.DOTALL)
MOST_CHARS = 1 << 18  # of a call; a longer one is text
# Mistral's newer: name[ARGS]{...}, and name[CALL_ID]id[ARGS]{...}
NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\w+\s*)?(?:\[ARGS\]\s*)?(?=\{)")
BETWEEN = re.compile(r"[\s;]*")
JSON = re.compile(r"\s*[\[{]")
MOST_ENDS = 32  # in the texts of a call; one with more ends at the first


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str  # JSON


@dataclass(frozen=True, slots=True)
class Part:
    kind: Literal["said", "thought", "called"]
    text: str = ""
    call: ToolCall = ToolCall("", "")


class AnswerParser:
    def __init__(
        self,
        marks: Marks,
        *,
        finds_calls: bool,
        is_thinking: bool = False,
        texts: frozenset[tuple[str, str]] = frozenset(),
    ) -> None:
        """`is_thinking`: the prompt ended with the mark that begins it. `texts`: see texts_of."""
        self._marks = marks
        self._finds_calls = finds_calls
        self._texts = texts
        self._state: Literal["said", "thought", "called"] = "thought" if is_thinking else "said"
        self._held = ""
        self._space: list[str] = []  # before all that is said; of an answer that calls and says nothing it is left out
        self._has_begun = False  # something other than space was said
        self._is_bare_call = False
        self._has_called = False  # and said nothing since
        self._ending = _Ending(marks.tools[1])
        self.num_calls = 0

    def push(self, text: str) -> list[Part]:
        """What is certain by now."""
        self._held += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """What is left, at the answer's end."""
        parts: list[Part] = []
        while self._state == "called" and self._ending.first >= 0 and not self._calls(self._held):
            self._end_call(self._ending.first, parts)  # the text that it seemed to stand in never ended
            while self._step(parts):
                pass
        if self._state == "called":
            self._close_call(self._held, "", parts)
        else:
            self._say(self._held, parts)
        if self._space and not self.num_calls:
            parts.append(Part("said", "".join(self._space)))
        self._held = ""
        return parts

    def _step(self, parts: list[Part]) -> bool:
        """Take one piece of what is held; whether more may follow."""
        if not self._held:
            return False
        if self._state == "called":
            return self._read_call(parts)
        if self._has_called:
            self._held = self._held.lstrip()  # line breaks between calls
        if self._state == "said" and not self._has_begun and self._begins_bare_call():
            return True
        ends = self._ends()
        places = [(place, mark) for mark in ends if (place := self._held.find(mark)) >= 0]
        place, mark = min(places, default=(_certain(self._held, ends), ""))
        self._say(self._held[:place], parts)
        self._held = self._held[place + len(mark) :]
        if mark:
            self._state = ends[mark]
        return bool(mark)

    def _ends(self) -> dict[str, Literal["said", "thought", "called"]]:
        """By mark, what begins with it."""
        ends: dict[str, Literal["said", "thought", "called"]] = {}
        if self._state == "thought":
            ends[self._marks.reasoning[1]] = "said"
        elif self._marks.reasoning[0]:
            ends[self._marks.reasoning[0]] = "thought"
        if self._state == "said" and self._finds_calls and self._marks.tools[0]:
            ends[self._marks.tools[0]] = "called"
        return ends

    def _say(self, text: str, parts: list[Part]) -> None:
        if not text:
            return
        self._has_called = False
        if self._state == "thought":
            parts.append(Part("thought", text))
            return
        self._has_begun = self._has_begun or bool(text.strip())
        self._space.append(text)
        if self._has_begun or not self._finds_calls:
            parts.append(Part("said", "".join(self._space)))
            self._space.clear()

    def _begins_bare_call(self) -> bool:
        """Llama 3 may leave its mark out: an answer that is an object is a call."""
        if not self._finds_calls or self._marks.tools[0] != "<|python_tag|>" or not self._held.lstrip().startswith("{"):
            return False
        self._state, self._is_bare_call = "called", True
        return True

    def _read_call(self, parts: list[Part]) -> bool:
        place = self._ending.find(self._held)
        if place < 0:
            return False  # to the answer's end, or until more has come
        if place != self._ending.first and not self._calls(self._held[:place]):
            place = self._ending.first
        self._end_call(place, parts)
        return True

    def _end_call(self, place: int, parts: list[Part]) -> None:
        end = self._marks.tools[1]
        body, self._held = self._held[:place], self._held[place + len(end) :]
        self._state, self._ending = "said", _Ending(end)
        self._close_call(body, end, parts)

    def _close_call(self, body: str, end: str, parts: list[Part]) -> None:
        begin = self._marks.tools[0]
        calls, rest = calls_before(body, self._texts, begin)
        if not calls or (rest and self._marks.tools[1]):
            calls, rest = [], ("" if self._is_bare_call else begin) + body + end
        self._has_called = bool(calls)
        if calls:
            self._space.clear()
        for call in calls:
            self.num_calls += 1
            parts.append(Part("called", call=call))
        self._say(rest.lstrip() if calls else rest, parts)

    def _calls(self, body: str) -> list[ToolCall]:
        return calls_of(body, self._texts, self._marks.tools[0])


class _Ending:
    """Where a call ends: at the first end mark that stands in no text of its JSON. Looks at each character once."""

    def __init__(self, end: str) -> None:
        self.first = -1  # end mark, in a text or not
        self._end = end
        self._pieces = re.compile(rf'\\["\\]|"|{re.escape(end)}')
        self._place, self._num_in_texts, self._is_in_text = 0, 0, False

    def find(self, held: str) -> int:
        """`held`: what it was the last time, and what has come since. -1: not yet."""
        if not self._end:
            return -1
        for piece in self._pieces.finditer(held, self._place):
            self._place = piece.end()
            if piece[0] == '"':
                self._is_in_text = not self._is_in_text and JSON.match(held) is not None
            elif piece[0] == self._end and (place := self._ends_at(piece.start())) >= 0:
                return place
        self._place = max(self._place, len(held) - len(self._end) + 1)
        return -1

    def _ends_at(self, place: int) -> int:
        self.first = place if self.first < 0 else self.first
        if not self._is_in_text:
            return place
        self._num_in_texts += 1
        return -1 if self._num_in_texts <= MOST_ENDS else self.first


def _certain(text: str, marks: Sequence[str] | dict[str, Any]) -> int:
    """How much of it cannot belong to a mark that is not whole yet."""
    for length in range(min(len(text), max(map(len, marks), default=1) - 1), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return len(text) - length
    return len(text)


def texts_of(tools: Sequence[Mapping[str, Any]]) -> frozenset[tuple[str, str]]:
    """Function and parameter, of the parameters that are texts by the tools' schemas."""
    texts: set[tuple[str, str]] = set()
    for tool in tools:
        with suppress(KeyError, TypeError, AttributeError):  # the template takes what is no schema, too
            function = tool["function"]
            parameters = function["parameters"]["properties"].items()
            texts |= {(function["name"], name) for name, schema in parameters if schema.get("type") == "string"}
    return frozenset(texts)


def calls_of(body: str, texts: frozenset[tuple[str, str]] = frozenset(), begin: str = "") -> list[ToolCall]:
    """None if it cannot be read whole. `begin`: the mark that may begin each."""
    calls, rest = calls_before(body, texts, begin)
    return [] if rest else calls


def calls_before(body: str, texts: frozenset[tuple[str, str]], begin: str) -> tuple[list[ToolCall], str]:
    """Those that can be read at its beginning, and what is left. See calls_of."""
    calls, place = list[ToolCall](), 0
    if len(body) > MOST_CHARS:
        return calls, body
    try:
        if body.lstrip().startswith("<function=") and "</function>" in body:
            found = [(name.strip(), inner) for name, inner in FUNCTION.findall(_until_last(body, "</function>"))]
            return [ToolCall(name, _xml_arguments(name, inner, texts)) for name, inner in found], ""
        for objects, end in _objects(body, begin):
            calls += [_call(each) for each in objects]
            place = end
    except (ValueError, KeyError, TypeError, RecursionError):
        return calls, body[place:]
    return calls, ""


def _xml_arguments(function: str, inner: str, texts: frozenset[tuple[str, str]]) -> str:
    given = [(name.strip(), text) for name, text in PARAMETER.findall(_until_last(inner, "</parameter>"))]
    read = {name: text if (function, name) in texts else _value(text) for name, text in given}
    return _json(read)


def _until_last(text: str, end: str) -> str:
    """So that all that begins in it ends: else each beginning would be searched to the end of the text."""
    return text[: text.rfind(end) + len(end)] if end in text else ""


def _json(value: Any) -> str:
    """Raises ValueError for a number that JSON cannot have: 1e999 is read as infinite."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if _is_text(text) else json.dumps(value, allow_nan=False)


def _is_text(text: str) -> bool:
    """No half of a surrogate pair is in it, which JSON can spell and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _value(text: str) -> Any:
    try:
        value = json.loads(text, parse_constant=_refuse)
        _json(value)
        return value
    except (ValueError, RecursionError):
        return text


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _objects(body: str, begin: str) -> Iterator[tuple[list[Any], int]]:
    """Objects one after the other, a list of them, or each behind its name, and behind another mark; with where they
    end."""
    decoder, place = json.JSONDecoder(parse_constant=_refuse), 0
    while (place := _behind(body, place)) < len(body):
        if begin and place and body.startswith(begin, place):
            place = _behind(body, place + len(begin))
        named = NAMED.match(body, place)
        read, place = decoder.raw_decode(body, named.end() if named else place)
        if named:
            read = {"name": named[1], "arguments": read}
        yield read if isinstance(read, list) else [read], place


def _behind(body: str, place: int) -> int:
    """What may stand between two."""
    between = BETWEEN.match(body, place)
    assert between is not None, "it may be empty"
    return between.end()


def _call(read: Any) -> ToolCall:
    arguments = read["arguments"] if "arguments" in read else read["parameters"]
    name = read["name"]
    if not isinstance(name, str):
        raise TypeError("a name is text")
    call = ToolCall(name, arguments if isinstance(arguments, str) else _json(arguments))
    if not _is_text(call.name + call.arguments):
        raise ValueError("a call is told in UTF-8")
    return call
