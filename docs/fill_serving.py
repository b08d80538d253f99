"""`python docs/fill_serving.py`: writes the tables of docs/serving.md that say what a spec may hold.

The first table under each of the headings in PARTS is made from the spec's own classes, which take their knobs from the
options classes of the parts that run (engine/knobs.py). Nothing else of the page is touched.
"""

from __future__ import annotations

import re
import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cluster.front.allowance.options import Account
from cluster.spec.knobs import Spec, change_of
from cluster.spec.model import ClusterSpec, ModelSpec, RouterSpec, TransferSpec
from cluster.spec.pool import PoolSpec, roles_of
from engine.knobs import range_text
from worker.roles import ROLES

PAGE = Path(__file__).resolve().parent / "serving.md"
PARTS: dict[str, type[Spec]] = {
    "Cluster keys": ClusterSpec,
    "Router keys": RouterSpec,
    "Pool keys": PoolSpec,
    "Model keys": ModelSpec,
    "Transfer keys": TransferSpec,
}
PREFIXES = {
    "Cluster keys": "",
    "Router keys": "router.",
    "Pool keys": "pools[].",
    "Model keys": "models[].",
    "Transfer keys": "transfer.",
}
CHANGES = "What changes while it runs"
HOW = {"now": "at once", "rolling": "as workers are replaced"}


def main() -> None:
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def filled(page: str) -> str:
    for heading, part in {**PARTS, "Account keys": Account}.items():
        pattern = re.compile(rf"(^### {heading}\n.*?)^\|.*?(?=^[^|])", re.MULTILINE | re.DOTALL)
        assert pattern.search(page), f"docs/serving.md has no table under {heading}"
        page = pattern.sub(lambda found, part=part: found[1] + table(part), page, count=1)  # type: ignore[misc]
    heading = f"### {CHANGES}\n\n"
    before, after = page.split(heading)
    rest = after.partition("\n\n")[2]
    return f"{before}{heading}{changes_table()}\n{rest}"


def changes_table() -> str:
    """How each key changes while a cluster runs."""
    keys: dict[str, list[str]] = {HOW["now"]: [], HOW["rolling"]: []}
    for heading, part in PARTS.items():
        prefix = PREFIXES[heading]
        for name in part.model_fields:
            if prefix or name not in ("router", "pools", "transfer", "models"):
                change = change_of(part, name)
                how = HOW.get(change.how) or f"not: {change.why_fixed}"
                keys.setdefault(how, []).append(f"`{prefix}{name}`")
    rows = [f"| {how} | {', '.join(names)} |\n" for how, names in keys.items()]
    return "".join(["| how | keys |\n", "|---|---|\n", *rows])


def table(part: type[BaseModel]) -> str:
    head = ["key", *(["for"] if part is PoolSpec else []), "default", "unit", "range", "meaning"]
    lines = [head, ["---"] * len(head)]
    for name, field in part.model_fields.items():
        roles = roles_of(name)
        where = ["all" if len(roles) == len(ROLES) else ", ".join(roles)] if part is PoolSpec else []
        lines.append(
            [f"`{name}`", *where, shown(field), unit_of(field), range_of(field) or "-", field.description or ""]
        )
    return "".join(f"|{'|'.join(cells)}|\n" if cells[0] == "---" else f"| {' | '.join(cells)} |\n" for cells in lines)


def shown(field: FieldInfo) -> str:
    """The default as YAML has it."""
    if field.is_required():
        return "required"
    value: Any = {} if isinstance(field.default, BaseModel) else field.default
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    words = {None: "null", True: "true", False: "false", "": '""'}
    return f"`{words[value]}`" if isinstance(value, bool | str | None) and value in words else f"`{value}`"


def unit_of(field: FieldInfo) -> str:
    extra = field.json_schema_extra
    return str(extra.get("unit") or "-") if isinstance(extra, dict) else "-"


def range_of(field: FieldInfo) -> str:
    bounds = {
        key: getattr(about, key)
        for about in _metadata(field)
        for key in ("ge", "gt", "le", "lt")
        if hasattr(about, key)
    }
    return range_text(bounds, [f"`{choice}`" for choice in _choices(field.annotation)])


def _metadata(field: FieldInfo) -> list[Any]:
    """Bounds stand beside the field, or beside one of the types that its annotation joins."""
    inner = [about for kind in typing.get_args(field.annotation) for about in getattr(kind, "__metadata__", ())]
    return [piece for about in (*field.metadata, *inner) for piece in (*getattr(about, "metadata", ()), about)]


def _choices(annotation: Any) -> list[str]:
    """Of a key that takes some words only."""
    if typing.get_origin(annotation) is typing.Literal:
        return [choice for choice in typing.get_args(annotation) if isinstance(choice, str)]
    return []


if __name__ == "__main__":
    main()
