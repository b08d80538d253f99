"""Processes are those of a worker beside its leader, as the operating system has them: started, heard, ended.

    started -> begin sent -> loaded | refused -> ... -> one ends, is stopped, or says that it failed: broken, all end

What they compute is none of its business (leader.py, team.py).
"""

from __future__ import annotations

import dataclasses
import logging
import os
import selectors
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import psutil
import torch

from engine.errors import EngineBroken, UnsupportedModel
from engine.options import EngineOptions
from engine.parallel.frames import BadFrame, Channel, Frame
from engine.parallel.shard import Position
from engine.process import THREAD_KEYS

logger = logging.getLogger(__name__)
T = TypeVar("T")

SEND_TIMEOUT_S = 30.0  # a process that lives and reads nothing
NEWS_S = 0.5  # what failed here may be what a rank's end brought about, which is heard of a moment later
LOOK_S = 0.5
STOPPED_LOOKS = 4  # in a row that find one stopped (SIGSTOP): nothing is heard of it, and in a step all wait for it
ANSWERS = ("met", "share", "fit", "steps", "done")
OF_PASSES = ("hidden", "layer")
END_TIMEOUT_S = 2.0  # that one whose socket has closed may take to end


class Processes:
    """A thread starts them, listens to them, and lives as long as they: the kernel ends a process with the *thread*
    that started it, so no passing thread may start one.
    """

    def __init__(self, options: EngineOptions, device: torch.device, hear: Callable[[Frame], None]) -> None:
        """`device`: the leader's; on GPUs each has its own. `hear`: is given what they say of passes, in that
        thread."""
        self._options = options
        self._device = device
        self._hear_of_pass = hear
        self._names = [str(Position.of(number, options)) for number in range(options.num_processes)]
        self.on_broken: Callable[[], None] | None = None  # ends what they wait for together
        self._processes: dict[int, subprocess.Popen[bytes]] = {}  # by number, the leader's being 0
        self._channels: dict[int, Channel] = {}
        self._changed = threading.Condition()
        self._loaded: set[int] = set()
        self._answers: dict[int, Frame] = {}  # to what all were asked last
        self._refused = ""
        self._broken = ""
        self._stopped: Counter[int] = Counter()  # looks in a row that found one so
        self._is_closed = False
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._main, name="ranks", daemon=True)
        self._started = threading.Event()
        self._thread.start()
        self._started.wait()
        self.check()

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes.values())

    def check(self) -> None:
        if self._broken:
            raise EngineBroken(self._broken)

    def broke(self, reason: str) -> EngineBroken:
        """Note what broke, end the processes, and return the error to raise."""
        with self._changed:
            if not self._broken:  # one that died is the reason, whatever its end brought about here
                self._changed.wait_for(lambda: bool(self._broken), NEWS_S)
            self._broken = self._broken or reason
            self._changed.notify_all()
        self._kill()
        return EngineBroken(self._broken)

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Whatever fails between meetings leaves the others waiting there: nothing can go on."""
        try:
            yield
        except Exception as error:
            raise self.broke(f"{self._names[0]} failed: {type(error).__name__}: {error}") from error

    def send(self, frame: Frame) -> None:
        """To all. Raises EngineBroken."""
        for number in self._channels:
            self.send_to(number, frame)

    def send_to(self, number: int, frame: Frame) -> None:
        """Raises EngineBroken."""
        try:
            self._channels[number].send(frame)
        except OSError as error:
            raise self.broke(f"{self._names[number]} takes no step: {error.strerror or error}") from error

    def ask(self, frame: Frame, kind: str, timeout_s: float) -> list[Frame]:
        """Send it to all, and wait for an answer of that kind from each, in their order. Raises EngineBroken."""
        answers, _ = self.ask_while(frame, kind, timeout_s, lambda: None)
        return answers

    def ask_while(self, frame: Frame, kind: str, timeout_s: float, act: Callable[[], T]) -> tuple[list[Frame], T]:
        """The same, and what `act` returns, which runs while they do what they were asked."""
        self.send(frame)
        result = act()
        return self._answered(frame.kind, kind, timeout_s), result

    def all_have(self, is_done: bool, *, timeout_s: float) -> bool:
        """Whether it is done here and at all of them, who are told. They ask at the same time. Raises EngineBroken."""
        answers = self._answered("done", "done", timeout_s)
        is_done = is_done and all(answer.fields["is_done"] for answer in answers)
        self.send(Frame("done", {"is_done": is_done}))
        return is_done

    def _answered(self, asked: str, kind: str, timeout_s: float) -> list[Frame]:
        with self._changed:
            done = self._changed.wait_for(
                lambda: len(self._answers) == len(self._processes) or bool(self._broken), timeout_s
            )
            answers = [self._answers[number] for number in self._channels if number in self._answers]
            self._answers.clear()  # to what is asked next they answer when they are told this
        self.check()
        if not done or any(answer.kind != kind for answer in answers):
            raise self.broke(f"the other processes have not answered {asked!r} after {timeout_s:g} s")
        return answers

    def wait_loaded(self, timeout_s: float) -> None:
        """Raises UnsupportedModel for what one refuses, EngineBroken when one is lost or late."""
        with self._changed:
            done = self._changed.wait_for(
                lambda: len(self._loaded) == len(self._processes) or bool(self._refused or self._broken), timeout_s
            )
        if self._refused:
            raise UnsupportedModel(self._refused)
        if not done:
            raise self.broke(f"the other processes have not loaded after {timeout_s:g} s")
        self.check()

    def wait_for(self, has_come: Callable[[], bool]) -> None:
        """Until something that was to be heard has been. Raises EngineBroken."""
        with self._changed:
            self._changed.wait_for(lambda: has_come() or bool(self._broken))
        self.check()

    def close(self) -> None:
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._broken = self._broken or "the engine is closed"
            self._changed.notify_all()
        self._kill()
        self._wake.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(END_TIMEOUT_S)

    def _kill(self) -> None:
        for process in self._processes.values():
            process.kill()
        if self.on_broken is not None:
            self.on_broken()

    def _main(self) -> None:
        try:
            for number in range(1, self._options.num_processes):
                self._start(number)
        except Exception as error:  # nobody else would hear of it
            self._broken = f"the other processes cannot be started: {type(error).__name__}: {error}"
        finally:
            self._started.set()
        self._listen()
        for process in self._processes.values():
            process.kill()
            process.wait()
        for channel in self._channels.values():
            channel.close()
        self._woken.close()

    def _start(self, number: int) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(SEND_TIMEOUT_S)
        with theirs:
            self._processes[number] = subprocess.Popen(
                [sys.executable, "-P", "-m", "engine.parallel.rank", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=_environment(self._options),
            )
        self._channels[number] = Channel(ours)
        device = "cpu" if self._device.type == "cpu" else f"{self._device.type}:{number}"
        options = dataclasses.asdict(self._options) | {"device": device}
        self._channels[number].send(Frame("begin", {"number": number, "options": options}))

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ, 0)
            for number, channel in self._channels.items():
                selector.register(channel, selectors.EVENT_READ, number)
            while not self._broken:
                heard = selector.select(LOOK_S)
                for key, _ in heard:
                    if key.data and not self._is_closed:
                        self._hear(key.data)
                if not heard:
                    self._look()

    def _look(self) -> None:
        """Counted in looks and not in seconds: while this process is stopped itself, it looks at nobody."""
        for number, process in self._processes.items():
            self._stopped[number] = self._stopped[number] + 1 if _is_stopped(process.pid) else 0
            if self._stopped[number] == STOPPED_LOOKS:
                self._lose(f"{self._names[number]} (process {process.pid}) is stopped")

    def _hear(self, number: int) -> None:
        try:
            frame = self._channels[number].receive()
        except (OSError, BadFrame) as error:
            frame = Frame("failed", {"reason": f"{type(error).__name__}: {error}"})
        if frame is None:
            self._lose(f"{self._names[number]} {_end_of(self._processes[number])}")
            return
        if frame.kind not in ("loaded", "refused", *ANSWERS, *OF_PASSES):
            self._lose(f"{self._names[number]} failed: {frame.fields.get('reason', frame.kind)}")
            return
        if frame.kind in OF_PASSES:
            self._hear_of_pass(frame)
        with self._changed:
            if frame.kind == "loaded":
                self._loaded.add(number)
            elif frame.kind in ANSWERS:
                self._answers[number] = frame
            elif frame.kind == "refused":
                self._refused = self._refused or str(frame.fields["reason"])
            self._changed.notify_all()

    def _lose(self, reason: str) -> None:
        with self._changed:
            self._broken = self._broken or reason
            self._changed.notify_all()
        logger.error("%s; the worker's other processes end", self._broken)
        self._kill()


def _end_of(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"(process {process.pid}) has closed its socket"
    how = f"was ended by signal {-code}" if code < 0 else f"has ended with exit code {code}"
    return f"(process {process.pid}) {how}"


def _is_stopped(pid: int) -> bool:
    """By a signal; not by a debugger."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:  # it has just ended, which its socket tells
        return False


def _environment(options: EngineOptions) -> Mapping[str, str]:
    """The leader's, with the threads of one process: libraries read them when they are imported."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    threads = {key: str(options.threads) for key in THREAD_KEYS}
    return {**os.environ, **threads, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": path}
