"""Environment variables in a spec file, and the line that each value stands in.

    replicas: ${REPLICAS:-2}      the variable, or 2 where it is not set or empty
    tokens_file: "${HOME}/keys"   within a text; $$ is a dollar

They stand in values, never in keys, and are filled in after YAML has parsed the file: whatever a variable holds stays
one value. A value without quotes has the type that YAML would give it, had it been written there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from cluster.spec.errors import SpecError, key_path

if TYPE_CHECKING:
    import yaml

REFERENCE = re.compile(
    r"\$(?:(?P<dollar>\$)|\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}|(?P<bad>\{))"
)


class Origin(NamedTuple):
    """Of a value in a file: its line, and the variables in it."""

    line: int
    variables: tuple[str, ...]


def fill_in(loader: yaml.SafeLoader, root: yaml.Node, environ: Mapping[str, str]) -> dict[str, Origin]:
    """Has every text in a parsed document filled in, in place. Returns the origins, by key path. Raises SpecError."""
    return dict(_Filling(loader, environ).walk(root, ()))


class _Filling:
    def __init__(self, loader: yaml.SafeLoader, environ: Mapping[str, str]) -> None:
        self._loader: Any = loader  # it has no types
        self._environ = environ
        self._used: dict[int, tuple[str, ...]] = {}  # by node, so that what an alias repeats is filled in once

    def walk(self, node: Any, path: tuple[int | str, ...]) -> Iterator[tuple[str, Origin]]:
        used: dict[str, None] = {}
        if node.id == "mapping":
            self._loader.flatten_mapping(node)  # what << merges into it
        for part, child in _children(node):
            for key, origin in self.walk(child, (*path, part)):
                used.update(dict.fromkeys(origin.variables))
                yield key, origin
        if isinstance(node.value, str):
            used.update(dict.fromkeys(self._filled(node, path)))
        yield key_path(path), Origin(node.start_mark.line + 1, tuple(used))

    def _filled(self, node: Any, path: tuple[int | str, ...]) -> tuple[str, ...]:
        if id(node) in self._used:
            return self._used[id(node)]
        names = tuple(found["name"] for found in REFERENCE.finditer(node.value) if found["name"])
        if "$" in node.value:
            node.value = REFERENCE.sub(lambda found: self._value_of(found, path, node), node.value)
            if node.style is None:
                node.tag = self._loader.resolve(type(node), node.value, (True, False))
        self._used[id(node)] = names
        return names

    def _value_of(self, found: re.Match[str], path: tuple[int | str, ...], node: Any) -> str:
        where = f"{key_path(path)}, in line {node.start_mark.line + 1},"
        if found["dollar"]:
            return "$"
        if found["bad"]:
            raise SpecError(
                f"{where} has a ${{ that names no variable; write ${{NAME}}, ${{NAME:-default}}, or $$ for $"
            )
        name, default = found["name"], found["default"]
        value = self._environ.get(name, "")
        if name not in self._environ and default is None:
            raise SpecError(f"{where} wants {name}, which is not set; set it, or write ${{{name}:-default}}")
        return value or default or ""


def _children(node: Any) -> Iterator[tuple[int | str, Any]]:
    if isinstance(node.value, list):
        for index, child in enumerate(node.value):
            yield (str(child[0].value), child[1]) if isinstance(child, tuple) else (index, child)
