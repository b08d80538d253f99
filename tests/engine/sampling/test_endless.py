"""A schema that no finite text keeps is refused; one that may end is not, however it refers to itself."""

from __future__ import annotations

from typing import Any

import pytest

from engine.sampling.json_schema import checked
from engine.types import InvalidRequest

pytestmark = pytest.mark.unit


def an_object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


ITSELF = {"$ref": "#"}
NODE = {"$ref": "#/$defs/node"}


@pytest.mark.parametrize(
    "schema",
    [
        an_object(["a"], a=ITSELF),
        an_object(["a", "b"], a={"type": "string"}, b={"anyOf": [ITSELF, {"type": "array", "items": False} | ITSELF]}),
        {"type": "array", "items": ITSELF, "minItems": 1},
        {"type": ["array"], "prefixItems": [{"type": "null"}, ITSELF], "minItems": 2},
        NODE | {"$defs": {"node": {"allOf": [an_object(["next"], next=NODE)]}}},
        NODE | {"$defs": {"node": {"type": "array", "items": an_object(["next"], next=NODE), "minItems": 3}}},
        an_object(["a"], a={"$ref": "#/components/x"}) | {"components": {"x": an_object(["a"], a=ITSELF)}},
    ],
)
def test_one_whose_every_text_holds_another_of_itself_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"^structured\.json_schema cannot be kept: no text has this form; give"):
        checked(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": ITSELF}, "required": ["a"]},  # a number keeps it
        an_object([], a=ITSELF),
        an_object(["a"], a={"anyOf": [ITSELF, {"type": "null"}]}),
        an_object(["a"], a={"type": "array", "items": ITSELF, "maxItems": 1}),
        {"type": ["array", "null"], "items": ITSELF, "minItems": 1},
        {"type": "array", "prefixItems": [{"type": "null"}, ITSELF], "minItems": 1},
        {"type": "object", "properties": {"a": ITSELF}, "required": ["a"], "const": {"a": {}}},
        NODE | {"$defs": {"node": {"oneOf": [an_object(["next"], next=NODE), {"type": "string"}]}}},
        an_object(["a.b", "a"], **{"a.b": {"type": "null"}, "a": an_object(["b"], b={"type": "null"})}),
    ],
)
def test_one_that_may_end_is_kept(schema: dict[str, Any]) -> None:
    assert checked(schema) is schema
