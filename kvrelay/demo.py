"""`python -m kvrelay.demo`: from nothing to a served model and back, on this computer's CPU, in well under a minute.

It makes a small model with random weights, starts one prefill and one decode worker with `kvrelay up`, streams one
answer, plays requests with the lengths of a published trace, prints what they took and what was handed over, stops
the cluster, and looks for processes that stayed. Anything that is not as it should be ends it with exit code 1 and a
sentence. It uses nothing that a user could not: the command and the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil
from rich.console import Console

from kvrelay.bench import metrics, workload
from kvrelay.bench import run as benchmark
from kvrelay.bench.metrics import Outcome
from kvrelay.bench.options import PlayOptions, WorkloadOptions
from kvrelay.bench.report import tables
from kvrelay.client.client import Client
from kvrelay.client.types import KvrelayError
from placement.named_files import CONFIGS

TRACE = CONFIGS / "workloads" / "azure-conv-2023.csv"
MODEL = Path(".demo/model")  # in the folder where it is run
KVRELAY = (sys.executable, "-m", "kvrelay.cli.main")
PROMPT = "The prefill worker reads the prompt; the decode worker"
NUM_REQUESTS = 24
REQUESTS_PER_S = 6.0
TARGETS_S = {"ttft": 0.5, "tpot": 0.05}
START_TIMEOUT_S = 120.0
REQUEST_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0
MIN_PROCESSES = 4  # the command, the router, two workers; and Ray's own
MARK = "KVRELAY_DEMO"  # every process that the cluster starts inherits it, wherever it moves to


class DemoFailed(Exception):
    """Something was not as it should be: one sentence."""


def main() -> int:
    began_s = time.monotonic()
    mark = uuid.uuid4().hex
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, leave)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what the model writes may be no letter of the terminal's
    try:
        make_model()
        with cluster(mark) as endpoint:
            stream_one(endpoint)
            play_trace(endpoint)
        check_nothing_left(mark)
    except (DemoFailed, KvrelayError, workload.WorkloadError) as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    say(f"Done in {time.monotonic() - began_s:.0f} s; no process was left behind.")
    return 0


def leave(signum: int, _: FrameType | None) -> NoReturn:
    """The cluster lives in a session of its own and would outlive us: unwind, which stops it."""
    raise SystemExit(128 + signum)


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def make_model() -> None:
    say("A small Llama with random weights, and a tokenizer")
    done = subprocess.run([*KVRELAY, "make-model", str(MODEL)], stderr=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise DemoFailed(f"make-model ended with {done.returncode}; run `kvrelay make-model {MODEL}` to see why")


@contextlib.contextmanager
def cluster(mark: str) -> Iterator[str]:
    """Runs `kvrelay up` while the block runs; yields the endpoint. It must end well, whatever happened inside."""
    say("One prefill worker and one decode worker, placed by Ray")
    name = f"demo-{mark[:8]}"
    flags = ("--model", str(MODEL), "--prefill", "1", "--decode", "1", "--name", name, "--port", "0")
    process = subprocess.Popen(
        [*KVRELAY, "up", *flags],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {MARK: mark},
        start_new_session=True,  # Ctrl-C reaches us alone, and we end it in order
    )
    try:
        endpoint = endpoint_of(process)
        if len(marked(mark)) < MIN_PROCESSES:
            raise DemoFailed(f"the cluster's processes cannot be told by {MARK}; nobody could say whether any stays")
        yield endpoint
    finally:
        stop(process, mark)
    if process.returncode != 0:
        raise DemoFailed(f"`kvrelay up` ended with {process.returncode} instead of 0")


def endpoint_of(process: subprocess.Popen[str]) -> str:
    """The line that `kvrelay up` prints when it is ready."""
    assert process.stdout is not None
    too_late = threading.Timer(START_TIMEOUT_S, process.terminate)
    too_late.start()
    try:
        endpoint = process.stdout.readline().strip()
    finally:
        too_late.cancel()
    if not endpoint:
        raise DemoFailed(f"`kvrelay up` was not ready within {START_TIMEOUT_S:g} s, or ended; its reason stands above")
    return endpoint


def stop(process: subprocess.Popen[str], mark: str) -> None:
    say("A clean stop")
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        for left in marked(mark):
            with contextlib.suppress(psutil.Error):
                left.kill()
        process.wait()
        raise DemoFailed(f"`kvrelay up` did not stop within {STOP_TIMEOUT_S:g} s; it was killed") from None


def check_nothing_left(mark: str) -> None:
    left = marked(mark)
    if left:
        names = ", ".join(f"{process.pid} {process.name()}" for process in left)
        raise DemoFailed(f"{len(left)} processes were left behind: {names}")


def marked(mark: str) -> list[psutil.Process]:
    """The processes that were started, at any remove, by our `kvrelay up`."""
    running = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                running.append(process)
    return running


def stream_one(endpoint: str) -> None:
    """Random weights say nothing sensible; the point is where the tokens come from."""
    say(f"One request, streamed from {endpoint}")
    print(PROMPT, end="", flush=True)
    with Client(endpoint) as client:
        client.wait_ready(START_TIMEOUT_S)
        with client.stream(PROMPT, max_tokens=48, temperature=0.8, seed=7, timeout_s=REQUEST_TIMEOUT_S) as stream:
            for delta in stream:
                print(delta.text, end="", flush=True)
    answer = stream.completion()
    receipt, timeline = answer.receipt, answer.timeline
    if receipt is None or not receipt.checksums_ok or timeline is None:
        raise DemoFailed(f"the request came back without a good receipt of its KV: {receipt}")
    way = f"{timeline.prefill_worker} -> {timeline.decode_worker}"
    print(f"\n[{way}: {receipt.pages} KV pages, {receipt.bytes:,} bytes by {receipt.transport}, checksums agree]")


def play_trace(endpoint: str) -> None:
    with Client(endpoint) as client:
        max_model_len = client.model_info().max_model_len
    shapes = workload.read_trace(TRACE, NUM_REQUESTS)
    scale = min(1.0, max_model_len / (2 + max(shape.input_len + shape.output_len for shape in shapes)))
    say(f"{NUM_REQUESTS} requests, Poisson at {REQUESTS_PER_S:g}/s, lengths of the Azure trace times {scale:.2f}")
    options = WorkloadOptions(num_prompts=NUM_REQUESTS, request_rate=REQUESTS_PER_S, trace=TRACE, trace_scale=scale)
    playing = PlayOptions(timeout_s=REQUEST_TIMEOUT_S)
    _, outcomes, duration_s = asyncio.run(benchmark.run(endpoint, options, playing, watch=dots))
    summary = metrics.summarise(outcomes, duration_s, TARGETS_S, ["ttft", "tpot", "e2el"], [50, 90, 99])
    console = Console()
    print()
    for table in tables(summary):
        console.print(table)
    handoff = summary["handoff"]
    if summary["failed"]:
        raise DemoFailed(f"{summary['failed']} of {NUM_REQUESTS} requests failed: {summary['errors']}")
    if handoff["receipts_unchecked"] or handoff["recomputed_tokens"] or not handoff["pages"]:
        raise DemoFailed(f"the KV was not handed over as it should be: {handoff}")


@contextlib.contextmanager
def dots(total: int) -> Iterator[Callable[[Outcome], None]]:
    """A dot for each answer; drawing bars would take time from the workers."""
    yield lambda outcome: print("." if outcome.succeeded else "x", end="", flush=True)


if __name__ == "__main__":
    sys.exit(main())
