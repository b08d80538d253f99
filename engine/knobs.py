"""A knob is one setting of one part: its name, default, unit, range and meaning stand in the options class of the part
that reads it, and nowhere else.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class DecodeOptions:
        max_batch_size: int = knob(64, "that decode at once; more wait, with their KV, in pages", unit="requests", ge=1)

        def __post_init__(self) -> None:
            check(self)

The cluster's spec (cluster/spec/knobs.py), the flags of the command (kvrelay/cli/knob_flags.py), the tables of
docs/serving.md (docs/fill_knobs.py), what a worker says of itself and the simulator are made from such classes whole.
Values only; it imports nothing of this project.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """`kind` is the type that a value has; of the bounds at most one on each side is given."""

    name: str
    kind: Any
    default: Any
    meaning: str
    unit: str = ""
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    choices: tuple[str, ...] = ()  # the values that a text may have; empty: any

    @property
    def bounds(self) -> dict[str, float]:
        given = {"ge": self.ge, "gt": self.gt, "le": self.le, "lt": self.lt}
        return {name: bound for name, bound in given.items() if bound is not None}

    @property
    def range(self) -> str:
        """`1 or more`, `a number from 0 to below 1`, `watermark or worst_case`; empty where everything is allowed."""
        if self.choices:
            return " or ".join(self.choices)
        low = f"{self.ge:g}" if self.ge is not None else f"above {self.gt:g}" if self.gt is not None else ""
        high = f"{self.le:g}" if self.le is not None else f"below {self.lt:g}" if self.lt is not None else ""
        if low and high:
            return f"a number from {low} to {high}"
        return f"{low} or more" if self.ge is not None else low or high

    def why_not(self, value: Any) -> str:
        """One sentence if the value is out of range; else nothing."""
        if self.choices:
            is_good = value in self.choices
        elif value is None or not self.bounds:
            return ""
        else:
            is_good = (
                (self.ge is None or value >= self.ge)
                and (self.gt is None or value > self.gt)
                and (self.le is None or value <= self.le)
                and (self.lt is None or value < self.lt)
            )
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        return "" if is_good else f"{self.name} is {shown}; give {self.range}"


def knob(
    default: T,
    meaning: str,
    *,
    unit: str = "",
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
) -> T:
    """The default of a field of an options class, with what everybody who shows or checks it needs to know."""
    metadata = {"knob": {"default": default, "meaning": meaning, "unit": unit, "ge": ge, "gt": gt, "le": le, "lt": lt}}
    if isinstance(default, dict):
        return typing.cast(T, dataclasses.field(default_factory=default.copy, metadata=metadata))
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
