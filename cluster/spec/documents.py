"""Reads YAML as people mean it: no key twice in one place, of which YAML would take the last and say nothing; 1:30 is
text, as in YAML 1.2, and not 90."""

from __future__ import annotations

from collections import Counter
from typing import Any

import yaml


class RepeatedKey(yaml.MarkedYAMLError):
    def __init__(self, key: str, mark: Any) -> None:
        super().__init__(problem=f"{key} is there twice; keep one of them", problem_mark=mark)
        self.key, self.line = key, mark.line + 1


class Loader(yaml.SafeLoader):
    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> Any:
        tag = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        is_base_60 = kind is yaml.ScalarNode and ":" in value and tag.endswith((":int", ":float"))
        return self.DEFAULT_SCALAR_TAG if is_base_60 else tag


def mistake_of(error: yaml.YAMLError) -> str:
    """The line, and what is wrong there."""
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}" if mark else "somewhere"
    return f"{where}: {getattr(error, 'problem', None) or 'it does not parse'}"


def document(text: str) -> Any:
    """None: it is empty. Raises yaml.YAMLError."""
    loader = Loader(text)
    node = node_of(loader)
    return None if node is None else constructed(loader, node)


def node_of(loader: yaml.SafeLoader) -> Any:
    """Raises yaml.YAMLError."""
    try:
        node = loader.get_single_node()
        _check(node, set(), set())
    except RecursionError:
        raise yaml.MarkedYAMLError(problem="it is nested too deep") from None
    return node


def constructed(loader: yaml.SafeLoader, node: Any) -> Any:
    """Raises yaml.YAMLError."""
    try:
        return loader.construct_document(node)
    except RecursionError:
        raise yaml.MarkedYAMLError(problem="it is nested too deep") from None
    except (ValueError, AttributeError) as error:  # a date that is none, a number of thousands of digits
        raise yaml.MarkedYAMLError(problem=str(error)) from None


def _check(node: Any, around: set[int], seen: set[int]) -> None:
    """`around`: the nodes that it stands in; `seen`: those that have been checked, which aliases may name again."""
    if node is None or not isinstance(node.value, list) or id(node) in seen:
        return
    if id(node) in around:
        raise yaml.MarkedYAMLError(problem="an alias stands in what it names", problem_mark=node.start_mark)
    for child in node.value:
        _check(child[1] if isinstance(child, tuple) else child, around | {id(node)}, seen)
    seen.add(id(node))
    keys = [child[0] for child in node.value if isinstance(child, tuple) and isinstance(child[0].value, str)]
    for key, count in Counter(key.value for key in keys).items():
        if count > 1:
            raise RepeatedKey(key, [each.start_mark for each in keys if each.value == key][1])
