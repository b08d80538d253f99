"""Whether some text that ends keeps a JSON Schema: one whose every text holds another one of itself has none, and an
answer of that form would be drawn until `max_tokens`. What is not understood here may end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Resolve = Callable[[str], Any]  # of a `$ref`, what it names; None: nothing


def has_an_end(root: dict[str, Any], parts: Iterable[dict[str, Any]], resolve: Resolve) -> bool:
    """`parts`: the schemas in `root`, itself among them. Each is looked at anew only when what it waited for was found
    to end."""
    ends: set[int] = set()
    waiting: dict[int, list[dict[str, Any]]] = {}
    queue = deque(parts)
    while queue:
        schema = queue.pop()
        if id(schema) in ends:
            continue
        if blocked := next(_blocked_by(schema, ends, resolve), None):
            for other in blocked:
                waiting.setdefault(other, []).append(schema)
        else:
            ends.add(id(schema))
            queue += waiting.pop(id(schema), [])
    return id(root) in ends


def _blocked_by(schema: dict[str, Any], ends: set[int], resolve: Resolve) -> Iterator[set[int]]:
    """For each condition that does not hold yet, the schemas of which one must end."""
    conditions = [[resolve(schema["$ref"])] if isinstance(schema.get("$ref"), str) else [True]]
    conditions += [[each] for each in _list(schema, "allOf")]
    conditions += [_list(schema, key) or [True] for key in ("anyOf", "oneOf")]
    conditions += _of_its_type(schema)
    for others in conditions:
        if all(isinstance(other, dict) and id(other) not in ends for other in others):
            yield {id(other) for other in others}


def _of_its_type(schema: dict[str, Any]) -> list[list[Any]]:
    """What must end for a value of its only type."""
    match schema.get("type"):
        case _ if "const" in schema or "enum" in schema:
            return []
        case "object" | ["object"]:
            known = schema.get("properties")
            named = known if isinstance(known, dict) else {}
            return [[named.get(name, True)] for name in _list(schema, "required") if isinstance(name, str)]
        case "array" | ["array"]:
            least, first = schema.get("minItems"), _list(schema, "prefixItems")
            count = least if isinstance(least, int) else 0
            rest = [schema.get("items", True)] if count > len(first) else []
            return [[item] for item in [*first[: max(0, count)], *rest]]
    return []


def _list(schema: dict[str, Any], key: str) -> list[Any]:
    held = schema.get(key)
    return held if isinstance(held, list) else []
