"""checked reads the numbers of a JSON Schema before llguidance does, to which each is a double, or of many digits the
one beside it: a value that is not kept is refused by its place, a bound becomes one that is, an exclusive bound that
it may break an inclusive one. So an answer always keeps the schema, though not each that does is drawn. Annotations
(`default`, `examples`) are nobody's to read; a `format` that llguidance does not know is one, and is taken out."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from decimal import ROUND_CEILING, Decimal
from typing import Any, NoReturn, TypeGuard
from urllib.parse import unquote

from engine.sampling.endless import has_an_end
from engine.types import InvalidRequest

LARGEST = 2**53 - 1  # a double holds it and all whole numbers below
BOUNDS = {  # what is inclusive there, and on which side is what it allows
    "minimum": ("minimum", 1),
    "exclusiveMinimum": ("minimum", 1),
    "maximum": ("maximum", -1),
    "exclusiveMaximum": ("maximum", -1),
}
EXACT = ("const", "enum", "multipleOf")
FORMATS = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")  # llguidance's
DIGITS = 15  # of a number in decimal, which a double keeps and llguidance reads
DOUBLE_BITS = 53
LARGEST_BOUND = 9223372030000000000  # that llguidance takes, of so few
NEXT_TO_0 = Decimal("1e-22")  # llguidance writes no exponents, and its patterns are as deep as a bound has digits
BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
WITHIN = ("anyOf", "oneOf", "allOf", "prefixItems", "items", "additionalItems", "additionalProperties")


def checked(schema: dict[str, Any], at: str = "structured.json_schema") -> dict[str, Any]:
    """The same one, changed in place. Raises InvalidRequest."""
    parts = _Parts(schema)
    each = list(parts.each(at))
    for place, part in each:
        _check_numbers(part, place)
        _narrow(part, place)
        _make_inclusive(part, "minimum", "exclusiveMinimum", 1)
        _make_inclusive(part, "maximum", "exclusiveMaximum", -1)
        if isinstance(name := part.get("format"), str) and name not in FORMATS:
            del part["format"]
    if not has_an_end(schema, (part for _, part in each), parts.named):
        raise InvalidRequest(f"{at} cannot be kept: no text has this form; give a rule or reference that ends")
    return schema


class _Parts:
    """The schemas in one, each once: those that a `$ref` names, too, wherever they stand, as OpenAPI's components."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._seen: set[int] = set()
        self._named: list[tuple[str, str]] = []  # by a `$ref`: where that stands, and what it names

    def each(self, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """With its place."""
        yield from self._within(self._root, place)
        while self._named:
            at, pointer = self._named.pop()
            yield from self._within(self._at(pointer), at)

    def _within(self, schema: Any, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
        if isinstance(schema, list):
            for number, each in enumerate(schema):
                yield from self._within(each, f"{place}.{number}")
        if not isinstance(schema, dict) or id(schema) in self._seen:
            return
        self._seen.add(id(schema))
        yield place, schema
        for key, held in schema.items():
            if key in BY_NAME and isinstance(held, dict):
                for name, each in held.items():
                    yield from self._within(each, f"{place}.{key}.{name}")
            elif key in WITHIN:
                yield from self._within(held, f"{place}.{key}")
            elif key == "$ref" and isinstance(held, str) and held.startswith("#/"):
                self._named.append((f"{place}.$ref", held[2:]))

    def named(self, reference: str) -> Any:
        """By a `$ref`; None: nothing."""
        return self._root if reference == "#" else self._at(reference[2:]) if reference.startswith("#/") else None

    def _at(self, pointer: str) -> Any:
        """What a JSON pointer names (RFC 6901); None: nothing."""
        found: Any = self._root
        for token in unquote(pointer).split("/"):
            token = token.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and token.isdecimal():
                found = dict(enumerate(found)).get(int(token))
            else:
                found = found.get(token) if isinstance(found, dict) else None
        return found


def _check_numbers(schema: Mapping[str, Any], place: str) -> None:
    for key in EXACT:
        for at, number in _numbers(schema.get(key), f"{place}.{key}"):
            if abs(number) > LARGEST:
                _refuse(at, number)
            if not _is_read(number):
                why = f"it is not kept to the last digit, so give at most {DIGITS} digits, or ask for a string"
                raise InvalidRequest(f"{at} is {number!r}; {why}")


def _is_read(number: float) -> bool:
    """Whether llguidance gets this double of its digits: they are made one, and then shifted by a power of ten."""
    if isinstance(number, int) or not math.isfinite(number):
        return True
    _, digits, shift = Decimal(repr(number)).as_tuple()
    whole, power = float(int("".join(map(str, digits)))), float(f"1e{abs(int(shift))}")
    return (whole * power if int(shift) >= 0 else whole / power) == abs(number)


def _refuse(at: str, number: float) -> NoReturn:
    why = f"numbers beyond {LARGEST} are not kept to the last digit, so ask for a string"
    raise InvalidRequest(f"{at} is {json.dumps(number)[:40]}; {why}")


def _narrow(schema: dict[str, Any], place: str) -> None:
    """A bound of many digits becomes an inclusive one of few, which is a double, and allows less."""
    for key, (inclusive, side) in BOUNDS.items():
        bound = schema.get(key)
        if not _is_number(bound) or (abs(bound) <= LARGEST and _is_read(bound)):
            continue
        if not math.isfinite(bound):
            _refuse(f"{place}.{key}", bound)
        least = _least_fraction(side * bound) if abs(bound) <= LARGEST else _least_whole(side, bound, key != inclusive)
        if least > LARGEST_BOUND:
            _refuse(f"{place}.{key}", bound)
        del schema[key]
        given = schema.get(inclusive)
        schema[inclusive] = side * max(least, side * given if _is_number(given) else least)


def _least_fraction(bound: float) -> float:
    """Of few digits, and above it."""
    exact = Decimal(repr(bound))
    unit = max(exact.adjusted() + 1 - DIGITS, NEXT_TO_0.adjusted())
    return float(exact.quantize(Decimal(10) ** unit, ROUND_CEILING))


def _least_whole(side: int, bound: float, is_exclusive: bool) -> int:
    least = side * (math.ceil(bound) if side > 0 else math.floor(bound)) + is_exclusive
    least = max(least, -LARGEST_BOUND)
    unit = int(10 ** max(len(str(abs(least))) - DIGITS, least.bit_length() - DOUBLE_BITS))
    return -(-least // unit) * unit


def _numbers(value: Any, place: str) -> Iterator[tuple[str, int | float]]:
    if isinstance(value, int | float):
        yield place, value
    elif isinstance(value, list | dict):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _numbers(each, f"{place}.{key}")


def _make_inclusive(schema: dict[str, Any], inclusive: str, exclusive: str, side: int) -> None:
    """Of a whole number, if what it allows, which is `side` of it, leads away from 0: llguidance draws the bound itself
    where the other one is less than 1 away. The number next to it is a bound that is kept."""
    bound = schema.get(exclusive)
    if bound is True:  # as in draft 4
        bound = schema.get(inclusive)
    given = schema.get(inclusive, bound)
    if not _is_number(bound) or not _is_number(given) or bound % 1 or bound * side < 0:
        return
    del schema[exclusive]
    schema[inclusive] = max(given * side, _next(int(bound), side) * side) * side


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _next(whole: int, side: int) -> int | float:
    step = Decimal(10) ** min(0, len(str(abs(whole))) - DIGITS) if whole else NEXT_TO_0
    number = whole + side * step
    return int(number) if step == 1 else float(number)
