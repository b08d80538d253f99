"""An answer is taken apart the same way however it comes, and nothing of it is lost."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cluster.front.answers import ChoiceAnswer
from cluster.front.http.chat import Marks
from cluster.front.http.parsing import MOST_CHARS, MOST_ENDS, AnswerParser, Part, calls_of, texts_of
from cluster.router.live.requests import ChoiceUpdate
from engine.types import FinishReason, SamplingParams
from tests.cluster.front.http.harness import words

pytestmark = pytest.mark.unit

HERMES = Marks(("<think>", "</think>"), ("<tool_call>", "</tool_call>"))
MISTRAL = Marks(("", ""), ("[TOOL_CALLS]", ""))
LLAMA = Marks(("", ""), ("<|python_tag|>", ""))


def told(
    marks: Marks, text: str, *, sizes: tuple[int, int] = (1, 1), seed: int = 0, **how: Any
) -> list[tuple[str, str]]:
    """Its parts, joined where one follows its like, fed in pieces of random size."""
    rng, parser, parts = random.Random(seed), AnswerParser(marks, **{"finds_calls": True, **how}), []
    while text:
        size = rng.randint(*sizes)
        parts += parser.push(text[:size])
        text = text[size:]
    return joined([*parts, *parser.finish()])


def joined(parts: list[Part]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for part in parts:
        text = f"{part.call.name}({part.call.arguments})" if part.kind == "called" else part.text
        if found and part.kind != "called" and found[-1][0] == part.kind:
            found[-1] = (part.kind, found[-1][1] + text)
        else:
            found.append((part.kind, text))
    return found


CASES = [
    (HERMES, "just text", [("said", "just text")]),
    (HERMES, "a < b and <tool", [("said", "a < b and <tool")]),
    (HERMES, "<think>hm</think>so", [("thought", "hm"), ("said", "so")]),
    (HERMES, "<think>without an end", [("thought", "without an end")]),
    (
        HERMES,
        'x<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": "{}"}</tool_call>',
        [("said", "x"), ("called", 'f({"a": 1})'), ("called", "g({})")],
    ),
    (
        HERMES,
        r'<tool_call>{"name": "f", "arguments": {"é": "\ud800"}}</tool_call>',
        [("called", r'f({"\u00e9": "\ud800"})')],
    ),
    *(
        (HERMES, text, [("said", text)])
        for text in (
            r'<tool_call>{"name": "\ud800", "arguments": {}}</tool_call>',
            r'<tool_call>{"name": "f", "arguments": "\ud800"}</tool_call>',
            '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
        )
    ),
    (
        HERMES,
        '<tool_call><function=f><parameter=a>"\\ud800"</parameter></function></tool_call>'
        "<tool_call><function=f><parameter=a>[1e999]</parameter></function></tool_call>",
        [("called", r'f({"a": "\ud800"})'), ("called", 'f({"a": "[1e999]"})')],
    ),
    (HERMES, "<tool_call>no call</tool_call>y", [("said", "<tool_call>no call</tool_call>y")]),
    (
        HERMES,
        '<think>hm</think>\n\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n',
        [("thought", "hm"), ("called", "f({})")],
    ),
    *((HERMES, text, [("said", text)]) for text in ("\n\n", "\n so", "\n\n<tool_call>no call</tool_call>")),
    (LLAMA, '\n {"name": "f", "parameters": {}}', [("called", "f({})")]),
    (
        HERMES,
        r'<tool_call>{"name": "f", "arguments": {"x": "a </tool_call> \"</tool_call>"}}</tool_call>'
        r'<tool_call>{"name": "g", "arguments": {"x": "\\"}}</tool_call>y',
        [
            ("called", r'f({"x": "a </tool_call> \"</tool_call>"})'),
            ("called", r'g({"x": "\\"})'),
            ("said", "y"),
        ],
    ),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}',
        [("called", 'f({"x": "</tool_call>"})')],
    ),
    (
        HERMES,
        '<tool_call>{"no "call</tool_call> <tool_call>{"name": "g", "arguments": {}}</tool_call>y',
        [("said", '<tool_call>{"no "call</tool_call> '), ("called", "g({})"), ("said", "y")],
    ),
    *(
        (HERMES, text, [("said", text)])
        for text in (
            '<tool_call>{"no "call</tool_call>y',
            '<tool_call>no "call</tool_call>y',
            '<tool_call>{"name": "f", "arguments": {"x": "a </tool_call> b',
        )
    ),
    (HERMES, '<tool_call>{"name": "f"', [("said", '<tool_call>{"name": "f"')]),
    (
        HERMES,
        "<tool_call><function=f>\n<parameter=a>\n1\n</parameter>\n"
        "<parameter=b>\nx y\n</parameter>\n</function></tool_call>",
        [("called", 'f({"a": 1, "b": "x y"})')],
    ),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": "<function=x>hi</function>"}}</tool_call>',
        [("called", 'f({"a": "<function=x>hi</function>"})')],
    ),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        [("said", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>')],
    ),
    (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"b": "é"}}]',
        [("called", "f({})"), ("called", 'g({"b": "é"})')],
    ),
    (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": 2}', [("called", 'f({"a": 2})')]),
    (MISTRAL, '[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{"a": 2}', [("called", 'f({"a": 2})')]),
    (
        MISTRAL,
        '[TOOL_CALLS]f[ARGS]{"a": 2}[TOOL_CALLS]g{"b": 3} [TOOL_CALLS] h[ARGS]{}',
        [("called", 'f({"a": 2})'), ("called", 'g({"b": 3})'), ("called", "h({})")],
    ),
    (LLAMA, '{"name": "f", "parameters": {"a": 1}}', [("called", 'f({"a": 1})')]),
    (
        LLAMA,
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
        [("called", "f({})"), ("called", "g({})")],
    ),
    (
        MISTRAL,
        'So: [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]\nDone.',
        [("said", "So: "), ("called", 'f({"a": 1})'), ("said", "Done.")],
    ),
    (
        MISTRAL,
        '[TOOL_CALLS]f[ARGS]{"a": 2}; [TOOL_CALLS]g[ARGS]{"b": NaN}',
        [("called", 'f({"a": 2})'), ("said", '; [TOOL_CALLS]g[ARGS]{"b": NaN}')],
    ),
    (
        MISTRAL,
        '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g"}]',
        [("said", '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g"}]')],
    ),
    (
        LLAMA,
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}}\nDone.',
        [("called", 'f({"a": 1})'), ("said", "Done.")],
    ),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {}} or so</tool_call>',
        [("said", '<tool_call>{"name": "f", "arguments": {}} or so</tool_call>')],
    ),
    (LLAMA, '{"json": "that is no call"}', [("said", '{"json": "that is no call"}')]),
]


@pytest.mark.parametrize(("marks", "text", "wanted"), CASES)
def test_it_is_the_same_however_it_comes(marks: Marks, text: str, wanted: list[tuple[str, str]]) -> None:
    assert told(marks, text, sizes=(1000, 1000)) == wanted
    for seed in range(20):
        assert told(marks, text, sizes=(1, 7), seed=seed) == wanted


def test_a_call_is_told_when_it_has_ended() -> None:
    parser = AnswerParser(HERMES, finds_calls=True)
    assert parser.push('<tool_call>{"name": "f", "arguments": {"x": "</tool_call>') == []
    assert parser.push('"}}</tool_call') == []
    assert joined(parser.push(">")) == [("called", 'f({"x": "</tool_call>"})')]
    assert joined(parser.push('<tool_call>no "call</tool_call>')) == [("said", '<tool_call>no "call</tool_call>')]


@pytest.mark.parametrize("num_ends", [MOST_ENDS, MOST_ENDS + 1])
def test_so_many_ends_stand_in_a_call_s_texts(num_ends: int) -> None:
    text = '<tool_call>{"name": "f", "arguments": {"x": "' + "</tool_call>" * num_ends + '"}}</tool_call>'
    kind = "called" if num_ends <= MOST_ENDS else "said"
    assert [part[0] for part in told(HERMES, text)] == [kind]


@pytest.mark.parametrize(
    "piece", ['<tool_call>{"</tool_call>"', '<tool_call>{"</tool_call>', "</tool_call>", '\\"', "x"]
)
def test_a_text_without_an_end_is_looked_through_once(piece: str) -> None:
    """Some of these would take minutes if each end were tried with all that stands before it."""
    text = '<tool_call>{"name": "f", "arguments": {"x": "' + piece * (MOST_CHARS // len(piece))
    assert told(HERMES, text, sizes=(50, 50)) == [("said", text)]


def test_a_prompt_that_ended_in_a_thought_goes_on_in_it() -> None:
    assert told(HERMES, "hm</think>so", is_thinking=True) == [("thought", "hm"), ("said", "so")]


def test_whoever_offers_no_tools_gets_text() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert told(HERMES, text, finds_calls=False) == [("said", text)]


def test_a_model_that_repeats_itself_is_text_soon() -> None:
    for piece in ("[", "\n", "<function=", '{"a":'):
        text = "<tool_call>" + piece * 3000 + "</tool_call>"
        assert told(HERMES, text, sizes=(1000, 1000)) == [("said", text)]


def test_a_parameter_that_is_a_text_by_its_schema_stays_one() -> None:
    properties = {"zip": {"type": "string"}, "count": {"type": "integer"}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}]
    assert texts_of([{"function": "no schema"}, {}]) == frozenset()
    given = "".join(f"<parameter={name}>\n10\n</parameter>\n" for name in ("zip", "count", "other"))
    for name, wanted in (
        ("f", '{"zip": "10", "count": 10, "other": 10}'),
        ("g", '{"zip": 10, "count": 10, "other": 10}'),
    ):
        text = f"<tool_call><function={name}>\n{given}</function></tool_call>"
        assert told(HERMES, text, texts=texts_of(tools)) == [("called", f"{name}({wanted})")]


def test_an_answer_reads_no_tokenizer_for_its_special_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = words()
    assert codec.special_ids
    monkeypatch.setattr("cluster.front.detokenizer.special_ids", lambda _: pytest.fail("read anew"))
    update = ChoiceUpdate(0, [5, 40, 6], finish=FinishReason.LENGTH)
    for shown, text in ((frozenset[int](), "w5 w6"), (frozenset({40}), "w5 [TOOL_CALLS] w6")):
        answer = ChoiceAnswer("r", 0, SamplingParams(), codec, shown).response(update)
        assert answer.text == text


@pytest.mark.parametrize(
    ("body", "num_calls"),
    [
        ("<function=f>" * 20_000 + "</function>", 1),
        ("<function=f>" * 20_000, 0),
        ("<function=f>" + "<parameter=a>" * 19_000 + "</function>", 1),
        ("<function=f></function>" + "<function=f>" * 19_000, 1),
        ('{"name": "f", "arguments": {}}' * 8_000, 8_000),
        ("name" + " " * 250_000, 0),
        ("a" * 250_000, 0),
    ],
    ids=lambda given: str(given)[:24],
)
def test_what_is_long_and_no_call_is_looked_through_once(body: str, num_calls: int) -> None:
    """In the event loop, in which all streams wait meanwhile: some of these took seconds, and one hours."""
    assert len(body) <= MOST_CHARS
    assert len(calls_of(body, begin="[TOOL_CALLS]")) == num_calls
