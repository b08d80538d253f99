"""Reads a spec: from a YAML file, or from plain data. What is wrong is a SpecError with a sentence for each mistake."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cluster.spec.errors import SpecError, sentences_of, show
from cluster.spec.model import ClusterSpec
from cluster.spec.sources import sources_of
from cluster.spec.variables import fill_in


def parse_spec(data: object) -> ClusterSpec:
    """A spec from plain data (a YAML document). Raises SpecError."""
    if not isinstance(data, Mapping):
        raise SpecError(f"the spec is {show(data)}; give keys and values such as model: DIR")
    try:
        return ClusterSpec.model_validate(data)
    except ValidationError as error:
        raise SpecError(*sentences_of(error, ClusterSpec)) from None


def load_spec(path: str | Path) -> ClusterSpec:
    """A spec from a YAML file. Raises SpecError."""
    return read_spec(path)[0]


def read_spec(path: str | Path, environ: Mapping[str, str] = os.environ) -> tuple[ClusterSpec, dict[str, str]]:
    """A spec from a YAML file whose variables are filled in, and where each of its values comes from
    (cluster/spec/sources.py). A relative model directory is meant from the file's folder. Raises SpecError."""
    data, sources = _read(path, environ)
    folder = Path(path).resolve().parent

    def found(model: str) -> str:
        beside = folder / model
        return str(beside) if model.startswith(".") and beside.is_dir() else model

    return parse_spec(data).with_paths(found).with_adapters_in(folder), sources


def _read(path: str | Path, environ: Mapping[str, str]) -> tuple[object, dict[str, str]]:
    import yaml  # not at the top: policies and the simulator import this module without it

    try:
        loader = yaml.SafeLoader(Path(path).read_text(encoding="utf-8"))
        node = loader.get_single_node()
        _refuse_repeated_keys(node, str(path))
        if node is None:
            return None, {}
        origins = fill_in(loader, node, environ)
        return loader.construct_document(node), sources_of(str(path), origins)
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} cannot be read: {getattr(error, 'strerror', None) or 'it is no text'}") from None
    except SpecError:
        raise
    except ValueError as error:  # a date that is none
        raise SpecError(f"{path} is not YAML: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}" if mark else "somewhere"
        problem = getattr(error, "problem", None) or "it does not parse"
        raise SpecError(f"{path} is not YAML: {where}: {problem}") from None


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
