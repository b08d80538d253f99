"""What handing KV over costs, between two real processes: each transport against a plain memcpy, raw gloo or raw TCP.

    python -m bench.handoff [--quick]

Three tables. *Bytes*: a transport alone moves a prompt's KV; the ratio that counts is to one memcpy of as many bytes
(shared_memory) and to one gloo send of them (the others), measured in turns, so that other load hits all alike.
*Handoff*: the same through the control stream, from the last layer to the receipt, checksums on and off. *Hidden*: a
real engine's prefill, its layers leaving as they are computed: the share of the bytes that had been sent when the last
layer was computed, and 1 - exposed / the time of the same handoff with nothing to hide behind, of which about a
millisecond is commit and receipt. Writes bench/results/handoff.json.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import itertools
import json
import multiprocessing
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import trustme
from rich.console import Console
from rich.table import Table

from engine.pages.layout import KvLayout, LayerKv
from engine.pages.memory import KvMemory
from engine.parallel.process_group import gloo_group
from kv_transfer.base import Segment, SendEnd, Wire
from kv_transfer.checksum import Checksummer, RunningDigest
from kv_transfer.options import TransferOptions
from kv_transfer.plan import cut_segments, layer_groups
from kv_transfer.transports.registry import load_transport
from kv_transfer.transports.two_rank_group import DECODE_RANK, PREFILL_RANK
from worker.wire.tls import TlsFiles

RESULTS = Path(__file__).parent / "results" / "handoff.json"
HOST, SECRET, FINGERPRINT = "127.0.0.1", "bench", "bench"
PAGE_SIZE = 16  # tokens
MODELS = {"llama-125m": (12, LayerKv(12, 64, 64)), "llama-8b": (32, LayerKv(8, 128, 128))}  # layers, one layer's KV
PROMPTS = (128, 512, 2048, 8192)
TIMEOUT_S = 20.0
IN_TLS = "_in_tls"
TRANSPORTS = ("shared_memory", "process_group", "tcp", "tcp" + IN_TLS)


def layout_of(model: str, num_tokens: int) -> KvLayout:
    count, layer = MODELS[model]
    return KvLayout(PAGE_SIZE, "bfloat16", (layer,) * count, num_tokens // PAGE_SIZE)


def segments_of(layout: KvLayout, order: Sequence[int]) -> list[Segment]:
    """What the sender makes of a prompt that fills all pages, in `order`."""
    cuts = [cut for group in layer_groups(layout, len(order), 0) for cut in cut_segments(layout, group, len(order))]
    pages = [list(order[index.start : index.stop]) for _, index in cuts]
    return [
        Segment(seq=seq, layers=layers, src_pages=chosen, dst_pages=chosen)
        for seq, ((layers, _), chosen) in enumerate(zip(cuts, pages, strict=True))
    ]


# --- the other process, which does what the pipe says ---


def receiver_process(pipe: Connection, model: str, num_tokens: int) -> None:
    torch.set_num_threads(1)
    memory = KvMemory(layout_of(model, num_tokens))
    memory.bytes.zero_()
    checksummer = Checksummer(memory)
    ends: dict[str, Any] = {}
    group: Any = None
    buffer = torch.zeros(memory.layout.page_bytes() * memory.layout.num_pages, dtype=torch.uint8)
    while (command := pipe.recv()) is not None:
        what, value = command
        if what == "offer":
            name, wire = value
            end = load_transport(name.removesuffix(IN_TLS)).offer(memory, peer="prefill", wire=wire)
            ends[name] = end
            pipe.send(dict(end.params))
            end.open(TIMEOUT_S)
        elif what == "receive":
            name, segments, checked = value
            end = ends[name]
            pipe.send("ready")
            for segment in segments:
                end.expect(segment)
            for segment in segments:
                end.receive(segment)
                end.place(segment)
                if checked:
                    checksummer.digest(segment.layers, segment.dst_pages)
            pipe.send("done")
        elif what == "gloo":
            group = raw_gloo(DECODE_RANK, value)
        elif what == "raw_gloo":
            pipe.send("ready")
            group.recv([buffer], PREFILL_RANK, 0).wait()
            pipe.send("done")
        elif what == "tcp":
            plain = socket.create_connection((HOST, value))
        elif what == "raw_tcp":
            pipe.send("ready")
            receive_all(plain, memoryview(buffer.numpy()))  # type: ignore[arg-type]  # numpy: as in checksum.py
            pipe.send("done")


def raw_gloo(rank: int, port: int) -> Any:
    dist: Any = torch.distributed
    timeout = timedelta(seconds=TIMEOUT_S)
    store = dist.TCPStore(HOST, port, is_master=rank == PREFILL_RANK, wait_for_workers=False, timeout=timeout)
    return gloo_group(dist.PrefixStore("raw", store), rank, 2, HOST, TIMEOUT_S)


@contextmanager
def other_process(target: Callable[..., None], *args: Any) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *args), daemon=True)
    process.start()
    try:
        yield ours
        ours.send(None)
        process.join(TIMEOUT_S)
    finally:
        process.kill()


# --- bytes: a transport alone ---


def timed(call: Callable[[], None]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def move(name: str, end: SendEnd, segments: list[Segment], checked: bool, pipe: Connection) -> float:
    """Seconds until the bytes stand in the other process's pages."""
    if not end.one_sided:
        pipe.send(("receive", (name, segments, checked)))
        assert pipe.recv() == "ready"

    def run() -> None:
        for segment in segments:
            end.send(segment, RunningDigest().see if checked else None)
        end.flush()
        if not end.one_sided:
            assert pipe.recv() == "done"

    return timed(run)


def send_raw(what: str, send: Callable[[], object], pipe: Connection) -> float:
    pipe.send((what, None))
    assert pipe.recv() == "ready"

    def run() -> None:
        send()
        assert pipe.recv() == "done"

    return timed(run)


def receive_all(plain: socket.socket, view: memoryview) -> None:
    while view:
        view = view[plain.recv_into(view) :]


def bench_bytes(model: str, num_tokens: int, rounds: int) -> dict[str, Any]:
    """GB/s of each way: the median, and the best, which other load on the machine spoils less."""
    layout = layout_of(model, num_tokens)
    source, copy = KvMemory(layout), KvMemory(layout)
    source.bytes.random_()
    copy.bytes.zero_()
    nbytes = layout.page_bytes() * layout.num_pages
    buffer = torch.ones(nbytes, dtype=torch.uint8)
    orders = {"consecutive": list(range(layout.num_pages)), "scattered": list(range(layout.num_pages))}
    random.Random(0).shuffle(orders["scattered"])
    segments = {name: segments_of(layout, order) for name, order in orders.items()}
    with other_process(receiver_process, model, num_tokens) as pipe, certificates() as tls:
        ends = {name: connect_transport(name, source, pipe, tls) for name in TRANSPORTS}
        group, plain = connect_raw(pipe), connect_raw_tcp(pipe)
        view = memoryview(buffer.numpy())  # type: ignore[arg-type]  # numpy: as in checksum.py
        ways: dict[str, Callable[[], float]] = {
            "memcpy": lambda: timed(lambda: void(ctypes.memmove(copy.address, source.address, nbytes))),
            "raw_gloo": lambda: send_raw("raw_gloo", lambda: group.send([buffer], DECODE_RANK, 0).wait(), pipe),
            "raw_tcp": lambda: send_raw("raw_tcp", lambda: plain.sendall(view), pipe),
        }
        for name, order, checked in itertools.product(ends, orders, (False, True)):
            ways[f"{name}/{order}/{'checksums' if checked else 'plain'}"] = way(
                name, ends[name], segments[order], checked, pipe
            )
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(rounds + 1):  # in turns; the first warms up
            for name, measure in ways.items():
                seconds[name].append(measure())
            if turn == 0:
                seconds = {name: [] for name in ways}
        plain.close()
        for end in ends.values():
            end.close()
    return {
        "model": model,
        "prompt_tokens": num_tokens,
        "mbytes": nbytes / 1e6,
        "gbytes_per_s": {name: nbytes / 1e9 / statistics.median(values) for name, values in seconds.items()},
        "best_gbytes_per_s": {name: nbytes / 1e9 / min(values) for name, values in seconds.items()},
    }


def way(name: str, end: SendEnd, segments: list[Segment], checked: bool, pipe: Connection) -> Callable[[], float]:
    return lambda: move(name, end, segments, checked, pipe)


def void(_: object) -> None:
    return None


def connect_transport(name: str, memory: KvMemory, pipe: Connection, tls: TlsFiles) -> SendEnd:
    wire = Wire(host=HOST, timeout_s=TIMEOUT_S, tls=tls if name.endswith(IN_TLS) else None)
    pipe.send(("offer", (name, wire)))
    return load_transport(name.removesuffix(IN_TLS)).connect(memory, pipe.recv(), peer="decode", wire=wire)


@contextmanager
def certificates() -> Iterator[TlsFiles]:
    from tests.certificates import write_tls

    with tempfile.TemporaryDirectory() as folder:
        yield write_tls(Path(folder), trustme.CA())


def connect_raw(pipe: Connection) -> Any:
    with socket.create_server((HOST, 0)) as probe:
        port = probe.getsockname()[1]
    pipe.send(("gloo", port))
    return raw_gloo(PREFILL_RANK, port)


def connect_raw_tcp(pipe: Connection) -> socket.socket:
    with socket.create_server((HOST, 0)) as server:
        pipe.send(("tcp", server.getsockname()[1]))
        return server.accept()[0]


def base_of(way: str) -> str:
    """What it is measured against."""
    name = way.partition("/")[0].removesuffix(IN_TLS)
    return {"shared_memory": "memcpy", "tcp": "raw_tcp"}.get(name, "raw_gloo")


# --- handoff: through the control stream ---


@dataclass
class FreeHost:
    """Grants every page, always: the bench hands over one request at a time."""

    num_pages: int
    reads_prompts = False

    def reserve(self, request: Any, room_tokens: int) -> Any:
        from kv_transfer.lease import Granted

        return Granted(tuple(range(-(-len(request.prompt_ids) // PAGE_SIZE))))

    def on_committed(self, request: Any, token_ids: Any, receipt: Any) -> None:
        pass

    def on_committed_unread(self, request: Any, num_tokens: int, receipt: Any) -> None:
        pass

    def on_lease_released(self, request: Any, reason: str) -> None:
        pass


def decode_process(
    pipe: Connection, layout: KvLayout, options: TransferOptions, make: Callable[[KvLayout], KvMemory] = KvMemory
) -> None:
    torch.set_num_threads(1)
    asyncio.run(serve_decode(pipe, make(layout), options))


async def serve_decode(pipe: Connection, memory: KvMemory, options: TransferOptions) -> None:
    from kv_transfer.decode_side.servicer import HandoffServicer
    from kvrelay.v1 import worker_pb2, worker_pb2_grpc
    from worker.wire.rpc import bind, make_server, secret_door

    memory.bytes.zero_()
    server = make_server(secret_door(SECRET))
    address = worker_pb2.WorkerAddress(name="decode-0", address=f"{HOST}:{bind(server, HOST, 0)}", incarnation="1")
    servicer = HandoffServicer(
        FreeHost(memory.layout.num_pages),
        memory=memory,
        me=address,
        model_fingerprint=FINGERPRINT,
        vocab_size=1000,
        options=replace(options, lease_ttl_s=60.0),
        address_host=HOST,
    )
    worker_pb2_grpc.add_HandoffServicer_to_server(servicer, server)
    await server.start()
    pipe.send(address.SerializeToString())
    await asyncio.to_thread(pipe.recv)
    await servicer.close()
    await server.stop(0)


async def connect_peer(pipe: Connection, memory: KvMemory, options: TransferOptions) -> Any:
    from kv_transfer.prefill_side.connect import connect
    from kvrelay.v1 import worker_pb2
    from worker.wire.rpc import handoff_dial

    return await connect(
        worker_pb2.WorkerAddress.FromString(await asyncio.to_thread(pipe.recv)),
        me=worker_pb2.WorkerAddress(name="prefill-0", incarnation="1"),
        model_fingerprint=FINGERPRINT,
        memory=memory,
        dial=handoff_dial(SECRET, silent_s=5.0),
        options=options,
        host=HOST,
    )


async def hand_off(peer: Any, name: str, num_tokens: int) -> dict[str, Any]:
    """Seconds until the grant, and from there to the receipt with every layer ready at once; and what the receipt
    says of bytes."""
    from kvrelay.v1 import worker_pb2

    layout, pages = peer.memory.layout, list(range(-(-num_tokens // PAGE_SIZE)))
    started = time.perf_counter()
    request = worker_pb2.RequestState(request_id=name, prompt_ids=range(num_tokens), attempt=1)
    handoff = peer.reserve(request, on_stalled=lambda reason: None)
    await handoff.granted()
    granted, computed_ns = time.perf_counter(), time.monotonic_ns()
    for group in layer_groups(layout, len(pages), 0):
        handoff.segment_ready(group, 0, len(pages), pages)
    receipt = await handoff.commit(token_id=1, num_tokens=num_tokens, computed_ns=computed_ns)
    return {
        "granted_s": granted - started,
        "exposed_s": time.perf_counter() - granted,
        "bytes": receipt.bytes,
        "rank_bytes": list(receipt.rank_bytes),
    }


async def bench_handoff(
    model: str, prompts: Sequence[int], rounds: int, options: TransferOptions
) -> list[dict[str, Any]]:
    layout = layout_of(model, max(prompts))
    memory = KvMemory(layout)
    memory.bytes.random_()
    rows = []
    with other_process(decode_process, layout, options) as pipe:
        peer = await connect_peer(pipe, memory, options)
        for num_tokens in prompts:
            runs = [await hand_off(peer, f"{num_tokens}-{turn}", num_tokens) for turn in range(rounds + 1)][1:]
            moved_s = statistics.median(run["exposed_s"] for run in runs)
            rows.append(
                {
                    "model": model,
                    "transport": options.transports[0],
                    "checksums": options.checksums,
                    "prompt_tokens": num_tokens,
                    "grant_ms": statistics.median(run["granted_s"] for run in runs) * 1e3,
                    "handoff_ms": moved_s * 1e3,
                    "gbytes_per_s": runs[0]["bytes"] / 1e9 / moved_s,
                }
            )
        await peer.close()
    return rows


# --- hidden: behind a real prefill ---


async def bench_hidden(
    model_dir: str, prompts: Sequence[int], rounds: int, options: TransferOptions
) -> list[dict[str, Any]]:
    from engine.engine import Engine
    from engine.options import EngineOptions

    rows = []
    num_pages = max(prompts) // PAGE_SIZE
    engine = Engine.load(EngineOptions(model=model_dir, page_size=PAGE_SIZE, num_pages=num_pages, threads=1))
    with other_process(decode_process, engine.layout, options) as pipe:
        peer = await connect_peer(pipe, engine.memory, options)
        for num_tokens in prompts:
            runs = [
                await prefill_and_hand_off(engine, peer, f"e{num_tokens}-{t}", num_tokens) for t in range(rounds + 1)
            ]
            alone = [await hand_off(peer, f"a{num_tokens}-{turn}", num_tokens) for turn in range(rounds + 1)]
            exposed_s = statistics.median(run["exposed_s"] for run in runs[1:])
            alone_s = statistics.median(run["exposed_s"] for run in alone[1:])
            rows.append(
                {
                    "transport": options.transports[0],
                    "prompt_tokens": num_tokens,
                    "prefill_ms": statistics.median(run["prefill_s"] for run in runs[1:]) * 1e3,
                    "handoff_alone_ms": alone_s * 1e3,
                    "exposed_ms": exposed_s * 1e3,
                    "hidden_share": 1 - exposed_s / alone_s,
                    "sent_early_share": statistics.median(run["sent_early_share"] for run in runs[1:]),
                }
            )
        await peer.close()
    return rows


async def prefill_and_hand_off(
    engine: Any, peer: Any, name: str, num_tokens: int, chunk_tokens: int = 512
) -> dict[str, float]:
    """As the prefill driver does it: chunk by chunk, the layer groups of each chunk as soon as they are computed."""
    from engine.types import Chunk, Step
    from kvrelay.v1 import worker_pb2

    tokens = [17 + i % 1000 for i in range(num_tokens)]
    pages = list(range(-(-num_tokens // PAGE_SIZE)))
    request = worker_pb2.RequestState(request_id=name, prompt_ids=tokens, attempt=1)
    handoff = peer.reserve(request, on_stalled=lambda reason: None)
    started = time.perf_counter()
    for begin in range(0, num_tokens, chunk_tokens):
        end = min(begin + chunk_tokens, num_tokens)
        first, last = begin // PAGE_SIZE, -(-end // PAGE_SIZE)
        ends = {group.stop - 1: group for group in layer_groups(engine.layout, last - first, 0)}
        chunk = Chunk(request_id=name, token_ids=tokens[begin:end], start=begin, block_table=pages[:last])
        on_layer = segment_sender(handoff, ends, first, last, pages)
        await asyncio.to_thread(engine.step, Step(chunks=[chunk], on_layer=on_layer))
    computed, computed_ns, sent_early = time.perf_counter(), time.monotonic_ns(), handoff.bytes_sent
    receipt = await handoff.commit(token_id=1, num_tokens=num_tokens, computed_ns=computed_ns)
    return {
        "prefill_s": computed - started,
        "exposed_s": time.perf_counter() - computed,
        "sent_early_share": sent_early / receipt.bytes,
    }


def segment_sender(
    handoff: Any, ends: dict[int, range], first: int, last: int, pages: list[int]
) -> Callable[[int], None]:
    def on_layer(layer: int) -> None:
        if layer in ends:
            handoff.segment_ready(ends[layer], first, last, pages[first:last])

    return on_layer


# --- all of it ---


def bench(quick: bool) -> dict[str, Any]:
    from kvrelay.demo_model import make_demo_model

    prompts = (128, 2048) if quick else PROMPTS
    rounds = 5 if quick else 15
    bytes_rows = [bench_bytes(model, n, rounds if n < 8192 else 5) for model in MODELS for n in prompts]
    transports = ("shared_memory", "process_group", "tcp")
    settings = [
        TransferOptions(transports=(name,), checksums=on, timeout_s=TIMEOUT_S)
        for name in transports
        for on in (True, False)
    ]
    handoffs = [
        row
        for model in MODELS
        for options in settings
        for row in asyncio.run(bench_handoff(model, prompts, rounds, options))
    ]
    with tempfile.TemporaryDirectory() as directory:
        model_dir = str(make_demo_model(Path(directory) / "model", size="125m"))
        hidden = [
            row
            for options in settings
            if options.checksums
            for row in asyncio.run(bench_hidden(model_dir, (512, 2048) if quick else (512, 1024, 2048), 5, options))
        ]
    return {"bytes": bytes_rows, "handoff": handoffs, "hidden": hidden}


def show(results: dict[str, Any]) -> None:
    console = Console()
    table = Table("model", "tokens", "MB", "base GB/s", "way", "GB/s", "of base", "of base, best runs")
    for row in results["bytes"]:
        median, best = row["gbytes_per_s"], row["best_gbytes_per_s"]
        for name in median:
            if "/" in name:
                base = base_of(name)
                shares = [f"{speeds[name] / speeds[base]:.0%}" for speeds in (median, best)]
                head = [row["model"], str(row["prompt_tokens"]), f"{row['mbytes']:.0f}"]
                table.add_row(*head, f"{base} {median[base]:.1f}", name, f"{median[name]:.1f}", *shares)
    console.print(table)
    for key in ("handoff", "hidden"):
        table = Table(*results[key][0])
        for row in results[key]:
            table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()))
        console.print(table)


def write(results: dict[str, Any]) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    machine = {"cpu": cpu[0].split(": ")[1] if cpu else "unknown", "cores": len(cpu), "python": sys.version.split()[0]}
    RESULTS.parent.mkdir(exist_ok=True)
    about = {"commit": commit.stdout.strip(), "machine": machine, "torch": torch.__version__, "load": os.getloadavg()}
    RESULTS.write_text(json.dumps({**about, **results}, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer prompts and rounds; writes no file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = bench(arguments.quick)
    show(results)
    if not arguments.quick:
        write(results)


if __name__ == "__main__":
    main()
