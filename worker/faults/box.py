"""FaultBox makes a worker go wrong in the ways, and at the moments, that a fault suite asks for. It is only there when
WorkerOptions.faults names a folder; a worker of a cluster that serves has none.

The folder is the box's whole interface. `NAME.rules` is a JSON list of Rules, read again whenever it changes;
`NAME.log` is what came of them, a JSON object on each line: {"rule", "what": armed | fired, "at_ns", "pid"}, on the
monotonic clock, which all processes of a host share.

    at    now                                                    as soon as it is read
          step, first_chunk, later_chunk, last_chunk, decode     before a step of the engine that has such a chunk
          token                                                  before a step that computes the token `token`
          segment                                                before a segment of KV is sent (in the pair's thread)
          hello, submit, reserve, announce, commit ...           before such a message is seen
          queued, granted, receipt ...                           before such a message of a handoff is sent
    do    kill, stop       SIGKILL, SIGSTOP to `pid`; 0: this process
          hang             wait `for_s` in the thread where it happens
          fail, nan        the step raises; its logits are no numbers
          drop, double, corrupt, fail, delay          of a segment; drop, double, delay of a message
          clock            time.time() jumps by `for_s`
          log_full         stdout and stderr go to /dev/full
          tell             nothing: that it was reached is all one wants to know
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.engine import Engine
from engine.pending import PendingStep
from engine.types import Chunk, Step
from kv_transfer.base import Segment
from kv_transfer.transports.faulty import Faults

POLL_S = 0.01


class FaultAsked(RuntimeError):
    """A step that fails because a rule asked for it."""


@dataclass(slots=True, kw_only=True)
class Rule:
    """Acts on the `nth` time that `at` is reached, and `times` times in all."""

    id: str
    at: str
    do: str
    nth: int = 1
    times: int = 1
    pid: int = 0
    for_s: float = 0.0
    token: int = -1
    reached: int = field(default=0, init=False)

    def is_due(self) -> bool:
        self.reached += 1
        return self.nth <= self.reached < self.nth + self.times


class FaultBox:
    def __init__(self, folder: str, name: str) -> None:
        self.faults = Faults(before_send=self._on_segment)
        self._rules_path = Path(folder, f"{name}.rules")
        self._log_path = Path(folder, f"{name}.log")
        self._rules: dict[str, Rule] = {}
        self._lock = threading.Lock()
        self._wants_nan = False
        self._changed_ns = 0
        self._wall = (time.time, time.time_ns)

    def install(self, engine: Engine) -> None:
        """Stand before the engine's steps, and begin to read rules."""
        begin, steps = engine.begin, engine.steps

        def faulty_begin(step: Step) -> PendingStep:
            self._on_step(step)
            return begin(step)

        engine.begin = faulty_begin  # type: ignore[method-assign]
        if hasattr(steps, "_model"):  # on a GPU logits stay where a graph wrote them
            steps._model = _NanModel(steps._model, self._take_nan)
        self._read()
        threading.Thread(target=self._read_forever, name="faults", daemon=True).start()

    # What reaches a rule

    def reach(self, at: str, matches: Callable[[Rule], bool] = lambda _: True) -> list[Rule]:
        """The rules that are due here, carried out but for what only the caller can do."""
        with self._lock:
            due = [rule for rule in self._rules.values() if rule.at == at and matches(rule) and rule.is_due()]
        for rule in due:
            self._write(rule, "fired")
            self._act(rule)
        return due

    def _on_step(self, step: Step) -> None:
        tokens = {token for chunk in step.chunks for token in chunk.token_ids}
        due = self.reach("token", lambda rule: rule.token in tokens)
        for phase in ("step", *{phase_of(chunk) for chunk in step.chunks}):
            due += self.reach(phase)
        self._wants_nan = any(rule.do == "nan" for rule in due)
        if any(rule.do == "fail" for rule in due):
            raise FaultAsked(f"rule {due[0].id} asked for a step that fails")

    def _take_nan(self) -> bool:
        wanted, self._wants_nan = self._wants_nan, False
        return wanted

    def _on_segment(self, _: Segment) -> None:
        number = self.faults.sent - 1
        for rule in self.reach("segment"):
            if rule.do in ("drop", "corrupt", "fail", "double"):
                setattr(self.faults, rule.do, getattr(self.faults, rule.do) | {number})
            elif rule.do == "delay":
                time.sleep(rule.for_s)

    # What a rule does

    def _act(self, rule: Rule) -> None:
        match rule.do:
            case "kill" | "stop":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rule.pid or os.getpid(), signal.SIGKILL if rule.do == "kill" else signal.SIGSTOP)
            case "hang":
                time.sleep(rule.for_s)
            case "clock":
                wall, wall_ns = self._wall
                time.time = lambda: wall() + rule.for_s
                time.time_ns = lambda: wall_ns() + int(rule.for_s * 1e9)
            case "log_full":
                full = os.open("/dev/full", os.O_WRONLY)
                os.dup2(full, 1)
                os.dup2(full, 2)
                os.close(full)

    # The folder

    def _read_forever(self) -> None:
        while True:
            time.sleep(POLL_S)
            self._read()

    def _read(self) -> None:
        try:
            changed_ns = self._rules_path.stat().st_mtime_ns
            if changed_ns == self._changed_ns:
                return
            rules = [Rule(**entry) for entry in json.loads(self._rules_path.read_text())]
        except (OSError, ValueError):
            return  # not there, or half written: read again when it changes
        self._changed_ns = changed_ns
        with self._lock:
            fresh = [rule for rule in rules if rule.id not in self._rules]
            self._rules = {rule.id: self._rules.get(rule.id, rule) for rule in rules}
        for rule in fresh:
            self._write(rule, "armed")
        self.reach("now")

    def _write(self, rule: Rule, what: str) -> None:
        line = {"rule": rule.id, "what": what, "at_ns": time.monotonic_ns(), "pid": os.getpid()}
        with self._log_path.open("a") as log:
            log.write(json.dumps(line) + "\n")


def phase_of(chunk: Chunk) -> str:
    if len(chunk.token_ids) == 1 and chunk.start:
        return "decode"
    if chunk.sample is not None:
        return "last_chunk"
    return "later_chunk" if chunk.start else "first_chunk"


class _NanModel:
    """A model whose logits are no numbers for once."""

    def __init__(self, inner: Any, take: Callable[[], bool]) -> None:
        self._inner = inner
        self._take = take

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        logits = self._inner.forward(*arguments, **options)
        return logits.fill_(float("nan")) if self._take() else logits
