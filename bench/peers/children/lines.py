"""What a peer's process and bench.peers.serve say to each other: a line of JSON each way for each run.

    peer     {}                                        it is ready
    driver   {"requests": [[at_s, [token ids], tokens to make], ...]}
    peer     {"began_s": perf_counter of the start, "token_times_s": [[each request's], ...], "tokens": [[ids], ...]}

Times are by perf_counter, too; an id that is not told is -1.

Imported by programs that run in the peer's own environment: nothing but the standard library. What the peer's libraries
print goes to stderr.
"""

import json
import os
import sys
from typing import Any


class Lines:
    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def ready(self) -> None:
        self._say({})

    def asked(self) -> list[list[Any]] | None:
        """What to play next; None: that was all."""
        line = sys.stdin.readline()
        return json.loads(line)["requests"] if line else None

    def played(self, began_s: float, answers: list[tuple[list[float], list[int]]]) -> None:
        """When each token of each request came, and which it was."""
        times_s, tokens = zip(*answers, strict=True)
        self._say({"began_s": began_s, "token_times_s": times_s, "tokens": tokens})

    def _say(self, said: dict[str, Any]) -> None:
        print(json.dumps(said), file=self._out, flush=True)
