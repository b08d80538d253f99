"""Model files: a model directory, a config.json, a name that ships with kvrelay or one of the hub that was downloaded,
and the ModelShape it holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from engine.weights.files import file_of
from engine.weights.near import did_you_mean
from placement.catalogs.base import PlanError
from placement.latency.model_config import shape_of
from placement.latency.model_shape import ModelShape
from placement.named_files import CONFIGS, named_file, names_of


def load_shape(model: str | Path) -> ModelShape:
    """Of a model directory, a config.json, a name under configs/models, or one of the hub that was downloaded. Raises
    PlanError."""
    path = _find(str(model))
    folder = path.parent if _is_path(str(model)) else Path(model)
    name = folder.name if path.name == "config.json" else path.stem
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise PlanError(
            f"model {model} cannot be read: {path}: {why}; give a model directory or a config.json"
        ) from None
    except RecursionError:
        raise PlanError(f"{path} is not JSON: it is nested too deep; give a Hugging Face config.json") from None
    except json.JSONDecodeError as error:
        raise PlanError(
            f"{path} is not JSON: line {error.lineno}: {error.msg}; give a Hugging Face config.json"
        ) from None
    if not isinstance(config, Mapping):
        raise PlanError(f"{path} is no object; give a Hugging Face config.json")
    return shape_of(config, name=name)


def shape_if_known(model: str) -> ModelShape | None:
    """None where no config tells, as of a hub id that was not downloaded."""
    try:
        return load_shape(model)
    except PlanError:
        return None


def known_models() -> list[str]:
    return names_of("models", ".json")


def loadable_name(model: str) -> str:
    """What a worker can load: a model directory by its full path, the hub id of a name under configs/models; otherwise
    what was given."""
    try:
        path = _find(model)
    except PlanError:
        return model
    if path.name == "config.json":
        return str(path.parent.resolve()) if _is_path(model) else model
    if path.parent != CONFIGS / "models":
        return model
    hub_id = json.loads(path.read_text(encoding="utf-8")).get("_name_or_path")
    return model if hub_id is None or "/" in model else str(hub_id)


def _is_path(model: str) -> bool:
    return Path(model).expanduser().exists()


def _find(model: str) -> Path:
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            raise PlanError(f"model {model} has no config.json; give a Hugging Face model directory")
        return path / "config.json"
    if path.is_file():
        return path
    shipped = named_file("models", path.name.removesuffix(".json"), ".json")
    if shipped is not None and not model.startswith((".", "/", "~")) and model.count("/") < 2:  # a name, or a hub id
        return shipped
    if (downloaded := file_of(model, "config.json")) is not None:
        return downloaded
    known = ", ".join(known_models())
    near = did_you_mean(model, known_models())
    raise PlanError(
        f"model is {model!r}, which is no directory and no config.json; {near}give one, or a name of {known}"
    )
