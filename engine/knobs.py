"""A knob is one setting of one part: its name, default, unit, range and meaning stand in the options class of the part
that reads it, and nowhere else.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class DecodeOptions:
        max_batch_size: int = knob(64, "that decode at once; more wait, with their KV, in pages", unit="requests", ge=1)

        def __post_init__(self) -> None:
            check(self)

The cluster's spec (cluster/spec/knobs.py), the flags of the command (kvrelay/cli/spec_flags.py), the tables of
docs/serving.md (docs/fill_serving.py), what a worker says of itself and the simulator are made from such classes whole.
Values only; it imports nothing of this project.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import typing
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

T = TypeVar("T")
KEEPS = {"ge": operator.ge, "gt": operator.gt, "le": operator.le, "lt": operator.lt}


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """`kind` is the type that a value has; of the bounds at most one on each side is given."""

    name: str
    kind: Any
    default: Any
    meaning: str
    unit: str = ""
    scope: str = ""  # where several parts of a spec share an options class: which of them has the key
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    choices: tuple[str, ...] = ()  # the values that a text may have; empty: any
    changes: Literal["", "now", "rolling"] = ""  # while a cluster runs; empty: as the part of the spec has it
    fixed: str = ""  # why it cannot change while a cluster runs; empty: it can

    @property
    def bounds(self) -> dict[str, float]:
        given = {"ge": self.ge, "gt": self.gt, "le": self.le, "lt": self.lt}
        return {name: bound for name, bound in given.items() if bound is not None}

    @property
    def range(self) -> str:
        return range_text(self.bounds, self.choices)

    def why_not(self, value: Any) -> str:
        """One sentence if the value is out of range; else nothing."""
        if value is None:  # whether a knob may be none is its type's to say, and a type checker's
            return ""
        if self.choices:
            wanted = ", ".join(self.choices)
            return "" if value in self.choices else f"{self.name} is {value!r}; give one of {wanted}"
        if all(KEEPS[sign](value, bound) for sign, bound in self.bounds.items()):
            return ""
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        a_number = "a number " if self.range.startswith("from") else ""
        return f"{self.name} is {shown}; give {a_number}{self.range}"


def range_text(bounds: Mapping[str, float], choices: Sequence[str] = ()) -> str:
    """`1 or more`, `from 0 to below 1`, `watermark or worst_case`; empty where everything is allowed."""
    if choices:
        return " or ".join(choices)
    shown = {sign: str(bound) if isinstance(bound, int) else f"{bound:g}" for sign, bound in bounds.items()}
    low = shown["ge"] if "ge" in bounds else f"above {shown['gt']}" if "gt" in bounds else ""
    high = shown["le"] if "le" in bounds else f"below {shown['lt']}" if "lt" in bounds else ""
    if low and high:
        return f"{low} and up to {high}" if "gt" in bounds else f"from {low} to {high}"
    return f"{low} or more" if "ge" in bounds else low or high


def knob(
    default: Any,
    meaning: str,
    *,
    unit: str = "",
    scope: str = "",
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    changes: Literal["", "now", "rolling"] = "",
    fixed: str = "",
) -> Any:
    """The default of a field of an options class, with what everybody who shows, checks or changes it needs to know."""
    about = {"default": default, "meaning": meaning, "unit": unit, "scope": scope, "changes": changes, "fixed": fixed}
    metadata = {"knob": {**about, "ge": ge, "gt": gt, "le": le, "lt": lt}}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def knobs_of(options: type[Any]) -> Mapping[str, Knob]:
    """Every knob of an options class, by name, in the order of the class."""
    return _knobs_of(typing.cast(Hashable, options))


@functools.cache
def _knobs_of(options: Hashable) -> Mapping[str, Knob]:
    assert isinstance(options, type)
    hints = typing.get_type_hints(options)
    return {
        field.name: Knob(
            name=field.name,
            kind=hints[field.name],
            choices=tuple(c for c in typing.get_args(hints[field.name]) if isinstance(c, str)),
            **field.metadata["knob"],
        )
        for field in dataclasses.fields(options)
        if "knob" in field.metadata
    }


def check(options: Any) -> None:
    """Raises ValueError, one sentence that names the key, the value and the mend, for the first value out of range."""
    for name, known in knobs_of(type(options)).items():
        if why := known.why_not(getattr(options, name)):
            raise ValueError(why)


def as_text(options: Any) -> dict[str, str]:
    """Every knob and its value, as a worker tells it to whoever predicts it; `read` makes the options of it again."""
    return {name: str(getattr(options, name)) for name in knobs_of(type(options))}


def read(options: type[T], values: Mapping[str, Any]) -> T:
    """Options of values by name, as text or as they are; other names are passed over, knobs not named keep their
    defaults. Raises ValueError."""
    known = knobs_of(options)
    return options(**{name: _read(known[name], value) for name, value in values.items() if name in known})


def _read(known: Knob, value: Any) -> Any:
    kinds = typing.get_args(known.kind) or (known.kind,)
    if not isinstance(value, str) or known.choices or str in kinds:
        return value
    if value == "None" and type(None) in kinds:
        return None
    if bool in kinds:
        return value == "True"
    try:
        return int(value) if int in kinds else float(value)
    except ValueError:
        raise ValueError(f"{known.name} is {value!r}; give a number") from None
