"""Whatever is drawn of the tokens that a form allows, the answer has that form; and what it allows goes by the tokens
alone, whoever asks."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer

from engine.sampling.structured import StructuredOutputs, check_grammar, grammar_of, vocabulary
from engine.types import InvalidRequest
from tests.forms import MODEL, allowed, byte_tokenizer, walk

pytestmark = pytest.mark.unit

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "dog", None]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 3},
        "born": {"type": "string", "format": "date"},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
    "$defs": {"tag": {"type": "string", "pattern": "^[a-z]{1,4}$"}},
}
INT64 = {"type": "integer", "minimum": 2**53 - 1, "maximum": 2**63 - 1}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def outputs(tokenizer: Path) -> StructuredOutputs:
    return StructuredOutputs(str(tokenizer), MODEL)


def fits(schema: Any) -> Callable[[str], None]:
    return lambda text: jsonschema.validate(json.loads(text), schema)


def matches(pattern: str) -> Callable[[str], None]:
    def check(text: str) -> None:
        assert re.fullmatch(pattern, text), text

    return check


FORMS: dict[str, tuple[str, str, Callable[[str], None]]] = {
    "schema": ("json_schema", json.dumps(PERSON), fits(PERSON)),
    "schema of a choice": ("json_schema", '{"anyOf": [{"type": "boolean"}, {"const": 7}]}', matches("true|false|7")),
    "schema of large numbers": ("json_schema", json.dumps(INT64), fits(INT64)),
    "regex": ("regex", r"[a-f]{2,4}-(\d{3}|x)", matches(r"[a-f]{2,4}-(\d{3}|x)")),
    "regex with slashes": ("regex", r"/[\w./]{1,3}/\"", matches(r"/[a-zA-Z0-9_./]{1,3}/\"")),
    "choice": ("choice", json.dumps(["yes", "no", 'say "no"\n', "größer"]), matches('yes|no|say "no"\n|größer')),
    "lark": ("grammar", 'start: "a" (b | "c")~1..5\nb: "b"', matches("a[bc]{1,5}")),
    "gbnf": ("grammar", 'root ::= "no" | "yes" [0-9]{1,3}', matches("no|yes[0-9]{1,3}")),
    "llguidance": ("grammar", '{"grammars": [{"lark_grammar": "start: /[xy]{3}/"}]}', matches("[xy]{3}")),
}


@pytest.mark.parametrize("form", FORMS)
def test_whatever_is_drawn_keeps_the_form_and_ends(form: str, tokenizer: Path, outputs: StructuredOutputs) -> None:
    kind, text, check = FORMS[form]
    reader, grammar = Tokenizer.from_file(str(tokenizer / "tokenizer.json")), grammar_of(kind, text)
    for seed in range(8):
        check(reader.decode(walk(outputs, grammar, random.Random(seed))))


@pytest.mark.parametrize(
    "bounds",
    [
        {"exclusiveMinimum": 0},
        {"exclusiveMinimum": 0, "maximum": 0.5},
        {"exclusiveMinimum": 2, "exclusiveMaximum": 2.5},
        {"exclusiveMinimum": 5, "exclusiveMaximum": 5.0000001},
        {"exclusiveMinimum": -0.5, "exclusiveMaximum": 0},
        {"exclusiveMinimum": -7.25, "exclusiveMaximum": -7},
        {"exclusiveMinimum": 0, "maximum": 1, "multipleOf": 0.25},
        {"allOf": [{"exclusiveMinimum": 3}, {"maximum": 3.5}]},
        {"exclusiveMinimum": 9, "maximum": 11, "type": "integer"},
    ],
    ids=str,
)
def test_an_exclusive_bound_is_never_drawn(bounds: dict[str, Any], tokenizer: Path, outputs: StructuredOutputs) -> None:
    schema = {"type": "number", **bounds}
    reader, grammar = (
        Tokenizer.from_file(str(tokenizer / "tokenizer.json")),
        grammar_of("json_schema", json.dumps(schema)),
    )
    for seed in range(40):
        fits(schema)(reader.decode(walk(outputs, grammar, random.Random(seed))))


ADDED: dict[str, tuple[str, str, str]] = {
    "choice": ("choice", '["x<think>y"]', "x<think>y"),
    "regex": ("regex", "<think>[ab]</think>", "<think>[ab]</think>"),
    "schema": ("json_schema", '{"const": "a <think> b"}', '"a <think> b"'),
    "lark": ("grammar", 'start: "x<think>y"', "x<think>y"),
    "lark with options": ("grammar", '%llguidance {"allow_initial_skip": false}\nstart: "x<think>y"', "x<think>y"),
    "named": ("grammar", '{"grammars": [{"name": "n", "json_schema": {"const": "<think>"}}]}', '"<think>"'),
    "gbnf": ("grammar", 'root ::= "<think>" [ab]', "<think>[ab]"),
}


@pytest.mark.parametrize("form", ADDED)
@pytest.mark.parametrize("are_special", [True, False])
def test_text_that_an_added_token_spells_is_spelled_by_others(form: str, are_special: bool, tmp_path: Path) -> None:
    """To llguidance `<think>` is no text, whether its tokenizer says that it is special or not."""
    reader = byte_tokenizer(["<think>", "</think>"], are_special=are_special)
    reader.save(str(tmp_path / "tokenizer.json"))
    kind, text, pattern = ADDED[form]
    for seed in range(4):
        ids = walk(StructuredOutputs(str(tmp_path), MODEL), grammar_of(kind, text), random.Random(seed))
        assert re.fullmatch(pattern, reader.decode(ids, skip_special_tokens=False))


@pytest.mark.parametrize("key", ["minimum", "maximum"])
def test_a_bound_of_many_digits_is_kept_to_the_last(key: str, outputs: StructuredOutputs, tokenizer: Path) -> None:
    """Whose double llguidance would take for the one beside it, above or below."""
    reader = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    for bound in (0.9424502837770503, 0.9433567169983137, 0.9009004917506227):
        side = 1 if key == "minimum" else -1
        beyond = math.nextafter(bound, -side * math.inf)
        for number, is_allowed in ((beyond, False), (bound + side * 1e-14, True)):
            grammar = grammar_of("json_schema", json.dumps({"type": "number", key: bound}))
            matcher, ids = outputs.matcher(grammar), reader.encode(repr(number)).ids
            assert (matcher.validate_tokens(ids) == len(ids)) == is_allowed


def test_the_numbers_of_schemas_within_lark_are_read_likewise() -> None:
    text = 'start: "a" %json {"const": 9007199254740993} "b"'
    with pytest.raises(InvalidRequest, match=r"^structured\.grammar\.%json\.const is 9007199254740993; numbers beyond"):
        grammar_of("grammar", text)
    kept = 'start: "a" %json {"type": "number", "minimum": 5.5} "b" %json { "const": 1.5 }'
    assert grammar_of("grammar", kept) == grammar_of("grammar", kept.replace("{ ", "{").replace(" }", "}"))
    changed = grammar_of("grammar", kept.replace('"minimum": 5.5', '"exclusiveMinimum": 5'))
    assert changed == grammar_of("grammar", kept.replace("5.5", "5.00000000000001"))


def test_who_takes_over_knows_what_the_one_before_knew(outputs: StructuredOutputs) -> None:
    grammar = grammar_of("json_schema", json.dumps(PERSON))
    ids, one = walk(outputs, grammar, random.Random(3)), outputs.constraint(grammar)
    for end in range(len(ids)):
        assert allowed(outputs.constraint(grammar), ids[:end]) == allowed(one, ids[:end])


def test_a_step_that_was_given_up_is_asked_for_again(outputs: StructuredOutputs) -> None:
    grammar = grammar_of("regex", "[ab]+c")
    ids, constraint = walk(outputs, grammar, random.Random(1)), outputs.constraint(grammar)
    expected = allowed(constraint, ids[:1])
    for _ in range(20):
        constraint.after(ids)  # nobody waits for it
    assert allowed(constraint, ids[:1]) == expected


def test_tokens_that_break_the_form_are_told_and_nothing_follows(outputs: StructuredOutputs) -> None:
    constraint = outputs.constraint(grammar_of("regex", "[ab]+c"))
    assert allowed(constraint, [200, 201]) == []
    assert constraint.error.startswith("the answer's form cannot be kept: ")


@pytest.mark.parametrize(
    ("form", "text", "said"),
    [
        ("json_schema", '{"type":', "structured.json_schema cannot be read: Expecting value: line 1 column 9"),
        ("json_schema", "[1]", "structured.json_schema is no object; give a JSON Schema"),
        ("json_schema", '{"type": "objec"}', "structured.json_schema cannot be kept: Invalid type: objec"),
        ("json_schema", '{"not": {}}', 'structured.json_schema cannot be kept: Unimplemented keys: ["not"]'),
        ("json_schema", '{"$ref": "#/$defs/x"}', "structured.json_schema cannot be kept: Pointer '/$defs/x' does not"),
        ("json_schema", '{"enum": [9007199254740993]}', "structured.json_schema.enum.0 is 9007199254740993; numbers"),
        ("json_schema", " " * 131_073, "structured.json_schema has 131073 characters; give at most 131072"),
        ("json_schema", "[" * 100_000, "structured.json_schema cannot be read: "),
        ("regex", "(a", "structured.regex cannot be kept: "),
        ("regex", "(?=a)b", "structured.regex cannot be kept: "),
        ("choice", "[]", "structured.choice has 0 texts; give 1 to 1024, none empty"),
        ("choice", '["a", ""]', "structured.choice has 2 texts; give 1 to 1024, none empty"),
        ("grammar", "start: x", 'structured.grammar cannot be kept: at 1(8): unknown name: "x"'),
        ("grammar", "", "structured.grammar cannot be read as GBNF: No 'root' rule found"),
        ("grammar", "\n" * 131_072, "structured.grammar has 131072 characters of GBNF; give at most 4096"),
        ("json_schema", "false", "structured.json_schema is no object; give a JSON Schema"),
        (
            "grammar",
            "start: start",
            "structured.grammar cannot be kept: no text has this form; give a rule or reference",
        ),
        (
            "json_schema",
            '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}',
            "structured.json_schema cannot be kept: no text has this form; give a rule or reference that ends",
        ),
        ("grammar", '{"a": 1}', "structured.grammar cannot be kept: missing field `grammars`"),
    ],
)
def test_what_means_nothing_is_refused(form: str, text: str, said: str, tokenizer: Path) -> None:
    tokens = vocabulary((tokenizer / "tokenizer.json").read_text(), MODEL.vocab_size, MODEL.eos_token_ids)
    with pytest.raises(InvalidRequest) as caught:
        check_grammar(form, grammar_of(form, text), tokens)
    assert str(caught.value).startswith(said)


def test_a_tokenizer_may_have_more_tokens_than_its_model(tokenizer: Path) -> None:
    """One that was given a token for padding, say, which is never drawn."""
    reader, small = Tokenizer.from_file(str(tokenizer / "tokenizer.json")), replace(MODEL, vocab_size=260)
    assert reader.get_vocab_size() > small.vocab_size
    grammar = grammar_of("choice", '["yes"]')
    check_grammar("choice", grammar, vocabulary(reader.to_str(), small.vocab_size, small.eos_token_ids))
    constraint = StructuredOutputs(str(tokenizer), small).constraint(grammar)
    bits = constraint.after([]).bits()
    assert len(bits) == 33
    assert [i for i in range(small.vocab_size) if bits[i >> 3] >> (i & 7) & 1] == [reader.token_to_id("y")]


def test_a_tokenizer_of_no_known_kind_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="structured is given but this model's tokenizer is of no known kind"):
        vocabulary("{}", 300, (0,))
