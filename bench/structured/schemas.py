"""Random JSON Schemas of a public kind: nested objects, optional parts, enums, patterns, formats, references (recursive
ones, too), numbers in ranges, arrays of so many. What of them is long is bounded, so that answers end."""

from __future__ import annotations

import random
import re
from datetime import datetime
from typing import Any

import jsonschema

PATTERNS = (r"^[A-Z]{2}\d{3}$", r"^[a-z]+(-[a-z]+)?$", r"^(red|green|blue)\d?$", r"^#[0-9a-f]{6}$", r"^\w{3,8}$")
FORMATS = ("date", "time", "date-time", "uuid", "email", "ipv4", "hostname", "duration")
NAMES = ("id", "name", "kind", "size", "tags", "owner", "price", "at", "items", "notes", "größe", "x y", 'q"')
DEPTH = 3
FULL_TIME = re.compile(
    r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?(z|[+-]([01]\d|2[0-3]):[0-5]\d)", re.ASCII | re.IGNORECASE
)
FORMATS_CHECKED = jsonschema.FormatChecker()


def is_time(found: object) -> bool:
    """RFC 3339's full-time, as JSON Schema 7.3.1 asks: with its offset, which jsonschema's own check refuses."""
    return not isinstance(found, str) or bool(FULL_TIME.fullmatch(found))


def is_date_time(found: object) -> bool:
    """RFC 3339's date-time, which jsonschema leaves unchecked without a further package."""
    return not isinstance(found, str) or (is_date(found[:10]) and found[10:11] in ("T", "t") and is_time(found[11:]))


def is_date(found: object) -> bool:
    """RFC 3339's full-date, whose years begin with 0000, a leap year, where datetime's begin with 0001."""
    if isinstance(found, str):
        datetime.strptime("2000" + found[4:] if found.startswith("0000") else found, "%Y-%m-%d")
    return True


for named, check in (("time", is_time), ("date-time", is_date_time), ("date", is_date)):
    FORMATS_CHECKED.checks(named, raises=ValueError)(check)


def schema_of(seed: int) -> dict[str, Any]:
    chance = random.Random(seed)
    made = _object(chance, DEPTH)
    if "$ref" in str(made):
        made["$defs"] = {
            "leaf": _scalar(chance),
            "tree": {
                "type": "object",
                "properties": {
                    "value": {"$ref": "#/$defs/leaf"},
                    "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]},
                },
                "required": ["value"],
                "additionalProperties": False,
            },
        }
    return made


def _any(chance: random.Random, depth: int) -> dict[str, Any]:
    if depth and chance.random() < 0.45:
        return chance.choice((_object, _array, _choice))(chance, depth - 1)
    if chance.random() < 0.1:
        return {"$ref": f"#/$defs/{chance.choice(('leaf', 'tree'))}"}
    return _scalar(chance)


def _object(chance: random.Random, depth: int) -> dict[str, Any]:
    names = chance.sample(NAMES, chance.randint(1, 5))
    return {
        "type": "object",
        "properties": {name: _any(chance, depth) for name in names},
        "required": [name for name in names if chance.random() < 0.7],
        "additionalProperties": False,
    }


def _array(chance: random.Random, depth: int) -> dict[str, Any]:
    least = chance.randint(0, 2)
    return {
        "type": "array",
        "items": _any(chance, depth),
        "minItems": least,
        "maxItems": least + chance.randint(0, 2),
    }


def _choice(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(chance, depth) for _ in range(chance.randint(2, 3))]}


def _scalar(chance: random.Random) -> dict[str, Any]:
    low = chance.randint(-50, 50)
    return chance.choice(
        (
            {"type": "string", "maxLength": chance.randint(1, 20)},
            {"type": "string", "pattern": chance.choice(PATTERNS), "maxLength": 20},
            {"type": "string", "format": chance.choice(FORMATS), "maxLength": 40},
            {"enum": chance.sample(["a", "b b", 'c"', "d\n", 1, 2.5, None, True], chance.randint(1, 5))},
            {"const": chance.choice(["x", 3, None])},
            {"type": "integer", "minimum": low, "maximum": low + chance.randint(0, 1000)},
            {"type": "number", "minimum": low, "exclusiveMaximum": low + chance.randint(1, 100), "multipleOf": 0.01},
            {"type": ["boolean", "null"]},
        )
    )
