"""How `kvrelay up` looks: bars on a terminal, lines in a log, one object with --json, a pipe to the parent of a
background process. A view shows; it decides nothing.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from typing import Any, Protocol, TextIO

from kvrelay.cli.console import CliError, note, report

STAGES = ("waiting", "started", "weights", "kernels", "parity check", "loaded", "ready")
SHARES = {
    "waiting": 0.0,
    "started": 0.05,
    "weights": 0.15,
    "kernels": 0.6,
    "parity check": 0.8,
    "loaded": 0.95,
    "ready": 1.0,
}


class View(Protocol):
    def starting(self) -> None: ...

    def progress(self, snapshot: dict[str, Any]) -> None: ...

    def ready(self, summary: dict[str, Any]) -> None: ...

    def stopping(self) -> None: ...

    def failed(self, error: CliError) -> int:
        """Returns the exit code."""


def choose(*, as_json: bool, report_fd: int | None) -> View:
    if report_fd is not None:
        return PipeView(os.fdopen(report_fd, "w"))
    if as_json:
        return JsonView()
    return BarView() if sys.stderr.isatty() else LineView()


class JsonView:
    """stdout: one object when ready, or when it failed."""

    def starting(self) -> None:
        return

    def progress(self, snapshot: dict[str, Any]) -> None:
        return

    def ready(self, summary: dict[str, Any]) -> None:
        _answer(json.dumps(summary))

    def stopping(self) -> None:
        return

    def failed(self, error: CliError) -> int:
        return report(error, as_json=True)


class LineView:
    """stderr: a line for each change of a member's stage; stdout: the endpoint, once."""

    def __init__(self) -> None:
        self._shown: dict[str, tuple[str, str]] = {}

    def starting(self) -> None:
        note("starting Ray")

    def progress(self, snapshot: dict[str, Any]) -> None:
        for member in snapshot["members"]:
            now = (member["stage"], member["incarnation"])
            if self._shown.get(member["name"], ("waiting", "")) != now:
                self._shown[member["name"]] = now
                note(line_of(member))
        for name in self._shown.keys() - {member["name"] for member in snapshot["members"]}:
            del self._shown[name]
            note(f"{name}: has left")

    def ready(self, summary: dict[str, Any]) -> None:
        print_ready(summary)

    def stopping(self) -> None:
        note("stopping")

    def failed(self, error: CliError) -> int:
        return report(error, as_json=False)


class BarView(LineView):
    """A terminal: one bar for each member until all are ready, then lines for what changes."""

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = TextColumn("{task.description:<14}"), BarColumn(30), TextColumn("{task.fields[stage]:<14}")
        self._bars: Any = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
        self._tasks: dict[str, Any] = {}
        self._is_live = False

    def starting(self) -> None:
        self._tasks["Ray"] = self._bars.add_task("Ray", total=1.0, stage="starting")
        self._bars.start()
        self._is_live = True

    def progress(self, snapshot: dict[str, Any]) -> None:
        if not self._is_live:
            super().progress(snapshot)
            return
        self._bars.update(self._tasks["Ray"], completed=1.0, stage="ready")
        for member in snapshot["members"]:
            name = member["name"]
            if name not in self._tasks:
                self._tasks[name] = self._bars.add_task(name, total=1.0, stage="")
            why = f": {member['reason']}" if member["reason"] else ""
            self._bars.update(self._tasks[name], completed=_done(member), stage=member["stage"] + why)
            self._shown[name] = (member["stage"], member["incarnation"])

    def ready(self, summary: dict[str, Any]) -> None:
        self._end_bars()
        super().ready(summary)

    def stopping(self) -> None:
        self._end_bars()
        super().stopping()

    def failed(self, error: CliError) -> int:
        self._end_bars()
        return super().failed(error)

    def _end_bars(self) -> None:
        if self._is_live:
            self._is_live = False
            with suppress(OSError):
                self._bars.stop()


class PipeView:
    """Lines of JSON to the process that waits for us; what comes after `ready` or `failed` goes to our log."""

    def __init__(self, pipe: TextIO) -> None:
        self._pipe: TextIO | None = pipe
        self._log = LineView()

    def starting(self) -> None:
        self._send({"starting": True})

    def progress(self, snapshot: dict[str, Any]) -> None:
        self._log.progress(snapshot)
        self._send({"progress": snapshot})

    def ready(self, summary: dict[str, Any]) -> None:
        self._send({"ready": summary})
        self._close()

    def stopping(self) -> None:
        self._log.stopping()

    def failed(self, error: CliError) -> int:
        self._send({"failed": str(error), "code": error.code})
        self._close()
        return self._log.failed(error)

    def _send(self, message: dict[str, Any]) -> None:
        if self._pipe is None:
            return
        try:
            print(json.dumps(message), file=self._pipe, flush=True)
        except BrokenPipeError:  # the parent was interrupted; it ends us itself
            self._pipe = None

    def _close(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None


def replay(view: View, message: dict[str, Any]) -> int | None:
    """Show what a PipeView sent; the exit code once it was the last."""
    if "failed" in message:
        return view.failed(CliError(message["failed"], message["code"]))
    if "ready" in message:
        view.ready(message["ready"] | {"detached": True})
        return 0
    if "progress" in message:
        view.progress(message["progress"])
    else:
        view.starting()
    return None


def line_of(member: dict[str, Any]) -> str:
    where = f" on {member['address']}" if member["stage"] == "ready" else ""
    why = f": {member['reason']}" if member["reason"] else ""
    return f"{member['name']}: {member['stage']}{where}{why}"


def print_ready(summary: dict[str, Any]) -> None:
    """The endpoint alone on stdout, for scripts; how to go on for a person."""
    for endpoint in summary["endpoints"]:
        _answer(endpoint)
    if checks := summary.get("checks"):
        from kvrelay.cli.doctor import show
        from kvrelay.doctor.finding import from_plain

        show(from_plain(checks), to_stderr=True)
    served = f"{' and '.join(summary['models'])} {'are' if summary['models'][1:] else 'is'} served"
    note(f'{served} in {summary["ready_s"]:.1f} s; try: kvrelay generate "Hello"')
    for address in summary["http"]:
        note(f"OpenAI's API: {address}/v1; a page to watch: {address}/")
    note(f"logs: {summary['logs']}")
    note(f"end it with: kvrelay down {summary['name']}" if summary.get("detached") else "end it with Ctrl-C")


def _answer(line: str) -> None:
    """On stdout. A cluster serves though who started it has gone away."""
    with suppress(OSError):
        print(line, file=sys.__stdout__, flush=True)


def _done(member: dict[str, Any]) -> float:
    """How much of its start a member has behind it, 0 .. 1."""
    stage = member["stage"]
    if stage not in SHARES:
        return 0.0
    begin, index = SHARES[stage], STAGES.index(stage)
    end = SHARES[STAGES[index + 1]] if index + 1 < len(STAGES) else 1.0
    return begin + float(member["fraction"]) * (end - begin)
