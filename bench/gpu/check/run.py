"""Runs the parts of the GPU check, each in a process of its own with a limit, and keeps what is known in one folder.

The check may be killed at any moment: what was known before is on disk, a part that ran then stands there as `begun`,
and what that part had said is in the log.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench import common
from bench.gpu.check.parts import Part

STATE, LOG = "parts.json", "check.log"
GOOD, BEGUN = "good", "begun"
NO_TESTS = 5  # pytest's exit code where it runs none
TAIL_GOOD, TAIL_BAD = 6, 30  # lines of a part's log that are shown
WIDTH = 160
GRACE_S = 5.0  # between asking a part to end and ending it


class CannotResume(Exception):
    """What the folder holds is of another kind of run; the text is the sentence to show."""


@dataclass(frozen=True, slots=True)
class Went:
    """How a part went: `good`, `begun` while it runs (and for ever if the check was ended then), or a sentence."""

    how: str
    took_s: float = 0.0
    code: int | None = None  # None: it did not end by itself


@dataclass(slots=True)
class State:
    """What is known of a run, written whole after each change: a reader sees the one before or the one after."""

    folder: Path
    is_rehearsal: bool
    model: str | None
    commit: str | None
    went: dict[str, Went] = field(default_factory=dict)

    def note(self, name: str, went: Went) -> None:
        self.went[name] = went
        self.write()

    def write(self) -> None:
        whole = {key: value for key, value in asdict(self).items() if key != "folder"}
        (self.folder / f".{STATE}").write_text(json.dumps(whole, indent=1) + "\n")
        os.replace(self.folder / f".{STATE}", self.folder / STATE)

    def is_good(self, name: str) -> bool:
        return name in self.went and self.went[name].how == GOOD


def fresh(state: State) -> None:
    """Nothing of an earlier run stays in the folder."""
    for path in (state.folder / STATE, state.folder / LOG, *state.folder.glob("gpu_*.json")):
        path.unlink(missing_ok=True)


def resume(state: State, earlier: Path) -> None:
    """Take over the parts of `earlier` that succeeded; a folder that holds nothing yet is no mistake."""
    if not (earlier / STATE).exists():
        fresh(state)
        return
    known = json.loads((earlier / STATE).read_text())
    for key in ("is_rehearsal", "model"):
        if known[key] != (mine := getattr(state, key)):
            raise CannotResume(
                f"--resume: {earlier / STATE} has {key} {known[key]!r}, and this run has {mine!r}; "
                "give the same, or leave --resume out"
            )
    if earlier.resolve() != state.folder.resolve():
        fresh(state)
        for path in (*earlier.glob(LOG), *earlier.glob("gpu_*.json")):
            shutil.copyfile(path, state.folder / path.name)  # not its mode: `earlier` may be for reading only
    state.went = {name: Went(**went) for name, went in known["went"].items()}
    state.write()


def run_parts(parts: Sequence[Part], state: State, budget_s: float, environ: Mapping[str, str]) -> None:
    deadline_s = time.monotonic() + budget_s
    for part in parts:
        if state.is_good(part.name):
            print(f"== {part.name}: done before", flush=True)
            continue
        left_s = deadline_s - time.monotonic()
        if left_s < part.takes_s:
            went = Went(f"not begun: it takes about {part.takes_s:.0f} s, and {max(0.0, left_s):.0f} s were left")
            print(f"== {part.name}: {went.how}", flush=True)
        else:
            went = run_part(part, state, left_s, environ)
        state.note(part.name, went)


def run_part(part: Part, state: State, left_s: float, environ: Mapping[str, str]) -> Went:
    limit_s = min(part.limit_s, left_s)
    print(f"\n== {part.name} (at most {limit_s:.0f} s)", flush=True)
    state.note(part.name, Went(BEGUN))
    log = state.folder / LOG
    with log.open("ab") as sink:
        sink.write(f"\n== {part.name}: {' '.join(part.command)}\n".encode())
        sink.flush()
        from_byte, began_s = sink.tell(), time.monotonic()
        code = ended(part.command, sink.fileno(), limit_s, environ)
    took_s = round(time.monotonic() - began_s, 1)
    is_good = code == 0 or (code == NO_TESTS and part.may_be_empty)
    if code is None:
        whose = "its" if part.limit_s <= left_s else "the budget's last"
        how = f"ended after {whose} {limit_s:.0f} s"
    else:
        how = GOOD if is_good else f"WRONG or failed, exit code {code}"
    said = log.read_bytes()[from_byte:].decode(errors="replace").splitlines()
    for line in said[-(TAIL_GOOD if is_good else TAIL_BAD) :]:
        print(line[:WIDTH])
    print(f"== {part.name}: {how}, {took_s} s", flush=True)
    return Went(how, took_s, code)


def ended(command: Sequence[str], log: int, limit_s: float, environ: Mapping[str, str]) -> int | None:
    """The exit code; None when its time was over. Nothing that it started outlives it, nor us.

    A group of its own, and no session: whoever ends this check's session ends its part, too.
    """
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=common.REPO,
        env={**os.environ, **environ},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        process_group=0,
        preexec_fn=_in_child,
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        _to_group(process, signal.SIGABRT)  # Python says where it stands (PYTHONFAULTHANDLER)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        return None
    finally:
        _to_group(process, signal.SIGKILL)
        process.wait()


def _in_child() -> None:
    common.end_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _to_group(process: subprocess.Popen[bytes], which: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, which)
