"""Keys of a spec that are knobs of the parts that run (engine/knobs.py): named, checked and explained there, read here.

@with_knobs(TransferOptions)
class TransferSpec(Spec): ...

spec.transfer.options(TransferOptions)     the object that the part itself takes
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, create_model, field_validator

from engine.knobs import knobs_of

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


class Spec(BaseModel):
    """A part of a spec: no unknown key, never changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False)
    changes: ClassVar[Literal["now", "rolling"]]  # while the cluster runs: a part's keys that say nothing else

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """pydantic would take YAML's `yes` for 1."""
        if isinstance(value, bool) and _is_number(cls.model_fields[info.field_name or ""].annotation):
            raise ValueError("give a number")
        return value

    def knobs(self, kind: type) -> dict[str, Any]:
        """The knobs of an options class that this part has, by name, with their values."""
        return {name: getattr(self, name) for name in knobs_of(kind) if name in type(self).model_fields}

    def options(self, kind: type[T]) -> T:
        """The options object of this part's values."""
        return kind(**self.knobs(kind))


def _is_number(annotation: Any) -> bool:
    kinds = list(_kinds(annotation))
    return bool not in kinds and (int in kinds or float in kinds)


def _kinds(annotation: Any) -> Iterator[Any]:
    """Of X | None and what else is made of others, those too."""
    yield annotation
    for inner in get_args(annotation):
        yield from _kinds(inner)


class Change(NamedTuple):
    """How a key changes while the cluster runs: at once, as workers are replaced one after another, or not at all."""

    how: Literal["now", "rolling", "fixed"]
    why_fixed: str = ""


def change_of(part: type[Spec], key: str) -> Change:
    """What the key says of itself, else what all keys of the part do (`changes`)."""
    extra = part.model_fields[key].json_schema_extra
    about: Mapping[str, Any] = extra if isinstance(extra, dict) else {}
    if why := about.get("fixed", ""):
        return Change("fixed", why)
    return Change(about.get("changes") or part.changes)


def setting(
    default: Any,
    meaning: str,
    *,
    unit: str = "",
    changes: Literal["", "now", "rolling"] = "",
    fixed: str = "",
    **bounds: Any,
) -> Any:
    """A key that only the spec has: for it the spec is the place that names default, unit, range, meaning, and how it
    changes while the cluster runs."""
    extra: Any = {"unit": unit, "changes": changes, "fixed": fixed}
    return Field(default, description=meaning, json_schema_extra=extra, **bounds)


def with_knobs(*options: type, scope: str = "", only: Sequence[str] = ()) -> Callable[[type[M]], type[M]]:
    """Gives a part of the spec a key for each knob of the options classes, but those of another scope; with `only`, for
    the knobs named and no other."""

    def widened(part: type[M]) -> type[M]:
        keys: dict[str, Any] = {}
        known = {name: knob for kind in options for name, knob in knobs_of(kind).items()}
        for knob in (known[name] for name in only or [n for n, each in known.items() if each.scope in ("", scope)]):
            bounds: Any = knob.bounds
            extra: Any = {"unit": knob.unit, "changes": knob.changes, "fixed": knob.fixed}
            about = Field(description=knob.meaning, json_schema_extra=extra, **bounds)
            keys[knob.name] = (Annotated[knob.kind, about], knob.default)
        return create_model(part.__name__, __base__=part, __module__=part.__module__, __doc__=part.__doc__, **keys)

    return widened
