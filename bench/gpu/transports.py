"""KV between two processes on a GPU: right bytes, and how fast against a plain device copy of as many.

    python -m bench.gpu.transports [--rehearse]

cuda_ipc (or, with two GPUs, over NVLink): each prompt's KV of an 8B model, as the sender would cut it, into the other
process's pages, in order and scattered. Every page is then digested on both sides. NCCL by whichever way works here
(two GPUs; NCCL 2.30's own switch; each process as a host of its own): a correctness run, whose speed is told only for
what it is. Then a receiver is killed, and its sender must say so in time while another pair goes on.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.table import Table

from bench.gpu import common as gpu_common
from bench.gpu.common import WrongResult, said
from engine.errors import in_short
from engine.pages.layout import KvLayout, LayerKv
from engine.pages.memory import KvMemory
from kv_transfer.base import Segment, SendEnd, TransferError, Wire
from kv_transfer.checksum import Checksummer, device_checksummer
from kv_transfer.plan import GPU_SEGMENT_BYTES, cut_segments, layer_groups
from kv_transfer.transports.gpu import nccl_settings
from kv_transfer.transports.registry import load_transport

T = TypeVar("T")

PAGE_SIZE = 16
PROMPTS = (128, 512, 2048, 8192)
WANTED_SHARE = 0.7  # of a plain device copy, at 2048 tokens and more
ROUNDS = 15
TIMEOUT_S = 5.0
ANSWER_S = 90.0
NCCL_ANSWER_S = 35.0  # two processes started one in the other, and NCCL set up; it may hang where it is only tried
KILL_LIMIT_S = TIMEOUT_S + 3.0
HOST = "127.0.0.1"


def layout_of(num_tokens: int, rehearse: bool) -> KvLayout:
    layer, count = (LayerKv(2, 64, 64), 4) if rehearse else (LayerKv(8, 128, 128), 32)
    return KvLayout(PAGE_SIZE, "bfloat16", (layer,) * count, num_tokens // PAGE_SIZE)


def random_memory(layout: KvLayout, device: str, seed: int) -> KvMemory:
    memory = KvMemory(layout, device)
    memory.bytes.random_(generator=torch.Generator(device).manual_seed(seed))
    return memory


def digest(memory: KvMemory, pages: Sequence[int]) -> int:
    checksummer = device_checksummer(memory) or Checksummer(memory)
    return checksummer.digest(range(memory.layout.num_layers), pages)


def segments_of(layout: KvLayout, src: Sequence[int], dst: Sequence[int]) -> list[Segment]:
    cuts = [
        cut
        for group in layer_groups(layout, len(src), 0)
        for cut in cut_segments(layout, group, len(src), GPU_SEGMENT_BYTES)
    ]
    return [
        Segment(
            seq=seq, layers=layers, src_pages=src[index.start : index.stop], dst_pages=dst[index.start : index.stop]
        )
        for seq, (layers, index) in enumerate(cuts)
    ]


# --- the other process ---


def _receiver(pipe: Connection, name: str, layout: KvLayout, device: str, environ: dict[str, str]) -> None:
    """Offers `name`, then does what the pipe says: receive segments, digest pages, end."""
    os.environ.update(environ)
    memory = random_memory(layout, device, seed=2)
    try:
        end = load_transport(name).offer(memory, peer="prefill", wire=Wire(host=HOST, timeout_s=TIMEOUT_S))
        pipe.send(dict(end.params))
        end.open(TIMEOUT_S)
        while (command := pipe.recv()) is not None:
            what, value = command
            if what == "receive":
                for segment in value:
                    end.expect(segment)
                pipe.send("posted")
                for segment in value:
                    end.receive(segment)
                    end.place(segment)
                pipe.send("done")
            else:
                pipe.send(digest(memory, value))
    except Exception as error:  # whatever this machine's CUDA says
        with contextlib.suppress(OSError):
            pipe.send(error if isinstance(error, TransferError) else TransferError(in_short(error)))


class Other:
    """A receiving process and our end of the pair with it."""

    def __init__(
        self,
        name: str,
        memory: KvMemory,
        layout: KvLayout,
        device: str,
        environ: dict[str, str] | None = None,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        args = (theirs, name, layout, device, environ or {})
        self.process = context.Process(target=_receiver, args=args, daemon=True)
        self.process.start()
        theirs.close()
        params = self.answer()
        self._num_sent = 0
        self.end: SendEnd = load_transport(name).connect(
            memory, params, peer="decode", wire=Wire(host=HOST, timeout_s=TIMEOUT_S)
        )

    def answer(self) -> Any:
        if not self.pipe.poll(ANSWER_S):
            raise TransferError(f"the other process said nothing for {ANSWER_S:g} s")
        answer = self.pipe.recv()
        if isinstance(answer, TransferError):
            raise answer
        return answer

    def move(self, wanted: Sequence[Segment]) -> float:
        """Seconds until the bytes stand in the other's pages. Segments get the pair's running numbers."""
        segments = [replace(segment, seq=self._num_sent + i) for i, segment in enumerate(wanted)]
        self._num_sent += len(segments)
        if not self.end.one_sided:
            self.pipe.send(("receive", segments))
            assert self.answer() == "posted"
        started = time.perf_counter()
        for segment in segments:
            self.end.send(segment)
        self.end.flush()
        if not self.end.one_sided:
            assert self.answer() == "done"
        took_s = time.perf_counter() - started
        if self.end.one_sided:  # outside the time, as in life: the announcements
            self.pipe.send(("receive", segments))
            assert self.answer() == "posted"
            assert self.answer() == "done"
        return took_s

    def digest(self, pages: Sequence[int]) -> int:
        self.pipe.send(("digest", pages))
        return int(self.answer())

    def close(self) -> None:
        self.end.close()
        with contextlib.suppress(OSError):
            self.pipe.send(None)
        self.process.join(10.0)
        if self.process.is_alive():
            self.process.kill()


# --- speed and correctness ---


def plain_copy_s(nbytes: int, device: str, rounds: int) -> float:
    """Seconds of one contiguous copy on the device, the host's wait for it included; buffers in turn, out of caches."""
    buffers = [torch.empty(nbytes, dtype=torch.uint8, device=device).random_() for _ in range(4)]
    times = []
    for turn in range(rounds + 1):
        _settle(device)
        started = time.perf_counter()
        buffers[turn % 2].copy_(buffers[2 + turn % 2])
        _settle(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def _settle(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def orders(num_pages: int, of: int) -> Iterator[tuple[str, list[int], list[int]]]:
    """Source and destination pages of a prompt, in memories with `of` pages each."""
    rng, first = random.Random(num_pages), list(range(num_pages))
    yield "consecutive", first, first
    yield "scattered", rng.sample(range(of), num_pages), rng.sample(range(of), num_pages)


def measure(
    name: str, prompts: Sequence[int], devices: tuple[str, str], rehearse: bool, rounds: int
) -> list[dict[str, Any]]:
    """Prompts of so many tokens, through one pair. Raises WrongResult."""
    layout = layout_of(max(prompts), rehearse)
    memory = random_memory(layout, devices[0], seed=1)
    other = Other(name, memory, layout, devices[1])
    rows = []
    for num_tokens in prompts:
        nbytes = layout.page_bytes() * (num_tokens // PAGE_SIZE)
        copy_s = plain_copy_s(nbytes, devices[0], rounds)
        for order, src, dst in orders(num_tokens // PAGE_SIZE, layout.num_pages):
            segments = segments_of(layout, src, dst)
            times = [other.move(segments) for _ in range(rounds + 1)][1:]
            if other.digest(dst) != digest(memory, src):
                raise WrongResult(f"{name} brought other bytes than were sent: {num_tokens} tokens, {order} pages")
            took_s = statistics.median(times)
            rows.append(
                said(
                    {
                        "transport": name,
                        "prompt_tokens": num_tokens,
                        "pages": order,
                        "mbytes": round(nbytes / 1e6, 1),
                        "segments": len(segments),
                        "gbytes_per_s": nbytes / 1e9 / took_s,
                        "best_gbytes_per_s": nbytes / 1e9 / min(times),
                        "plain_copy_gbytes_per_s": nbytes / 1e9 / copy_s,
                        "share_of_plain_copy": copy_s / took_s,
                    }
                )
            )
    other.close()
    return rows


# --- NCCL ---


def nccl_ways() -> list[tuple[str, tuple[str, str], dict[str, str]]]:
    """(what it is, the two devices, environment), the best first."""
    ways: list[tuple[str, tuple[str, str], dict[str, str]]] = []
    if torch.cuda.device_count() > 1:
        ways.append(("two GPUs", ("cuda:0", "cuda:1"), {}))
    version = nccl_settings.loaded_version()
    if version is not None and version >= nccl_settings.MULTI_RANK_VERSION:
        ways.append(("one GPU, NCCL's own switch", ("cuda:0", "cuda:0"), {nccl_settings.MULTI_RANK_KEY: "1"}))
    ways.append(("one GPU, each process a host of its own", ("cuda:0", "cuda:0"), {nccl_settings.ONE_GPU_SWITCH: "1"}))
    return ways


def _nccl_process(pipe: Connection, devices: tuple[str, str], environ: dict[str, str], rehearse: bool) -> None:
    """In a process of its own, for NCCL reads its environment once."""
    os.environ.update(environ)
    try:
        pipe.send(measure_nccl(devices, environ, rehearse))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")


def measure_nccl(devices: tuple[str, str], environ: dict[str, str], rehearse: bool) -> dict[str, Any]:
    layout = layout_of(512, rehearse)
    memory = random_memory(layout, devices[0], seed=1)
    other = Other("process_group", memory, layout, devices[1], environ)
    _, (_, src, dst) = list(orders(layout.num_pages, layout.num_pages))
    segments = segments_of(layout, src, dst)
    times = [other.move(segments) for _ in range(6)]
    is_right = other.digest(dst) == digest(memory, src)
    other.close()
    nbytes = layout.page_bytes() * layout.num_pages
    return {"is_right": is_right, "mbytes": nbytes / 1e6, "gbytes_per_s": nbytes / 1e9 / statistics.median(times[1:])}


def check_nccl(rehearse: bool) -> dict[str, Any]:
    """The first way that runs; the others with why they did not."""
    ways = [("gloo on CPU, its twin", ("cpu", "cpu"), {})] if rehearse else nccl_ways()
    refused: list[str] = []
    context = multiprocessing.get_context("spawn")
    for what, devices, environ in ways:
        ours, theirs = context.Pipe()
        process = context.Process(target=_nccl_process, args=(theirs, devices, environ, rehearse))
        process.start()
        limit_s = ANSWER_S if rehearse else NCCL_ANSWER_S
        answer = ours.recv() if ours.poll(limit_s) else f"no answer for {limit_s:g} s"
        process.join(10.0)
        if process.is_alive():
            process.kill()
        if isinstance(answer, dict):
            if not answer["is_right"]:
                raise WrongResult(f"NCCL brought other bytes than were sent ({what})")
            return {"way": what, "refused": refused, **answer}
        refused.append(f"{what}: {answer}")
        if devices[0] != devices[1] or rehearse:  # nothing may keep two GPUs apart
            raise WrongResult(f"process_group did not run ({refused[-1]})")
    return {"way": "", "refused": refused}


# --- a lost peer ---


def check_lost_peer(name: str, devices: tuple[str, str], rehearse: bool) -> dict[str, Any]:
    """A killed receiver is an error within the limit, and the other pair of the same sender goes on."""
    layout = layout_of(128, rehearse)
    memory = random_memory(layout, devices[0], seed=1)
    lost, other = (Other(name, memory, layout, devices[1]) for _ in range(2))
    pages = list(range(layout.num_pages))
    segments = segments_of(layout, pages, pages)
    lost.process.kill()
    lost.process.join()
    started = time.perf_counter()
    try:
        for segment in segments:
            lost.end.send(segment)
        lost.end.flush()
    except TransferError as error:
        reason = str(error)
    else:
        raise WrongResult(f"{name}: sending to a killed receiver raised nothing")
    took_s = time.perf_counter() - started
    if took_s > KILL_LIMIT_S:
        raise WrongResult(f"{name}: a killed receiver was noticed after {took_s:.1f} s")
    other.move(segments)
    if other.digest(pages) != digest(memory, pages):
        raise WrongResult(f"{name}: after another pair was lost, this one brought other bytes")
    other.close()
    lost.end.close()
    return {"transport": name, "noticed_s": took_s, "reason": reason}


# --- all of it ---


def tried(wrong: list[str], run: Callable[[], T]) -> T | None:
    """What it gives; None where it fails, and `wrong` has why: what comes after it tells something, too."""
    try:
        return run()
    except (WrongResult, TransferError) as error:
        wrong.append(str(error))
    except Exception as error:
        traceback.print_exc()
        wrong.append(in_short(error))
    print(f"WRONG: {wrong[-1]}", flush=True)
    return None


def bench(rehearse: bool) -> dict[str, Any]:
    if rehearse:
        torch.set_num_threads(1)
    device = gpu_common.device_of(rehearse)
    one_sided = "shared_memory" if rehearse else "cuda_ipc"
    prompts, rounds = ((128, 512), 2) if rehearse else (PROMPTS, ROUNDS)
    pairs = [(device, device)]
    if not rehearse and torch.cuda.device_count() > 1:
        pairs.append(("cuda:0", "cuda:1"))
    wrong: list[str] = []
    rows = [
        row | {"devices": f"{devices[0]} -> {devices[1]}"}
        for devices in pairs
        for row in tried(wrong, partial(measure, one_sided, prompts, devices, rehearse, rounds)) or ()
    ]
    losses = [(one_sided, devices) for devices in pairs]
    if rehearse or len(pairs) > 1:  # NCCL wants two GPUs, but for a test of its bytes
        losses.append(("process_group", pairs[-1]))
    lost = [tried(wrong, partial(check_lost_peer, name, devices, rehearse)) for name, devices in losses]
    nccl = tried(wrong, partial(check_nccl, rehearse))
    version = nccl_settings.loaded_version()
    return {
        "nccl_version": ".".join(map(str, version)) if version else None,
        "bytes": rows,
        "nccl": nccl or {"way": "", "refused": []},
        "lost_peer": [row for row in lost if row is not None],
        "wrong": wrong,
        "wanted_share": WANTED_SHARE,
        "reaches_wanted_share": not wrong
        and all(
            row["share_of_plain_copy"] >= WANTED_SHARE
            for row in rows
            if row["prompt_tokens"] >= 2048 and row["devices"] == f"{device} -> {device}"
        ),
    }


def show(result: dict[str, Any]) -> None:
    console = Console()
    table = Table("devices", "transport", "tokens", "pages", "MB", "GB/s", "plain copy", "share")
    for row in result["bytes"]:
        shown = (row["devices"], row["transport"], row["prompt_tokens"], row["pages"], row["mbytes"])
        speeds = (f"{row['gbytes_per_s']:.1f}", f"{row['plain_copy_gbytes_per_s']:.1f}")
        table.add_row(*map(str, shown), *speeds, f"{row['share_of_plain_copy']:.0%}")
    console.print(table)
    found = result["nccl"]
    if found["way"]:
        console.print(f"NCCL {result['nccl_version']}: right bytes ({found['way']}), {found['gbytes_per_s']:.2f} GB/s")
    for reason in found["refused"]:
        console.print(f"NCCL not this way: {reason}")
    for row in result["lost_peer"]:
        console.print(f"{row['transport']}: a killed receiver was noticed after {row['noticed_s']:.2f} s")


def main() -> None:
    arguments = gpu_common.parser(__doc__).parse_args()
    gpu_common.check_device(arguments.rehearse)
    out: Path | None = arguments.out
    result = bench(arguments.rehearse)
    show(result)
    print(gpu_common.save("transports", gpu_common.about(arguments.rehearse) | result, arguments.rehearse, out))
    if result["wrong"]:
        sys.exit("\n".join(f"WRONG: {why}" for why in result["wrong"]))


if __name__ == "__main__":
    main()
