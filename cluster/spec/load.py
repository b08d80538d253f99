"""Reads a spec: from a YAML file, or from plain data. What is wrong is a SpecError with a sentence for each mistake."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

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

    from cluster.spec.documents import Loader, RepeatedKey, constructed, mistake_of, node_of

    try:
        loader = Loader(Path(path).read_text(encoding="utf-8"))
        node = node_of(loader)
        if node is None:
            return None, {}
        origins = fill_in(loader, node, environ)
        return constructed(loader, node), sources_of(str(path), origins)
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} cannot be read: {getattr(error, 'strerror', None) or 'it is no text'}") from None
    except SpecError:
        raise
    except ValueError as error:  # a null character in the path
        raise SpecError(f"{path} is not YAML: {error}") from None
    except RepeatedKey as error:
        raise SpecError(f"{path} says {error.key} twice, again in line {error.line}; keep one of them") from None
    except yaml.YAMLError as error:
        raise SpecError(f"{path} is not YAML: {mistake_of(error)}") from None
