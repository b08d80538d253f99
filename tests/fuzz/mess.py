"""Messes are made from a seed: random protobuf messages, bytes that are none, documents with one thing wrong."""

from __future__ import annotations

import copy
import json
import random
import struct
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

MessageT = TypeVar("MessageT", bound=Message)

TEXTS = ("", "a", "äö\u20ac", "\x00", "../../etc/passwd", "%s%n", "x" * 5000, "-1", "NaN", "prefill-0", "a" * 64)
NAMES = (*TEXTS, "decode-0", "prefill", "decode", "mixed")  # in messages
WHOLE = (0, 1, 2, 3, 7, 2**31 - 1, 2**31, 2**32 - 1)
LONG = (*WHOLE, 2**53, 2**63 - 1)
REAL = (0.0, 1.0, -1.0, 0.5, 1e-30, 1e30, float("inf"), float("-inf"), float("nan"))
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    10**30,
    1e300,
    float("nan"),
    "",
    "auto",
    "\x00",
    [],
    {},
    [[]],
    {"a": {}},
    "9" * 400,
)


def message(kind: type[MessageT], chance: random.Random, fill: float = 0.5) -> MessageT:
    """Each field is set with the probability `fill`, to what is usual or far from it."""
    made = kind()
    for field in kind.DESCRIPTOR.fields:
        if chance.random() < fill:
            _set(made, field, chance, fill)
    return made


def _set(made: Message, field: Any, chance: random.Random, fill: float) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        for _ in range(chance.randrange(3)):
            key, value = (_scalar(part, chance) for part in field.message_type.fields)
            getattr(made, field.name)[key] = value
    elif field.is_repeated:
        for _ in range(chance.choice((0, 1, 2, 40))):
            if field.message_type is not None:
                part = getattr(made, field.name).add()
                part.CopyFrom(message(type(part), chance, fill / 2))
            else:
                getattr(made, field.name).append(_scalar(field, chance))
    elif field.message_type is not None:
        part = getattr(made, field.name)
        part.CopyFrom(message(type(part), chance, fill))
    else:
        setattr(made, field.name, _scalar(field, chance))


def _scalar(field: Any, chance: random.Random) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            text = chance.choice(NAMES)
            return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return chance.choice(REAL)
        case FieldDescriptor.CPPTYPE_BOOL:
            return chance.random() < 0.5
        case FieldDescriptor.CPPTYPE_ENUM:
            return chance.choice((0, 1, 2, 3, 99))
        case FieldDescriptor.CPPTYPE_INT32:
            return chance.choice((-(2**31), -1, *WHOLE[:6]))
        case FieldDescriptor.CPPTYPE_UINT32:
            return chance.choice(WHOLE)
        case FieldDescriptor.CPPTYPE_INT64:
            return chance.choice((-(2**63), -1, *LONG))
        case _:
            return chance.choice(LONG)


def noise(chance: random.Random, good: bytes) -> bytes:
    """Bytes of any kind, or `good` with some of them wrong, missing or doubled."""
    kind = chance.randrange(4)
    if kind == 0 or not good:
        return chance.randbytes(chance.choice((0, 1, 5, 200, 20_000)))
    if kind == 1:
        return good[: chance.randrange(len(good))]
    at = chance.randrange(len(good))
    if kind == 2:
        return good[:at] + chance.randbytes(3) + good[at + 1 :]
    return good[:at] + struct.pack("<Q", chance.getrandbits(64)) + good[at:] * 2


def document(good: Any, chance: random.Random) -> Any:
    """`good` with one to three of its values replaced, dropped, or put in another's place."""
    bad = copy.deepcopy(good)
    for _ in range(chance.randint(1, 3)):
        places = list(_places(bad))
        if places:
            holder, key = chance.choice(places)
            kind = chance.randrange(4)
            if kind == 0 and isinstance(holder, dict):
                del holder[key]
            elif kind == 1 and isinstance(holder, dict):
                holder[chance.choice(TEXTS)] = copy.deepcopy(chance.choice(VALUES))
            elif kind == 2:
                other, from_key = chance.choice(places)
                holder[key] = copy.deepcopy(other[from_key])
            else:
                holder[key] = copy.deepcopy(chance.choice(VALUES))
    return bad


def _places(part: Any) -> Any:
    keys = part if isinstance(part, dict) else range(len(part)) if isinstance(part, list) else ()
    for key in keys:
        yield part, key
        yield from _places(part[key])


def text(good: str, chance: random.Random) -> bytes:
    """A file that ought to read like `good`: broken JSON, odd bytes, repeated or missing lines."""
    lines = good.splitlines(keepends=True)
    match chance.randrange(4):
        case 0:
            return noise(chance, good.encode())
        case 1:
            chance.shuffle(lines)
        case 2:
            at = chance.randrange(len(lines))
            lines[at] = lines[at].replace(",", chance.choice((";", ",,", "\t", "\x00,")), 1)
        case _:
            at = chance.randrange(len(lines))
            lines[at] = json.dumps(chance.choice(VALUES)) + "\n"
    return "".join(lines).encode()
