"""Groups of options: a command takes whole values, and typer is given a flag for each of their fields.

    @grouped
    def bench(workload: Annotated[WorkloadOptions, Flags("trace", "seed")], router: Router) -> None: ...

Three kinds of class make a group: a dataclass whose fields are annotated for typer; one whose fields are knobs
(engine/knobs.py), whose meaning is the flag's help; a pydantic model whose fields have descriptions. Nothing is parsed
or checked here.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel, BeforeValidator

from engine.knobs import knobs_of

# of a page; a product's * stands between blanks
MARKUP = re.compile(r"`(\*)`|`|\*(?=\S)|(?<=\S)\*|\[([^\]]*)\]\([^)]*\)")
HEADING = re.compile(r"see \*([^*]+)\*")
GO_ON = ("that ", "of ", "in ", "to ", "computed ", "without ")  # how a meaning begins that goes on after its unit


class Flags:
    """Which fields a command shows (none named: all), and what it says otherwise than they do themselves. With `of` it
    takes, instead of an object, a dict of those fields of `of` that were given: no flag has a default. `prefix` stands
    before each flag's name, `panels` names the part of --help in which a field is shown."""

    def __init__(
        self,
        *names: str,
        of: type[Any] | None = None,
        defaults: Mapping[str, Any] | None = None,
        help: Mapping[str, str] | None = None,
        flags: Mapping[str, str] | None = None,
        prefix: str = "",
        panels: Mapping[str, str] | None = None,
    ) -> None:
        self.names = names
        self.of = of
        self.defaults = defaults or {}
        self.help = help or {}
        self.flags = flags or {}
        self.prefix = prefix
        self.panels = panels or {}


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer reads it: with a keyword for each flag."""
    hints = typing.get_type_hints(command, include_extras=True)
    groups: dict[str, _Group] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if group := _group_of(hints[name]):
            groups[name] = group
            parameters += group.parameters
        else:
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))

    def flat(**given: Any) -> None:
        values = {name: group.taken_from(given) for name, group in groups.items()}
        command(**given, **values)

    flat.__name__, flat.__doc__ = command.__name__, command.__doc__
    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flat


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    parameters: list[inspect.Parameter]
    kind: type[Any] | None  # None: a dict of what was given
    prefix: str

    def taken_from(self, given: dict[str, Any]) -> Any:
        own = {parameter.name.removeprefix(self.prefix): given.pop(parameter.name) for parameter in self.parameters}
        if self.kind is not None:
            return self.kind(**own)
        return {key: value for key, value in own.items() if value is not None}


def _group_of(hint: Any) -> _Group | None:
    """None: the parameter is a flag itself."""
    kind, *about = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
    shown = next((item for item in about if isinstance(item, Flags)), None)
    if shown is None and not dataclasses.is_dataclass(kind):
        return None
    shown = shown or Flags()
    fields = {each.name: each for each in _fields_of(shown.of or kind)}
    parameters = [fields[name].parameter(shown) for name in shown.names or fields]
    return _Group(parameters=parameters, kind=None if shown.of else kind, prefix=shown.prefix)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Field:
    name: str
    kind: Any  # of one value, as typer reads it; with `meaning` empty, the whole annotation
    default: Any
    meaning: str
    unit: str = ""
    choices: tuple[str, ...] = ()

    def parameter(self, shown: Flags) -> inspect.Parameter:
        default = shown.defaults.get(self.name, None if shown.of else self.default)
        annotation = self._annotation(shown) if self.meaning else self.kind
        name = f"{shown.prefix}{self.name}"
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    def _annotation(self, shown: Flags) -> Any:
        help_text = shown.help.get(self.name) or sentence_of(self.meaning, self.unit)
        is_told = "Default:" in help_text or self.name in shown.defaults
        if shown.of and not is_told and type(self.default) in (int, float):
            help_text += f" Default: {self.default if isinstance(self.default, int) else f'{self.default:g}'}."
        if self.choices and self.name not in shown.help:
            help_text += f" One of: {', '.join(self.choices)}."
        flag = shown.flags.get(self.name, f"--{shown.prefix}{self.name}".replace("_", "-"))
        is_named = self.default is not True or self.name in shown.flags
        names = (flag,) if is_named else ()  # typer names both: --ignore-eos, --no-ignore-eos
        option = typer.Option(*names, help=help_text, rich_help_panel=shown.panels.get(self.name))
        return Annotated[self.kind | None if shown.of else self.kind, option]


def _fields_of(options: type[Any]) -> Iterator[_Field]:
    if issubclass(options, BaseModel):
        for name, about in options.model_fields.items():
            kind = _typed_as(about.annotation)
            extra = about.json_schema_extra
            unit = str(extra.get("unit", "")) if isinstance(extra, dict) else ""
            meaning, choices = about.description or "", _choices_of(about.annotation)
            yield _Field(name=name, kind=kind, default=about.default, meaning=meaning, unit=unit, choices=choices)
        return
    hints, knobs = typing.get_type_hints(options, include_extras=True), knobs_of(options)
    for each in dataclasses.fields(options):
        meaning = knobs[each.name].meaning if each.name in knobs else ""
        yield _Field(name=each.name, kind=hints[each.name], default=each.default, meaning=meaning)


def sentence_of(meaning: str, unit: str) -> str:
    """Of a table's row, where unit and meaning stand beside each other: requests | that decode at once."""
    text = MARKUP.sub(r"\1\2", HEADING.sub(r"see \1 in docs/serving.md", meaning))
    if text.startswith(GO_ON):
        text = f"{'seconds' if unit == 's' else unit} {text}".strip()
    begin = text[:1] if meaning.startswith("`") else text[:1].upper()  # a value is written as it is given
    return f"{begin}{text[1:].removesuffix('.')}."


def _choices_of(hint: Any) -> tuple[str, ...]:
    """The words that a field takes; none where it takes others, too."""
    if typing.get_origin(hint) is typing.Literal:
        return tuple(word for word in typing.get_args(hint) if isinstance(word, str))
    kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType, Annotated)
    return _choices_of(kinds[0]) if is_union and (len(kinds) == 1 or typing.get_origin(hint) is Annotated) else ()


def _typed_as(hint: Any) -> Any:
    """What a person types for a model's field: text, where the model itself makes more of it than a number."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        kinds = [_typed_as(kind) for kind in typing.get_args(hint) if kind is not types.NoneType]
        return kinds[0] if len(kinds) == 1 else str
    if typing.get_origin(hint) is Annotated:
        kind, *about = typing.get_args(hint)
        return str if any(isinstance(item, BeforeValidator) for item in about) else _typed_as(kind)
    if typing.get_origin(hint) is tuple:
        return list[str]
    return hint if hint in (int, float, bool, Path) else str
