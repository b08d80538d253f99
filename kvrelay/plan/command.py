"""A plan's request as a person would type it: `kvrelay plan` with the flags that ask the same."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from kvrelay.plan.durations import written_duration
from kvrelay.plan.request import CLASS_KEYS, PlanClass, PlanRequest


def command_of(request: PlanRequest) -> str:
    """One flag a line."""
    lines = ["kvrelay plan"]
    for key, value in _given(request).items():
        flag = f"--{key.replace('_', '-')}"
        if key == "classes":
            lines += [f"--class {shlex.quote(_class_flag(each))}" for each in value]
        elif key == "profile":
            lines += [f"{flag} {shlex.quote(each)}" for each in value]
        elif isinstance(value, bool):
            lines.append(flag if value else f"--no-{key.replace('_', '-')}")
        else:
            text = ",".join(value) if isinstance(value, list) else _plain(value)
            lines.append(f"{flag} {shlex.quote(text)}")
    return " \\\n    ".join(lines)


def _given(request: PlanRequest) -> dict[str, Any]:
    """The keys that differ from their defaults, as a file would say them."""
    data = request.model_dump(mode="json", exclude_defaults=True)
    for keys in (data, *data.get("classes", ())):
        keys |= {key: written_duration(keys[key]) for key in ("ttft", "tpot") if key in keys}
    return data


def _plain(value: object) -> str:
    """20 for 20.0."""
    return f"{value:.12g}" if isinstance(value, float) else f"{value}"


def _class_flag(values: Mapping[str, Any]) -> str:
    """The share is always said: NAME::TTFT:TPOT does not parse."""
    values = {"share": PlanClass.model_fields["share"].default, **values}
    keys = CLASS_KEYS if "attainment" in values else CLASS_KEYS[:-1]
    return ":".join(_plain(values.get(key, "")) for key in keys)
