"""Other servers play the same requests as kvrelay, in processes of their own: see children/lines.py.

    with server("openvino", model) as peer:
        run = peer.play(rate, seconds, seed)  # as bench.e2e.play

They are driven without a network between: what they stream is taken from their engine's own queue.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil

from bench.peers.install import CHILDREN, PEERS, installed
from kvrelay.bench.load import Planned
from kvrelay.bench.metrics import Outcome

READY_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0


class Server:
    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self.name = name
        self._process = process
        self._heard()  # that it is ready

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
        assert self._process.stdin is not None
        lines = [[at_s, list(prompt), max_tokens] for at_s, prompt, max_tokens in requests]
        print(json.dumps({"requests": lines}), file=self._process.stdin, flush=True)
        heard = self._heard()
        return [[at_s - heard["began_s"] for at_s in times_s] for times_s in heard["token_times_s"]]

    def pause(self, paused: bool) -> None:
        """Stop its processes, or let them go on."""
        for pid in self.parts()[self.name]:
            os.kill(pid, signal.SIGSTOP if paused else signal.SIGCONT)

    def parts(self) -> dict[str, list[int]]:
        own = psutil.Process(self._process.pid)
        return {self.name: [own.pid, *(child.pid for child in own.children(recursive=True))], "client": [os.getpid()]}

    def _heard(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{PEERS[self.name].title} ended; its last words are above")
        return dict(json.loads(line))


@contextlib.contextmanager
def server(name: str, model: Path, cores: list[int], say: Callable[[str], object]) -> Iterator[Server]:
    """On those cores, a thread each."""
    python = installed(name, say)
    bound = f"{cores[0]}-{cores[-1]}" if len(cores) > 1 else str(cores[0])
    process = subprocess.Popen(
        [str(python), str(CHILDREN / PEERS[name].program), str(model), str(len(cores))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": bound, "PYTHONPATH": ""},
    )
    assert process.stdin is not None
    try:
        yield Server(name, process)
    finally:
        process.send_signal(signal.SIGCONT)
        process.stdin.close()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
