"""record_calls writes down every call of one policy, with its arguments, result and time: what a live run decided.

It wraps the policy object in place, so that its driver is the same whether it records or not, and a driver that does
not record pays nothing. The file is for placement/checks/replay.py, which feeds the calls to a fresh policy and
compares.

    {"policy": "DecodePolicy", "name": "decode-0", "limits": {...}, "num_pages": 96, "page_size": 16}
    [time s, "reserve", ["r1"], {"num_tokens": 40, ...}, {"Granted": {...}}]      one line for each call, in order

A policy that is made of others (`parts`) is recorded with them: "prefill.next_batch" is its part's.

Values are written as worker/plain.py says; a result that comes back as an argument is {"result": the number of the call
that gave it}.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TextIO

from worker.plain import plain

REMEMBERED = 8  # results of a kind that may come back as an argument


def record_calls(policy: Any, directory: str | Path, name: str, num_stages: int = 1) -> None:
    """From now on, into `directory`/`name`.jsonl; .1.jsonl and so on where that was written before. The policy is
    fresh: what it was told before is not known to the recording; of its pages nobody holds any. `num_stages`: of the
    engine. Raises OSError."""
    header: dict[str, Any] = {"policy": type(policy).__name__, "name": name}
    header["limits"] = {f.name: getattr(policy.options, f.name) for f in fields(policy.options)}
    if hasattr(policy, "pool"):
        header |= {"num_pages": policy.pool.num_pages, "page_size": policy.pool.page_size}
        header |= {"num_stages": num_stages, "at_rest": plain(policy.pool.at_rest)}
    recorder = _Recorder(_unused(Path(directory), name), header)
    parts = {"": policy} | {f"{part}.": getattr(policy, part) for part in getattr(policy, "parts", ())}
    for prefix, part in parts.items():
        for method in dir(type(part)):
            if not method.startswith("_") and method != "check_invariants" and callable(getattr(type(part), method)):
                setattr(part, method, recorder.wrapped(f"{prefix}{method}", getattr(part, method)))


def _unused(directory: Path, name: str) -> TextIO:
    directory.mkdir(parents=True, exist_ok=True)
    for number in range(1000):
        try:
            return (directory / f"{name}{f'.{number}' if number else ''}.jsonl").open("x", buffering=1)
        except FileExistsError:
            continue
    raise FileExistsError(f"{directory} has a thousand recordings of {name}; give another folder")


class _Recorder:
    def __init__(self, file: TextIO, header: dict[str, Any]) -> None:
        self._file = file
        self._depth = 0  # a policy's call of its own methods is no call of the driver's
        self._calls = 0
        self._results: dict[type, deque[tuple[Any, int]]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self._file.write(json.dumps(header) + "\n")

    def wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **more: Any) -> Any:
            if self._depth:
                return call(*args, **more)
            at_s = time.monotonic()
            given = [self._argument(arg) for arg in args], {key: self._argument(arg) for key, arg in more.items()}
            self._depth += 1
            try:
                result = call(*args, **more)
            finally:
                self._depth -= 1
            self._file.write(json.dumps([at_s, name, *given, plain(result)]) + "\n")
            if is_dataclass(result):
                self._results[type(result)].append((result, self._calls))
            self._calls += 1
            return result

        return recorded

    def _argument(self, value: Any) -> Any:
        for result, call in self._results.get(type(value), ()):
            if result is value:
                return {"result": call}
        return plain(value)
