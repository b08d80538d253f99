"""A schema's numbers are kept to the last digit, or it is refused by the place of one that would not be."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher

from engine.sampling.json_schema import FORMATS, LARGEST, LARGEST_BOUND, checked
from engine.types import InvalidRequest

pytestmark = pytest.mark.unit

LARGE = 1103945372461461511  # whose double is another number
UNREAD = 0.9424502837770503  # which llguidance reads as the double beside it


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"const": LARGE}, "const"),
        ({"type": "integer", "enum": [1, LARGE]}, "enum.1"),
        ({"const": [{"a": -LARGE}]}, "const.0.a"),
        ({"properties": {"enum": {"enum": [LARGE]}}}, "properties.enum.enum.0"),
        ({"patternProperties": {"^a": {"minimum": 10**19}}}, "patternProperties.^a.minimum"),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"maximum": -(2**63)}}}, "$defs.n.maximum"),
        ({"definitions": {"n": {"const": -LARGE}}}, "definitions.n.const"),
        ({"items": {"exclusiveMaximum": -1e300}}, "items.exclusiveMaximum"),
        ({"items": [True, {"multipleOf": LARGE}]}, "items.1.multipleOf"),
        ({"type": "number", "maximum": float("inf")}, "maximum"),  # as 1e999 is read
        ({"exclusiveMinimum": float("nan")}, "exclusiveMinimum"),
        ({"anyOf": [{"additionalProperties": {"const": LARGE}}]}, "anyOf.0.additionalProperties.const"),
    ],
)
def test_a_number_that_a_double_need_not_hold_is_refused_by_its_place(schema: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checked(schema)
    assert str(caught.value).startswith(f"structured.json_schema.{place} is ")
    assert str(caught.value).endswith(f"; numbers beyond {LARGEST} are not kept to the last digit, so ask for a string")


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"const": UNREAD}, "const is 0.9424502837770503"),
        ({"enum": [0.5, -UNREAD]}, "enum.1 is -0.9424502837770503"),
    ],
)
def test_a_fraction_that_would_be_read_as_the_next_one_is_refused(schema: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checked(schema)
    why = "it is not kept to the last digit, so give at most 15 digits, or ask for a string"
    assert str(caught.value) == f"structured.json_schema.{place}; {why}"


@pytest.mark.parametrize(
    "schema",
    [
        {"default": LARGE, "examples": [{"const": LARGE}], "type": "integer"},
        {"properties": {"const": {"type": "integer"}, "maximum": {"default": LARGE}}, "required": ["const"]},
        {"enum": ["1103945372461461511", True, None, LARGEST, -LARGEST, 1.5, 0.1 + 0.2, 1e-7, -0.0]},
        {"type": "integer", "minimum": -LARGEST, "maximum": LARGEST},
        {"const": {"const": "x", "default": 1}},
    ],
)
def test_all_others_stay_as_they_are(schema: dict[str, Any]) -> None:
    assert checked(schema) == schema


@pytest.mark.parametrize(
    ("bounds", "kept"),
    [
        ({"exclusiveMinimum": 0}, {"minimum": 1e-22}),
        ({"exclusiveMinimum": 0, "maximum": 0.5}, {"maximum": 0.5, "minimum": 1e-22}),
        ({"exclusiveMaximum": -12.0}, {"maximum": -12.0000000000001}),
        ({"exclusiveMinimum": LARGEST}, {"minimum": LARGEST + 1}),
        ({"minimum": -(2**63), "maximum": 2**64}, {"minimum": -LARGEST_BOUND, "maximum": LARGEST_BOUND}),
        ({"maximum": LARGE}, {"maximum": 1103945372460000000}),
        ({"exclusiveMinimum": 10**17}, {"minimum": 100000000000010000}),
        ({"exclusiveMinimum": 10**17, "minimum": 2 * 10**17}, {"minimum": 2 * 10**17}),
        ({"maximum": 10**16 + 0.5, "exclusiveMaximum": 5}, {"maximum": 10**16, "exclusiveMaximum": 5}),
        ({"minimum": UNREAD, "exclusiveMaximum": 1.5}, {"minimum": 0.942450283777051, "exclusiveMaximum": 1.5}),
        ({"exclusiveMaximum": UNREAD}, {"maximum": 0.94245028377705}),
        ({"exclusiveMaximum": -9.7137450105889e-12}, {"maximum": -9.7137450106e-12}),
        ({"exclusiveMinimum": True, "minimum": 5}, {"minimum": 5.00000000000001}),
        ({"exclusiveMinimum": 5, "minimum": 6}, {"minimum": 6}),
        ({"exclusiveMaximum": -5, "maximum": -6}, {"maximum": -6}),
    ],
)
def test_a_bound_that_would_be_allowed_is_the_next_number(bounds: dict[str, Any], kept: dict[str, Any]) -> None:
    assert checked({"items": bounds}) == {"items": kept}


@pytest.mark.parametrize(
    "bounds",
    [
        {"exclusiveMinimum": 0.5},
        {"exclusiveMinimum": -5, "exclusiveMaximum": 5},
        {"exclusiveMinimum": False, "minimum": 5},
        {"exclusiveMinimum": True},
        {"exclusiveMinimum": "5"},
        {"exclusiveMinimum": 5, "minimum": "6"},
    ],
)
def test_other_bounds_stay(bounds: dict[str, Any]) -> None:
    assert checked(dict(bounds)) == bounds


@pytest.mark.parametrize("named", ["#/components/schemas/y", "#/components/%73chemas/y", "#/list/0", "#/a~1b"])
def test_what_a_ref_names_is_read_wherever_it_stands(named: str) -> None:
    def number() -> dict[str, Any]:
        return {"type": "number", "exclusiveMinimum": 5, "maximum": 5.5}

    places = [number(), number(), number()]
    schema = {"$ref": named, "components": {"schemas": {"y": places[0]}}, "list": [places[1]], "a/b": places[2]}
    checked(schema)
    assert sum(place != number() for place in places) == 1, "the one that is named, and no other"


def test_a_ref_to_itself_or_to_nothing_ends() -> None:
    refs = {"next": {"$ref": "#/properties/next"}, "gone": {"$ref": "#/nowhere/0"}, "self": {"$ref": "#"}}
    assert checked({"properties": dict(refs)}) == {"properties": refs}


@pytest.mark.parametrize("name", ["byte", "binary", "password", "regex", "int32", "our-own"])
def test_a_format_that_is_not_known_is_an_annotation(name: str) -> None:
    text = {"type": "string", "pattern": "^a", "format": name}
    left = {"type": "string", "pattern": "^a"}
    schema = {"properties": {"format": text}, "items": {"$ref": "#/components/text"}, "components": {"text": {**text}}}
    read = checked(schema)
    assert (read["properties"]["format"], read["components"]["text"]) == (left, left)


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_that_is_known_is_kept(name: str) -> None:
    schema = {"type": "string", "format": name}
    assert checked({"anyOf": [{**schema}]}) == {"anyOf": [schema]}
    grammar = LLMatcher.grammar_from_json_schema(schema)
    assert not LLMatcher.validate_grammar(grammar)
