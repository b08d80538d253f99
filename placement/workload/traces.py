"""What requests a trace holds and when they come: reading files, drawing arrival times. Nothing is sent here.

Pure: all chance comes from the generator that the caller passes, so that one seed always makes one workload. Times are
seconds since the first request, lengths are tokens. The load generator (kvrelay.bench.workload) and the planner share
it.

Traces: CSV (Azure's TIMESTAMP,ContextTokens,GeneratedTokens, or other names for the same, such as BurstGPT's, see
COLUMNS, and a class of requests, their priority and when their clients leave if it has those columns) and Mooncake's
JSON lines (timestamp in ms, input_length, output_length, hash_ids: one for each run of 512 prompt tokens; equal ids
mean equal tokens; and priority and cancel_after_s, if given).
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

MOONCAKE_BLOCK_TOKENS = 512
MOST_LENGTH = 1_000_000_000  # tokens
MOST_FIELD = 2**30  # characters of a CSV's field: prompts may stand beside their lengths
MOST_PRIORITY = 2**31 - 1  # that a request can carry
WHOLE_PRIORITY = f"a whole number of {-MOST_PRIORITY} to {MOST_PRIORITY}, 0 for most"
PARTED = ("\t", ";", "|")  # that stand where a CSV's commas should
PACKED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ", b"PK\x03\x04")  # how gzip, zstd, xz and zip begin
COLUMNS = {  # of a CSV: what it may call them, in any case of letters
    "arrival": ("TIMESTAMP", "arrival_s", "arrival_ms", "arrival", "arrived_at", "arrival_timestamp"),
    "prompt": (
        *("ContextTokens", "prompt_tokens", "prompt_len", "prompt_size", "input_length", "num_prefill_tokens"),
        "Request tokens",
    ),
    "output": (
        *("GeneratedTokens", "output_tokens", "output_len", "token_size", "output_length", "num_decode_tokens"),
        "Response tokens",
    ),
    "class": ("class", "request_class", "request_type"),
    "priority": ("priority",),
    "cancel": ("cancel_after_s",),
}


class WorkloadError(ValueError):
    """A workload that cannot be made: one sentence naming the file and line or the key, the value and the mend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One request before it has content. `blocks`: the prompt begins with these runs of `block_len` tokens."""

    input_len: int
    output_len: int
    at_s: float = 0.0
    blocks: tuple[int, ...] = ()
    block_len: int = MOONCAKE_BLOCK_TOKENS
    kind: str = ""  # its class, of those with targets of their own
    priority: int = 0  # lower goes first
    cancel_after_s: float = math.inf  # its client leaves so long after it came


def arrivals_s(num: int, rate: float, burstiness: float, rng: np.random.Generator) -> list[float]:
    """When `num` requests come, the first at 0. `rate`: requests/s; infinity sends all at once.

    Gaps are gamma distributed with mean 1/rate and shape `burstiness`: 1 is Poisson, less is burstier (the coefficient
    of variation is burstiness ** -0.5), more is steadier. As `vllm bench serve` draws them, without its rescaling.
    """
    if not rate > 0:
        raise WorkloadError(f"request rate is {rate:g}; give requests per second above 0, or inf")
    if not (burstiness > 0 and math.isfinite(burstiness)):
        raise WorkloadError(f"burstiness is {burstiness:g}; give a number above 0 (1 is Poisson)")
    if math.isinf(rate) or num == 0:
        return [0.0] * num
    gaps = rng.gamma(shape=burstiness, scale=1.0 / (rate * burstiness), size=num - 1)
    return [0.0, *np.cumsum(gaps).tolist()]


def read_trace(path: Path, limit: int | None = None) -> list[Shape]:
    """The first `limit` requests of a trace, the first one at 0 s. Raises WorkloadError naming file, line and key."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = next((letter for letter in iter(partial(file.read, 1), "") if not letter.isspace()), ",")
            is_json = first in "{[" or path.suffix in (".json", ".jsonl")
            read = _mooncake_rows if is_json else _csv_rows
            file.seek(0)
            rows = list(islice(read(file, str(path)), limit))
    except OSError as error:
        why = error.strerror or "it is a pipe, which is read but once"
        raise WorkloadError(f"trace {path} cannot be read: {why}; give a file") from None
    except UnicodeDecodeError as error:
        if error.object.startswith(PACKED):
            raise WorkloadError(f"trace {path} is compressed; unpack it first") from None
        raise WorkloadError(f"trace {path} is not UTF-8 at byte {error.start}; convert it first") from None
    except csv.Error as error:
        raise WorkloadError(f"trace {path} is no CSV: {error}; give one line for each request") from None
    if not rows:
        raise WorkloadError(f"trace {path} has no requests; give one with at least one")
    return [replace(shape, at_s=shape.at_s - rows[0].at_s) for shape in rows]


def _csv_rows(file: Iterable[str], name: str) -> Iterator[Shape]:
    """Azure's columns, or the first of each of COLUMNS that the header names."""
    csv.field_size_limit(MOST_FIELD)
    reader = csv.DictReader(file)
    columns = _columns(reader.fieldnames or (), name)
    read_time, wanted = _times(columns["arrival"])
    last_s = -math.inf
    for row in reader:
        where = f"{name}:{reader.line_num}"
        at_s = _value(where, row, columns["arrival"], read_time, wanted)
        last_s = _not_before(where, columns["arrival"], at_s, last_s)
        yield Shape(
            input_len=_length(where, row, columns["prompt"]),
            output_len=_length(where, row, columns["output"]),
            at_s=at_s,
            kind=_value(where, row, columns["class"], str, "a class on each line") if "class" in columns else "",
            priority=_priority(where, row, columns["priority"]) if "priority" in columns else 0,
            cancel_after_s=_cancel(where, row, columns["cancel"]) if "cancel" in columns else math.inf,
        )


def _columns(header: Sequence[str], name: str) -> dict[str, str]:
    """What each column is called here."""
    if len(header) == 1 and (mark := next((mark for mark in PARTED if mark in header[0]), "")):
        raise WorkloadError(f"{name}:1: columns are parted by {mark!r}; put commas between them")
    called = {column.strip().lower(): column for column in header}
    columns = {
        what: next(called[alias.lower()] for alias in aliases if alias.lower() in called)
        for what, aliases in COLUMNS.items()
        if any(alias.lower() in called for alias in aliases)
    }
    for what in ("arrival", "prompt", "output"):
        if what not in columns:
            first, *others = COLUMNS[what]
            raise WorkloadError(f"{name}:1: no column {first} (or {', '.join(others)}); the header must name one")
    return columns


def _times(column: str) -> tuple[Callable[[Any], float], str]:
    """How to read the arrival column, which says its unit; TIMESTAMP may be a date or seconds."""
    if column.strip().lower().endswith("_ms"):
        return (lambda text: float(text) / 1000.0), "milliseconds"
    if column.strip().lower().endswith("_s"):
        return float, "seconds"
    return _seconds, "a time such as 2023-11-16 18:15:46.68, or seconds"


def _mooncake_rows(file: Iterable[str], name: str) -> Iterator[Shape]:
    last_s = -math.inf
    for number, line in enumerate(file, start=1):
        where = f"{name}:{number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise WorkloadError(f"{where}: not JSON ({error}); give one object on each line") from None
        if not isinstance(row, dict):
            raise WorkloadError(f"{where}: {line.strip()[:40]} is no object; give one on each line")
        at_s = _value(where, row, "timestamp", float, "milliseconds") / 1000.0
        last_s = _not_before(where, "timestamp", at_s, last_s)
        yield Shape(
            input_len=_length(where, row, "input_length"),
            output_len=_length(where, row, "output_length"),
            at_s=at_s,
            blocks=tuple(
                _value(where, {"hash_ids": h}, "hash_ids", _whole, "whole numbers") for h in _hashes(where, row)
            ),
            priority=_priority(where, row, "priority") if "priority" in row else 0,
            cancel_after_s=_cancel(where, row, "cancel_after_s"),
        )


def _hashes(where: str, row: dict[str, Any]) -> tuple[int, ...]:
    given = row.get("hash_ids") or []
    if not isinstance(given, list):
        raise WorkloadError(f"{where}: hash_ids is {given!r}; give a list of whole numbers")
    return tuple(_value(where, {"hash_ids": item}, "hash_ids", _whole, "whole numbers") for item in given)


def _seconds(text: str) -> float:
    """A number is seconds. A time that names no zone is UTC's: Azure's have none, and 7 digits after the point, which
    are cut to microseconds."""
    with suppress(ValueError):
        return float(text)
    when = datetime.fromisoformat(text)
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


def _whole(given: Any) -> int:
    number = int(given)
    if number != float(given):
        raise ValueError
    return number


def _priority(where: str, row: dict[str, Any], key: str) -> int:
    priority: int = _value(where, row, key, _whole, WHOLE_PRIORITY)
    if abs(priority) > MOST_PRIORITY:
        raise WorkloadError(f"{where}: {key} is {priority}; give {WHOLE_PRIORITY}")
    return priority


def _cancel(where: str, row: dict[str, Any], key: str) -> float:
    """Nothing: the client stays."""
    if row.get(key) in (None, ""):
        return math.inf
    wanted = "seconds, 0 or more, or nothing where the client stays"
    after_s: float = _value(where, row, key, float, wanted)
    if after_s < 0:
        raise WorkloadError(f"{where}: {key} is {after_s:g}; give {wanted}")
    return after_s


def _length(where: str, row: dict[str, Any], key: str) -> int:
    length: int = _value(where, row, key, _whole, "a whole number of 1 or more")
    if not 1 <= length <= MOST_LENGTH:
        mend = "1 or more" if length < 1 else f"{MOST_LENGTH} at most"
        raise WorkloadError(f"{where}: {key} is {length!s:.40}; give {mend}, or take the line out")
    return length


def _value(where: str, row: dict[str, Any], key: str, kind: Callable[[Any], Any], wanted: str) -> Any:
    given = row.get(key)
    if given is None or given == "":
        raise WorkloadError(f"{where}: {key} is missing; give {wanted}")
    try:
        if isinstance(given, bool):  # of JSON, which is a number to Python
            raise TypeError
        value = kind(given)
    except (TypeError, ValueError, OverflowError):
        raise WorkloadError(f"{where}: {key} is {given!r:.80}; give {wanted}") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise WorkloadError(f"{where}: {key} is {given!r}; give {wanted}")
    return value


def _not_before(where: str, key: str, at_s: float, last_s: float) -> float:
    if at_s < last_s:
        raise WorkloadError(f"{where}: {key} is {last_s - at_s:g} s before the line above; sort the trace by time")
    return at_s
