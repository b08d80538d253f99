"""Reads what a person asks the planner, from a file, from flags, or from the plan that kept it, into a PlanRequest.

    file --read_keys--> keys --with flags, which win--> PlanRequest --kvrelay.plan.planning--> Plan

Every mistake is one sentence (PlanError) that names the key as it was written, the value and the mend.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from cluster.spec.documents import document, mistake_of
from cluster.spec.errors import sentences_of, show
from kvrelay.plan.request import CLASS_KEYS, RANDOM, SIZES, PlanRequest, counted, listed
from placement.catalogs.base import PlanError

PATHS = ("trace", "profile", "margin")
MODELS = ("model", "speculative_model")


def request_of(asked: Mapping[str, Any]) -> PlanRequest:
    """The request that `asked` of a plan.json keeps. Raises PlanError where it is none."""
    known = {key: value for key, value in asked.items() if key in PlanRequest.model_fields and key != "classes"}
    known |= {key: f"{known[key]}s" for key in ("ttft", "tpot") if known.get(key) is not None}
    if asked.get("classes"):
        known["classes"] = [_class_of(asked_class) for asked_class in asked["classes"]]
        known = {key: value for key, value in known.items() if key not in ("ttft", "tpot")}
    try:
        return PlanRequest.model_validate(known)
    except ValidationError as error:
        told = sentences_of(error, PlanRequest)[0].replace("`", "")
        raise PlanError(f"asked of the plan is no request ({told}); make a plan with kvrelay plan --out") from None


def _class_of(asked_class: Mapping[str, Any]) -> dict[str, Any]:
    slo = asked_class["slo"]
    times = {key: f"{slo[f'{key}_s']}s" for key in ("ttft", "tpot") if slo[f"{key}_s"] is not None}
    return {"name": asked_class["name"], "share": asked_class["share"], "attainment": slo["attainment"], **times}


def parse_class(text: str) -> dict[str, Any]:
    """NAME:SHARE:TTFT:TPOT, and :ATTAINMENT if it has its own; a target may be empty. Raises PlanError."""
    parts = text.split(":")
    if not len(CLASS_KEYS) - 1 <= len(parts) <= len(CLASS_KEYS) or not parts[0] or not parts[1]:
        raise PlanError(f"--class is {text!r}; give NAME:SHARE:TTFT:TPOT, such as chat:0.7:250ms:40ms")
    return {key: value for key, value in zip(CLASS_KEYS, parts, strict=False) if value}


def build_request(path: Path | None, flags: Mapping[str, Any]) -> PlanRequest:
    """File and flags together, a flag wins; None means not given. Raises PlanError."""
    typed = {key: value for key, value in flags.items() if value is not None}
    if typed.get("classes"):
        typed["classes"] = [keys if isinstance(keys, Mapping) else parse_class(keys) for keys in typed["classes"]]
    data = {} if path is None else read_keys(path)
    for key in SIZES:  # one flag for how much replaces the file's, whichever that is
        if key in typed:
            data = {k: v for k, v in data.items() if k not in SIZES}
    if typed.get("classes"):
        data = {k: v for k, v in data.items() if k not in ("ttft", "tpot")}
    if "trace" in typed:
        data = {k: v for k, v in data.items() if k not in RANDOM}
    try:
        return PlanRequest.model_validate(data | typed)
    except ValidationError as error:
        raise PlanError("\n".join(_told(error, path, typed))) from None


def read_keys(path: Path) -> dict[str, Any]:
    """A plan request's keys; relative paths in it are meant from the file's folder where they lead somewhere.
    Raises PlanError."""
    try:
        data = document(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise PlanError(f"plan request {path} cannot be read: {why}; give a YAML file") from None
    except yaml.YAMLError as error:
        raise PlanError(f"{path} is not YAML: {mistake_of(error)}") from None
    if not isinstance(data, Mapping):
        raise PlanError(f"{path} is {show(data)}; give keys and values such as num_gpus: 8")
    return {str(key): _from_folder(path, key, value) for key, value in data.items()}


def _from_folder(path: Path, key: object, value: Any) -> Any:
    if key == "hardware":
        names = listed(value)
        return [_machine_beside(path, name) for name in names] if isinstance(names, list | tuple) else value
    if key == "profile" and isinstance(value, list):
        return [_beside(path, each) for each in value]
    return _beside(path, value) if key in (*PATHS, *MODELS) else value


def _machine_beside(path: Path, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    name, count = counted(value)
    return _beside(path, name) if count is None else f"{_beside(path, name)}:{count}"


def _beside(path: Path, value: Any) -> Any:
    """The file beside the request if there is one and none from here; as short as it can be said."""
    if not isinstance(value, str) or Path(value).exists():
        return value
    beside = (path.resolve().parent / value).resolve()
    if not beside.exists():
        return value
    here = Path.cwd()
    return str(beside.relative_to(here) if beside.is_relative_to(here) else beside)


def _told(error: ValidationError, path: Path | None, typed: Mapping[str, Any]) -> Sequence[str]:
    """One sentence for each mistake; a key that is a flag is named as one."""
    return [_spoken(sentence, path, typed) for sentence in sentences_of(error, PlanRequest)]


def _spoken(sentence: str, path: Path | None, typed: Mapping[str, Any]) -> str:
    first = re.match(r"(\w+)(?=[ \[.])", sentence)
    is_flag = path is None or (first is not None and first[0] in typed)
    if first is not None and first[0] in PlanRequest.model_fields:
        sentence = f"`{first[0]}`{sentence[first.end() :]}"
    told = re.sub(r"`(\w+)`", lambda key: _flag(key[1]) if is_flag or key[1] in typed else key[1], sentence)
    return told if is_flag else f"{path}: {told}"


def _flag(key: str) -> str:
    return "--class" if key == "classes" else f"--{key.replace('_', '-')}"
