"""Turns what pydantic finds wrong with a spec into one sentence each: the key, the value, the mend.

It decides only wording. Keys are written as a person would look for them: `pools[1].threads`.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from worker.wire.secrets import without_passwords

MAX_SHOWN_CHARS = 60


class SpecError(ValueError):
    """A spec that cannot be used. `sentences` has one for each thing to mend; the message is all of them, by line."""

    def __init__(self, *sentences: str) -> None:
        super().__init__("\n".join(sentences))
        self.sentences = sentences


def sentences_of(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """One sentence for each mistake: not for what only follows from another one."""
    told = error.errors(include_url=False)
    mistakes = [details for details in told if not _is_echo(details, told)]
    sentences = [_sentence(same, model) for same in _by_value(mistakes, model)]
    guessed = [f"{s.rpartition('did you mean ')[2].rstrip('?')} is missing" for s in sentences if s.endswith("?")]
    return [sentence for sentence in sentences if not sentence.startswith(tuple(guessed))]


def key_path(loc: Sequence[int | str]) -> str:
    """("pools", 0, "role") -> pools[0].role"""
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path or "the spec"


def show(value: object) -> str:
    """A value as it is shown in a sentence."""
    text = repr(without_passwords(value)) if isinstance(value, str) else without_passwords(repr(value))
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 3] + "..."


def _is_echo(details: Any, told: Sequence[Any]) -> bool:
    """pydantic counts only the good items of a list: a bad one also makes the list too short."""
    at = details["loc"]
    is_of_item = (len(other["loc"]) > len(at) and other["loc"][: len(at)] == at for other in told)
    return bool(details["type"] == "too_short" and any(is_of_item))


def _by_value(mistakes: Sequence[Any], model: type[BaseModel]) -> list[list[Any]]:
    """One value that may be of several kinds is none of them: a mistake of each, whose `loc` ends with the kind."""
    found: dict[tuple[Any, int], list[Any]] = {}
    for details in mistakes:
        if details["type"] != "extra_forbidden":
            details["loc"] = _written(details["loc"], model)
        found.setdefault((details["loc"], id(details["input"])), []).append(details)
    return [*found.values()]


def _written(loc: Sequence[int | str], model: type[BaseModel]) -> tuple[int | str, ...]:
    """As far as it was: pydantic goes on with what it calls the kinds of a value, and the key of a mapping."""
    annotation: Any = model
    for number, part in enumerate(loc):
        if part == "[key]":
            return tuple(loc[:number])
        nested = _nested(annotation)
        if _has_names(annotation):
            annotation = nested
        elif isinstance(part, str):
            if nested is None or part not in nested.model_fields:
                return tuple(loc[:number])
            annotation = nested.model_fields[part].annotation
    return tuple(loc)


def _has_names(annotation: Any) -> bool:
    """A mapping, whose keys are as they were written."""
    origin = typing.get_origin(annotation)
    return origin in (dict, Mapping) or any(_has_names(inner) for inner in typing.get_args(annotation))


def _sentence(same: Sequence[Any], model: type[BaseModel]) -> str:
    details = same[0]
    kind, loc, value = str(details["type"]), details["loc"], details["input"]
    context: Mapping[str, Any] = details.get("ctx") or {}
    key = key_path(loc)
    if kind == "extra_forbidden":
        return _unknown_key(loc, model)
    if kind == "missing":
        return f"{key} is missing; give it a value"
    if kind == "value_error":
        return str(context["error"]) if not loc else f"{key} is {show(value)}; {context['error']}"
    mends = [_mend(str(each["type"]), each.get("ctx") or {}, str(each["msg"])) for each in same]
    return f"{key} is {show(value)}; give {' or '.join(dict.fromkeys(mends))}"


def _mend(kind: str, context: Mapping[str, Any], message: str) -> str:
    if kind.startswith("int"):
        return "a whole number"
    if kind.startswith("float"):
        return "a number"
    if kind.startswith("bool"):
        return "true or false"
    if kind.startswith("string_type"):
        return "text"
    if kind in ("model_type", "dict_type", "model_attributes_type", "mapping_type"):
        return "keys and values, indented under it"
    if kind in ("list_type", "tuple_type"):
        return "a list"
    if kind == "path_type":
        return "the path of a file"
    bounds = {"greater_than_equal": "of {ge} or more", "greater_than": "above {gt}"}
    bounds |= {"less_than_equal": "of {le} or less", "less_than": "below {lt}"}
    if kind in bounds:
        return "a number " + bounds[kind].format(**context)
    if kind == "literal_error":
        return str(context["expected"])
    if kind == "too_short":
        return "one or more" if context["min_length"] == 1 else f"at least {context['min_length']}"
    if kind == "string_too_short":
        return "text" if context["min_length"] == 1 else f"text of {context['min_length']} characters or more"
    if kind == "string_too_long":
        return f"text of {context['max_length']} characters or fewer"
    return message.removeprefix("Input should be ").removeprefix("Value error, ")


def _unknown_key(loc: Sequence[int | str], model: type[BaseModel]) -> str:
    """Names the nearest known key: first among its siblings, then anywhere in the spec; one that is called the same
    before all."""
    key, written = key_path(loc), str(loc[-1])
    siblings, paths = list(_model_at(model, loc[:-1]).model_fields), dict(_leaf_paths(model))
    near = difflib.get_close_matches(written, siblings, n=1, cutoff=0.6)
    if near and written not in paths:
        return f"{key} is not a known key; did you mean {key_path([*loc[:-1], near[0]])}?"
    elsewhere = difflib.get_close_matches(written, list(paths), n=1, cutoff=0.75)
    if elsewhere:
        return f"{key} is not a known key here; did you mean {paths[elsewhere[0]]}?"
    where = key_path(loc[:-1]) if len(loc) > 1 else "the spec"
    return f"{key} is not a known key; {where} knows {', '.join(siblings)}"


def _model_at(model: type[BaseModel], loc: Sequence[int | str]) -> type[BaseModel]:
    for part in loc:
        if isinstance(part, str):
            field = model.model_fields.get(part)  # none: a name in a mapping of models
            model = (_nested(field.annotation) if field else None) or model
    return model


def _nested(annotation: Any) -> type[BaseModel] | None:
    """The model inside X, tuple[X, ...] or X | None."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation if issubclass(annotation, BaseModel) else None
    for inner in typing.get_args(annotation):
        if (nested := _nested(inner)) is not None:
            return nested
    return None


def _leaf_paths(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(key, its path) for every key; of keys with the same name the outer one wins."""
    for name, field in reversed(model.model_fields.items()):
        nested = _nested(field.annotation)
        if nested is not None:
            origin = typing.get_origin(field.annotation)
            inside = "[]" if origin is tuple else ".NAME" if origin is Mapping else ""
            yield from _leaf_paths(nested, f"{prefix}{name}{inside}.")
        yield name, f"{prefix}{name}"
