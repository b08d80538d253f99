"""checked reads the numbers of a JSON Schema before llguidance does, to which each is a double: what a double need not
hold is refused by its place. Annotations (`default`, `examples`) are nobody's to read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from engine.types import InvalidRequest

LARGEST = 2**53 - 1  # a double holds it and all whole numbers below
LARGEST_INT64 = 2**63 - 1  # llguidance keeps it as a maximum, which many schemas have
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
VALUES = ("const", "enum")
BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
WITHIN = ("anyOf", "oneOf", "allOf", "prefixItems", "items", "additionalItems", "additionalProperties")


def checked(schema: dict[str, Any]) -> dict[str, Any]:
    """Raises InvalidRequest."""
    for place, part in _parts(schema, "structured.json_schema"):
        _check_numbers(part, place)
    return schema


def _parts(schema: Any, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas in it, itself the first, each with its place."""
    if isinstance(schema, list):
        for number, each in enumerate(schema):
            yield from _parts(each, f"{place}.{number}")
    if not isinstance(schema, dict):
        return
    yield place, schema
    for key, held in schema.items():
        if key in BY_NAME and isinstance(held, dict):
            for name, each in held.items():
                yield from _parts(each, f"{place}.{key}.{name}")
        elif key in WITHIN:
            yield from _parts(held, f"{place}.{key}")


def _check_numbers(schema: Mapping[str, Any], place: str) -> None:
    for key in (*BOUNDS, *VALUES):
        for at, number in _numbers(schema.get(key), f"{place}.{key}"):
            if abs(number) > LARGEST and (key, number) != ("maximum", LARGEST_INT64):
                raise InvalidRequest(
                    f"{at} is {json.dumps(number)[:40]}; numbers beyond {LARGEST} are not kept to the last digit,"
                    " so ask for a string"
                )


def _numbers(value: Any, place: str) -> Iterator[tuple[str, int | float]]:
    if isinstance(value, int | float):
        yield place, value
    elif isinstance(value, list | dict):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _numbers(each, f"{place}.{key}")
