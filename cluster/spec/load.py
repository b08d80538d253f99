"""Reads a spec: from a YAML file, or from plain data. What is wrong is a SpecError with a sentence for each mistake."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cluster.spec.errors import SpecError, sentences_of, show
from cluster.spec.model import ClusterSpec


def parse_spec(data: object) -> ClusterSpec:
    """A spec from plain data (a YAML document). Raises SpecError."""
    if not isinstance(data, Mapping):
        raise SpecError(f"the spec is {show(data)}; give keys and values such as model: DIR")
    try:
        return ClusterSpec.model_validate(data)
    except ValidationError as error:
        raise SpecError(*sentences_of(error, ClusterSpec)) from None


def load_spec(path: str | Path) -> ClusterSpec:
    """A spec from a YAML file; a relative model directory is meant from the file's folder. Raises SpecError."""
    import yaml  # not at the top: policies and the simulator import this module without it

    try:
        text = Path(path).read_text(encoding="utf-8")
        _refuse_repeated_keys(yaml.compose(text, yaml.SafeLoader), str(path))
        data = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} cannot be read: {getattr(error, 'strerror', None) or 'it is no text'}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}" if mark else "somewhere"
        problem = getattr(error, "problem", None) or "it does not parse"
        raise SpecError(f"{path} is not YAML: {where}: {problem}") from None
    spec = parse_spec(data)
    beside = Path(path).resolve().parent / spec.model
    if spec.model.startswith(".") and beside.is_dir():
        return spec.model_copy(update={"model": str(beside)})
    return spec


def _refuse_repeated_keys(node: Any, path: str) -> None:
    """YAML would take the last of two equal keys and say nothing."""
    children = node.value if node is not None and isinstance(node.value, list) else []
    for child in children:
        _refuse_repeated_keys(child[1] if isinstance(child, tuple) else child, path)
    keys = [child[0] for child in children if isinstance(child, tuple)]
    for key, count in Counter(key.value for key in keys).items():
        if count > 1:
            line = [k.start_mark.line + 1 for k in keys if k.value == key][1]
            raise SpecError(f"{path} says {key} twice, again in line {line}; keep one of them")
