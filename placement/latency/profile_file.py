"""The profile's file: JSON, versioned. What is wrong with one is said in one sentence, naming the file and the key.

It reads and writes; what the figures mean is placement/latency/profile.py's to say.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from placement.latency.profile import (
    DecodePoint,
    Fault,
    MixedPoint,
    PoolFacts,
    PrefillPoint,
    Profile,
    ProfileError,
    SlowdownPoint,
    TransferPoint,
)
from placement.latency.under_load import LoadRun, PhaseUnderLoad, UnderLoad
from placement.whole_file import write_whole

FORMAT = "kvrelay-profile"
VERSION = 1
MEND = "measure one with kvrelay calibrate"


def read_profile(path: Path) -> Profile:
    """Raises ProfileError naming the file and what is wrong with it."""
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(f"profile {path} cannot be read: {error.strerror}; {MEND}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProfileError(f"profile {path} is not JSON ({error}); {MEND}") from None
    try:
        return replace(profile_from(data), name=path.name)
    except ProfileError as error:
        raise ProfileError(f"profile {path}: {error}") from None


def write_profile(profile: Profile, path: Path) -> None:
    """Raises OSError, and leaves the file as it was."""
    write_whole(path, json.dumps(profile_object(profile), indent=1) + "\n")


def profile_object(profile: Profile) -> dict[str, Any]:
    """Plain data, as in the file."""
    values = asdict(profile)
    del values["name"]
    return {"format": FORMAT, "version": VERSION, **values}


def profile_from(data: Any) -> Profile:
    """From plain data. Raises ProfileError naming the key."""
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise ProfileError(f"format is not {FORMAT}; {MEND}")
    if data.get("version") != VERSION:
        raise ProfileError(f"version is {data.get('version')!r}, this kvrelay reads {VERSION}; {MEND}")
    profile = Profile(
        model=_mapping(data, "model"),
        machine=_mapping(data, "machine"),
        date=_text(data, "date"),
        commit=_text(data, "commit"),
        page_size=_whole(data, "page_size"),
        prefill_pool=_pool(data, "prefill_pool"),
        decode_pool=_pool(data, "decode_pool"),
        prefill=tuple(_prefill_point(row, f"prefill[{i}]") for i, row in enumerate(_rows(data, "prefill"))),
        decode=tuple(_decode_point(row, f"decode[{i}]") for i, row in enumerate(_rows(data, "decode"))),
        transfer=tuple(_transfer_point(row, f"transfer[{i}]") for i, row in enumerate(_rows(data, "transfer"))),
        mixed=tuple(_mixed_point(row, f"mixed[{i}]") for i, row in enumerate(_rows(data, "mixed")))
        if "mixed" in data
        else (),
        tp=_whole(data, "tp"),
        pp=_whole(data, "pp"),
        threads=int(_number(data, "threads")) if "threads" in data else 0,
        router=dict(_mapping(data, "router")) if "router" in data else {},
        prefill_overhead_s=_number(data, "prefill_overhead_s"),
        message_s=_number(data, "message_s"),
        handoff_s=_number(data, "handoff_s"),
        client_s=_number(data, "client_s"),
        slowdown=tuple(_slowdown_point(row, f"slowdown[{i}]") for i, row in enumerate(_rows(data, "slowdown"))),
        error=_fault(_mapping(data, "error")),
        load=_load(data["load"]) if data.get("load") is not None else None,
        notes=_mapping(data, "notes") if "notes" in data else {},
    )
    for key in ("prefill", "decode"):
        if not any(not point.held_out for point in getattr(profile, key)):
            raise ProfileError(f"{key} has no points; {MEND}")
    return profile


def _pool(data: Mapping[str, Any], key: str) -> PoolFacts:
    row = _mapping(data, key)
    options = row.get("options", {})
    if not isinstance(options, Mapping):
        raise ProfileError(f"{key}.options is {options!r}; give an object")
    return PoolFacts(count=_whole(row, "count", key), num_pages=_whole(row, "num_pages", key), options=dict(options))


def _prefill_point(row: Any, where: str) -> PrefillPoint:
    return PrefillPoint(**_chunks(row, where))


def _mixed_point(row: Any, where: str) -> MixedPoint:
    return MixedPoint(
        **_chunks(row, where),
        batch_size=_whole(row, "batch_size", where),
        context_tokens=_whole(row, "context_tokens", where),
    )


def _chunks(row: Any, where: str) -> dict[str, Any]:
    chunks = row.get("chunks") if isinstance(row, Mapping) else None
    try:
        made = tuple((int(length), int(start)) for length, start in chunks or ())
    except (TypeError, ValueError, OverflowError):
        made = ()
    if not made or any(length < 1 or start < 0 for length, start in made):
        raise ProfileError(f"{where}.chunks is {chunks!r}; give pairs of tokens computed and tokens before them")
    return {"chunks": made, "seconds": _above_0(row, "seconds", where), **_common(row, where)}


def _decode_point(row: Any, where: str) -> DecodePoint:
    return DecodePoint(
        batch_size=_whole(row, "batch_size", where),
        context_tokens=_whole(row, "context_tokens", where),
        seconds=_above_0(row, "seconds", where),
        **_common(row, where),
    )


def _transfer_point(row: Any, where: str) -> TransferPoint:
    return TransferPoint(
        tokens=_whole(row, "tokens", where),
        bytes=_whole(row, "bytes", where),
        seconds=_number(row, "seconds", where),
        exposed_s=_number(row, "exposed_s", where),
        **_common(row, where),
    )


def _slowdown_point(row: Any, where: str) -> SlowdownPoint:
    return SlowdownPoint(
        batch_size=_whole(row, "batch_size", where),
        prefill=_above_0(row, "prefill", where),
        decode=_above_0(row, "decode", where),
    )


def _fault(row: Mapping[str, Any]) -> Fault:
    return Fault(**{key: _number(row, key, "error") for key in ("prefill", "decode", "transfer")})


def _load(row: Any) -> UnderLoad:
    return UnderLoad(
        prefill=_phase(row, "prefill"),
        decode=_phase(row, "decode"),
        gap_s=_number(row, "gap_s", "load"),
        handoff_s=_number(row, "handoff_s", "load"),
        runs=tuple(_load_run(run, f"load.runs[{i}]") for i, run in enumerate(_rows(row, "runs", "load"))),
    )


def _phase(row: Any, key: str) -> PhaseUnderLoad:
    phase, where = _get(row, key, "load")
    factors = {name: _above_0(phase, name, where) for name in ("alone", "beside")}
    errors = {name: _number(phase, name, where) for name in ("bias", "swing", "noise")}
    more_s = _number(phase, "more_s", where) if "more_s" in phase else 0.0  # not in files of before
    return PhaseUnderLoad(more_s=more_s, **factors, **errors)


def _load_run(row: Any, where: str) -> LoadRun:
    tables = {key: _numbers(row, key, where) for key in ("prefill_noise", "decode_noise", "client_s")}
    tables["client_rest_s"] = _numbers(row, "client_rest_s", where, least=-math.inf)
    if len(tables["client_s"]) != len(tables["client_rest_s"]):
        lengths = " and ".join(f"{len(tables[key])} in {key}" for key in ("client_s", "client_rest_s"))
        raise ProfileError(f"{where} has {lengths}, which belong together; {MEND}")
    factors = {key: _above_0(row, key, where) for key in ("rate", "tokens_per_s", "busy", "prefill", "decode")}
    values: dict[str, Any] = {**tables, **factors}
    return LoadRun(at_s=_number(row, "at_s", where), requests=_whole(row, "requests", where), **values)


def _numbers(data: Any, key: str, where: str, least: float = 0.0) -> tuple[float, ...]:
    rows = {f"{key}[{i}]": value for i, value in enumerate(_rows(data, key, where))}
    return tuple(_number(rows, name, where, least) for name in rows)


def _common(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    repeats = _whole(row, "repeats", where) if "repeats" in row else 1
    return {"repeats": repeats, "held_out": bool(row.get("held_out", False))}


def _get(data: Any, key: str, where: str) -> tuple[Any, str]:
    name = f"{where}.{key}" if where else key
    if not isinstance(data, Mapping) or key not in data:
        raise ProfileError(f"{name} is missing; {MEND}")
    return data[key], name


def _number(data: Any, key: str, where: str = "", least: float = 0.0) -> float:
    value, name = _get(data, key, where)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= sys.float_info.max or value < least:
        raise ProfileError(f"{name} is {value!r}; give a number{' of 0 or more' if not least else ''}")
    return float(value)


def _above_0(data: Any, key: str, where: str = "") -> float:
    value = _number(data, key, where)
    if not value:
        raise ProfileError(f"{where}.{key} is 0; give a number above 0")
    return value


def _whole(data: Any, key: str, where: str = "") -> int:
    value, name = _get(data, key, where)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ProfileError(f"{name} is {value!r}; give a whole number of 1 or more")
    return value


def _text(data: Any, key: str) -> str:
    value, name = _get(data, key, "")
    if not isinstance(value, str):
        raise ProfileError(f"{name} is {value!r}; give text")
    return value


def _mapping(data: Any, key: str) -> Mapping[str, Any]:
    value, name = _get(data, key, "")
    if not isinstance(value, Mapping):
        raise ProfileError(f"{name} is {value!r}; give an object")
    return value


def _rows(data: Any, key: str, where: str = "") -> Sequence[Any]:
    value, name = _get(data, key, where)
    if not isinstance(value, list):
        raise ProfileError(f"{name} is {value!r}; give a list")
    return value
