"""Keys of a spec that are knobs of the parts that run (engine/knobs.py): named, checked and explained there, read here.

@with_knobs(TransferOptions)
class TransferSpec(Spec): ...

spec.transfer.options(TransferOptions)     the object that the part itself takes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, create_model

from engine.knobs import knobs_of

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


class Spec(BaseModel):
    """A part of a spec: no unknown key, never changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False)

    def knobs(self, kind: type) -> dict[str, Any]:
        """The knobs of an options class that this part has, by name, with their values."""
        return {name: getattr(self, name) for name in knobs_of(kind) if name in type(self).model_fields}

    def options(self, kind: type[T]) -> T:
        """The options object of this part's values."""
        return kind(**self.knobs(kind))


def setting(default: Any, meaning: str, *, unit: str = "", **bounds: Any) -> Any:
    """A key that only the spec has: for it the spec is the place that names default, unit, range and meaning."""
    return Field(default, description=meaning, json_schema_extra={"unit": unit}, **bounds)


def with_knobs(*options: type, scope: str = "", only: Sequence[str] = ()) -> Callable[[type[M]], type[M]]:
    """Gives a part of the spec a key for each knob of the options classes, but those of another scope; with `only`, for
    the knobs named and no other."""

    def widened(part: type[M]) -> type[M]:
        keys: dict[str, Any] = {}
        known = {name: knob for kind in options for name, knob in knobs_of(kind).items() if knob.scope in ("", scope)}
        for knob in (known[name] for name in only or known):
            bounds: Any = knob.bounds
            about = Field(description=knob.meaning, json_schema_extra={"unit": knob.unit}, **bounds)
            keys[knob.name] = (Annotated[knob.kind, about], knob.default)
        return create_model(part.__name__, __base__=part, __module__=part.__module__, __doc__=part.__doc__, **keys)

    return widened
