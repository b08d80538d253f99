"""Where each value of a spec comes from: the file and its line, environment variables, a flag, a default, or derived
from the machine. It goes with the spec from `kvrelay up` to the cluster's controller and back.

Sources name only what was given, by key path; everything else is a default, or derived.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel

from cluster.spec.errors import key_path
from cluster.spec.model import ClusterSpec
from cluster.spec.variables import Origin
from worker.wire.secrets import without_passwords

Sources = Mapping[str, str]  # pools[1].threads -> cluster.yaml:7 ${THREADS}
DEFAULT = "default"
DERIVED = "derived"  # what auto has come to
HIDDEN = "(hidden)"
SECRET = re.compile(r"\$\{[A-Z0-9_]*(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|KEY)[A-Z0-9_]*\}", re.IGNORECASE)


class Row(NamedTuple):
    key: str
    value: Any  # as it goes into YAML or JSON
    source: str


def sources_of(file: str, origins: Mapping[str, Origin]) -> dict[str, str]:
    return {
        key: " ".join([f"{file}:{origin.line}", *(f"${{{name}}}" for name in origin.variables)])
        for key, origin in origins.items()
    }


def rows_of(written: ClusterSpec, resolved: ClusterSpec, sources: Sources) -> list[Row]:
    """Every key, in the order of the spec's classes. A value from a variable that is named like a secret is hidden, and
    so is a password in a URL."""
    return list(_rows(written, resolved, sources, ()))


def _rows(written: BaseModel, resolved: BaseModel, sources: Sources, path: tuple[int | str, ...]) -> Iterator[Row]:
    for name in type(written).model_fields:
        was, now, here = getattr(written, name), getattr(resolved, name), (*path, name)
        if isinstance(was, BaseModel):
            yield from _rows(was, now, sources, here)
        elif was and isinstance(was, tuple) and isinstance(was[0], BaseModel):
            for index, (old, new) in enumerate(zip(was, now, strict=True)):
                yield from _rows(old, new, sources, (*here, index))
        else:
            given = _source(sources, here) if name in written.model_fields_set else DEFAULT
            source = given if was == now else DERIVED
            yield Row(key_path(here), shown(now, given), source)


def _source(sources: Sources, path: tuple[int | str, ...]) -> str:
    """Of the key, or of what it stands in: a flag gives a part as a whole."""
    steps = (key_path(path[:length]) for length in range(len(path), 0, -1))
    return next((sources[key] for key in steps if key in sources), DEFAULT)


def shown(value: Any, source: str) -> Any:
    """A value as it may be shown."""
    if value is not None and SECRET.search(source):
        return HIDDEN
    if isinstance(value, BaseModel):
        return shown(value.model_dump(mode="json"), source)
    if isinstance(value, str):
        return without_passwords(value)
    if isinstance(value, Mapping):
        return {key: shown(item, source) for key, item in value.items()}
    return [shown(item, source) for item in value] if isinstance(value, list | tuple) else value
