"""Other servers play the same requests as kvrelay, in processes of their own: see children/lines.py.

    with servers(["openvino"], model, [0, 1], print) as peers, peers["openvino"].awake() as peer:
        outcomes, duration_s = peer.play(requests)

OpenVINO and vLLM are driven without a network between: what they stream is taken from their engine's own queue.
llama.cpp's server is asked over HTTP. All are started once, and stopped while others have their turn.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil

from bench.common import end_with_parent
from bench.peers.install import CHILDREN, PEERS, installed
from kvrelay.bench.load import Planned
from kvrelay.bench.metrics import Outcome

READY_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0


class Server:
    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self.name = name
        self._process = process
        watchdog = threading.Timer(READY_TIMEOUT_S, process.kill)
        watchdog.start()
        self._heard()  # that it is ready
        watchdog.cancel()

    def play(self, requests: list[Planned]) -> tuple[list[Outcome], float]:
        """As kvrelay.bench.load.play: what became of each, in seconds since the start, and seconds to the last end."""
        lines = [(each.at_s, each.request.token_ids.ids, each.request.sampling.max_tokens) for each in requests]
        outcomes = []
        for index, (planned, since_s) in enumerate(zip(requests, self.token_times(lines), strict=True)):
            outcomes.append(
                Outcome(
                    index=index,
                    due_s=planned.at_s,
                    input_len=planned.input_len,
                    token_times_s=since_s,
                    output_len=len(since_s),
                    ended_s=since_s[-1],
                )
            )
        return outcomes, max(outcome.ended_s for outcome in outcomes)

    def token_times(self, requests: Iterable[tuple[float, Iterable[int], int]]) -> list[list[float]]:
        """Of requests (seconds since the start, prompt, tokens to make): when each token came, by the same clock."""
        heard = self._played(requests)
        return [[at_s - heard["began_s"] for at_s in times_s] for times_s in heard["token_times_s"]]

    def tokens(self, requests: Iterable[tuple[float, Iterable[int], int]]) -> list[list[int]]:
        """Of the same: the greedy tokens; -1 where one was not told."""
        return list(self._played(requests)["tokens"])

    def _played(self, requests: Iterable[tuple[float, Iterable[int], int]]) -> dict[str, Any]:
        assert self._process.stdin is not None
        lines = [[at_s, list(prompt), max_tokens] for at_s, prompt, max_tokens in requests]
        print(json.dumps({"requests": lines}), file=self._process.stdin, flush=True)
        return self._heard()

    @contextlib.contextmanager
    def awake(self) -> Iterator[Server]:
        """Its processes run in here, and are stopped afterwards."""
        self._signal(signal.SIGCONT)
        try:
            yield self
        finally:
            self.pause()

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def pids(self) -> list[int]:
        """None when it has ended."""
        try:
            own = psutil.Process(self._process.pid)
            return [own.pid, *(child.pid for child in own.children(recursive=True))]
        except psutil.NoSuchProcess:
            return []

    def stop(self) -> None:
        """It is awake until it has ended."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _heard(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise SystemExit(f"{PEERS[self.name].title} ended; its last words are above")
        return dict(json.loads(line))


@contextlib.contextmanager
def servers(
    names: Iterable[str], model: Path, cores: list[int], say: Callable[[str], object]
) -> Iterator[dict[str, Server]]:
    """On those cores, a thread each; stopped until they are awake."""
    with contextlib.ExitStack() as running:
        started = {}
        for name in names:
            started[name] = _started(name, model, cores, say)
            running.callback(started[name].stop)
            started[name].pause()
        yield started


def _started(name: str, model: Path, cores: list[int], say: Callable[[str], object]) -> Server:
    python = installed(name, say)
    bound = f"{cores[0]}-{cores[-1]}" if len(cores) > 1 else str(cores[0])
    process = subprocess.Popen(
        [str(python), str(CHILDREN / PEERS[name].program), str(model), str(len(cores))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=end_with_parent,
        env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": bound, "PYTHONPATH": ""},
    )
    return Server(name, process)
