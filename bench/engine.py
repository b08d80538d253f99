"""How fast the engine is beside transformers on the same machine, and what share of the possible that is.

    python -m bench.engine [--quick] [--peers openvino,vllm] [--json PATH]

Three run the same 124.7M Llama-shaped model in bfloat16 with the same number of threads, turn by turn, so that other
work on the machine hits them alike: the engine, transformers' `generate`, and its continuous batching
(`generate_batch`, its manager kept between calls). Each has a process of its own, which is stopped while it is not its
turn, because an idle manager polls. A turn beside too much other work is played again (bench/rounds.py). A decode step
of transformers is the time for 1 + N tokens less that for 1, over N.
Read the ratios; the rates are this machine's, at this load. Threads wait as a worker's do, in all three: for a
moment, then they sleep (threads that spin at a barrier on shared cores are what keeps the awaited one from running).
With `--peers` other servers, each in an environment of its own (bench/peers/), take turns with them: a prompt alone to
its first token; so many requests at once, of which the steps count after the last one's first token.

The floor of a decode step is the bytes it must read (weights, KV) over the measured memory bandwidth; that of a prefill
is its multiplications over the measured bfloat16 rate.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
import transformers
from rich.console import Console
from rich.table import Table

from bench.common import CpuWatch, about, demo_model, end_with_parent, on_this_cpu, other_cores, save
from bench.peers.install import PEERS, peer_names
from bench.peers.serve import Server, servers
from bench.rounds import Replays, counted, noise_report, spread, told
from engine.engine import Engine
from engine.options import EngineOptions
from engine.process import set_environment
from engine.types import Chunk, SampleSpec, SamplingParams, Step
from engine.weights.linear import can_pack

NAMES = ("kvrelay", "generate", "generate_batch")
PREFILL_TOKENS = (128, 256, 512, 2048)
DECODE_BATCHES = (1, 8, 32)
PLAN = (*(("prefill", n) for n in PREFILL_TOKENS), *(("decode", n) for n in DECODE_BATCHES))
VOCAB = 30_000  # ids that all contenders know
PROMPT_TOKENS = 128  # of a request whose decode is measured
LEAST_TURNS = 2  # measured, whatever they take; more only within
MEASUREMENT_S = 75.0
FAR_BEHIND = 5.0  # times as long as ours takes one that has no more than LEAST_TURNS turns
NUM_PAGES = 2048
PAGE_SIZE = 16
TARGETS = {f"prefill {n}": 1.0 for n in PREFILL_TOKENS} | {"decode 1": 1.0, "decode 8": 1.5, "decode 32": 1.5}
GREEDY = SamplingParams(temperature=0.0)

Timed = Callable[[int, int], float]  # (batch or tokens, turn) -> seconds


@dataclass(frozen=True, slots=True)
class Contender:
    """`prefill(tokens, turn)` and `decode(batch, turn)` give the seconds of a whole prefill, of one decode step."""

    name: str
    prefill: Timed
    decode: Timed


def in_turns(
    contenders: Mapping[str, Contender],
    batches: Sequence[int],
    prefills: Sequence[int],
    rounds: int,
    on_round: Callable[[int], None] = lambda number: None,
) -> dict[str, dict[str, list[float]]]:
    """Seconds of each contender in each round, by `decode 8`, `prefill 512`: round 0 warms up, and every second round
    the last one is the first. `on_round` is told the number of each."""
    took: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number in range(rounds + 1):
        on_round(number)
        for way in list(contenders)[:: -1 if number % 2 else 1]:
            decode, prefill = contenders[way].decode, contenders[way].prefill
            for name, sizes, turn_s in (("decode", batches, decode), ("prefill", prefills, prefill)):
                for rows in sizes:
                    seconds = turn_s(rows, number)
                    if number:
                        took[f"{name} {rows}"][way].append(seconds)
    return took


def compared(took: Mapping[str, Sequence[float]], one: str, other: str, digits: int = 2) -> dict[str, Any]:
    """Of what two took in turns: medians in ms, and how fast `one` is beside the `other`."""
    times = {f"{who}_ms": round(1e3 * statistics.median(seconds), digits) for who, seconds in took.items()}
    return {**times, "speed": spread(list(zip(took[one], took[other], strict=True)))}


def prompts(count: int, tokens: int, turn: int, vocab_size: int = VOCAB) -> list[list[int]]:
    """New ones each turn and for each length, so that no cache of prefixes helps anybody."""
    generator = torch.Generator().manual_seed((turn * 1000 + count) * 10000 + tokens)
    return torch.randint(3, min(VOCAB, vocab_size), (count, tokens), generator=generator).tolist()


def _seconds(run: Callable[[], Any]) -> float:
    began_s = time.perf_counter()
    run()
    return time.perf_counter() - began_s


def ours(engine: Engine, new_tokens: int, prompt_tokens: int = PROMPT_TOKENS) -> Contender:
    def step(sequences: list[list[int]], start: int) -> None:
        pages = -(-(start + len(sequences[0]) + new_tokens) // engine.layout.page_size)
        spec = SampleSpec(params=GREEDY, position=start + len(sequences[0]))
        engine.step(
            Step(
                chunks=[
                    Chunk(
                        request_id=str(i),
                        token_ids=ids,
                        start=start,
                        block_table=range(i * pages, (i + 1) * pages),
                        sample=spec,
                    )
                    for i, ids in enumerate(sequences)
                ]
            )
        )

    def decode(batch: int, turn: int) -> float:
        step(prompts(batch, prompt_tokens, turn, engine.info.vocab_size), 0)
        last = [[5]] * batch

        def steps() -> None:
            for i in range(new_tokens):
                step(last, prompt_tokens + i)

        return _seconds(steps) / new_tokens

    def prefill(tokens: int, turn: int) -> float:
        return _seconds(lambda: step(prompts(1, tokens, turn, engine.info.vocab_size), 0))

    return Contender("kvrelay", prefill, decode)


def generate(model: Any, new_tokens: int) -> Contender:
    def run(sequences: list[list[int]], new: int) -> None:
        ids = torch.tensor(sequences)
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
        )

    def decode(batch: int, turn: int) -> float:
        sequences = prompts(batch, PROMPT_TOKENS, turn)
        first = _seconds(lambda: run(sequences, 1))
        return (_seconds(lambda: run(sequences, 1 + new_tokens)) - first) / new_tokens

    return Contender("generate", lambda tokens, turn: _seconds(lambda: run(prompts(1, tokens, turn), 1)), decode)


def continuous_batching(model: Any, new_tokens: int) -> Contender:
    config = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    pages = transformers.ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=4096, allow_block_sharing=False)

    def run(sequences: list[list[int]], new: int) -> None:
        done = model.generate_batch(
            sequences,
            generation_config=config,
            continuous_batching_config=pages,
            persistent_manager=True,
            max_new_tokens=new,
        )
        lengths = {len(output.generated_tokens) for output in done.values()}
        assert lengths == {new}, f"requests of {new} tokens gave {lengths}"

    def decode(batch: int, turn: int) -> float:
        first = _seconds(lambda: run(prompts(batch, PROMPT_TOKENS, turn), 1))
        both = _seconds(lambda: run(prompts(batch, PROMPT_TOKENS, turn + 500), 1 + new_tokens))
        return (both - first) / new_tokens

    return Contender("generate_batch", lambda tokens, turn: _seconds(lambda: run(prompts(1, tokens, turn), 1)), decode)


def memory_bytes_per_s() -> float:
    """Of reading one large buffer, best of a few."""
    buffer = torch.ones(1 << 27)
    buffer.sum()
    return buffer.numel() * 4 / min(_seconds(lambda: buffer.sum()) for _ in range(8))


def matmul_flops_per_s() -> float:
    """Of a large product through oneDNN's packed weights, best of a few: in bfloat16, or in float32 on a CPU for which
    oneDNN has no bfloat16, and where the engine multiplies in float32, too."""
    size, dtype = 2048, torch.bfloat16 if can_pack(torch.bfloat16) else torch.float32
    x, w = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    packed = torch.ops.mkldnn._reorder_linear_weight(w)
    product = torch.ops.mkldnn._linear_pointwise

    def run() -> None:
        product(x, packed, None, "none", [], "")

    run()
    return 2 * size**3 / min(_seconds(run) for _ in range(8))


def _serve(line: Connection, name: str, directory: str, threads: int, new_tokens: int) -> None:
    """A contender's process: say what the model is, then answer (kind, size, turn) until told None."""
    end_with_parent()
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    facts: dict[str, float] = {}
    if name == "kvrelay":
        engine = Engine.load(
            EngineOptions(model=directory, dtype="bfloat16", num_pages=NUM_PAGES, page_size=PAGE_SIZE, threads=threads)
        )
        facts = {"params": engine.info.num_params, "token_kv_bytes": engine.layout.page_bytes() / PAGE_SIZE}
        contender = ours(engine, new_tokens)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
        contender = {"generate": generate, "generate_batch": continuous_batching}[name](model, new_tokens)
    line.send(facts)
    machine = {"memory": memory_bytes_per_s, "matmul": matmul_flops_per_s}
    while (asked := line.recv()) is not None:
        kind, size, turn = asked
        line.send(machine[kind]() if kind in machine else getattr(contender, kind)(size, turn))
    os._exit(0)  # a kept manager's thread would hold the process


class Contending(Protocol):
    """A contender in processes of its own, stopped between turns."""

    name: str

    def ask(self, kind: str, size: int = 0, turn: int = 0) -> float: ...
    def pids(self) -> list[int]: ...


class Runner:
    """One of NAMES."""

    def __init__(self, name: str, directory: str, threads: int, new_tokens: int) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._line, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, name, directory, threads, new_tokens), daemon=True)
        self._process.start()
        theirs.close()
        self.facts: dict[str, float] = self._line.recv()
        self._signal(signal.SIGSTOP)

    def ask(self, kind: str, size: int = 0, turn: int = 0) -> float:
        """Seconds of a prefill or a decode step; or what the machine does in a second, of "memory" or "matmul"."""
        self._signal(signal.SIGCONT)
        self._line.send((kind, size, turn))
        took: float = self._line.recv()
        self._signal(signal.SIGSTOP)
        return took

    def pids(self) -> list[int]:
        assert self._process.pid is not None
        return [self._process.pid]

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        self._line.send(None)
        self._process.join()

    def _signal(self, number: int) -> None:
        for pid in self.pids():
            os.kill(pid, number)


class PeerRunner:
    """Another server's, likewise."""

    def __init__(self, peer: Server, new_tokens: int) -> None:
        self.name = peer.name
        self.pids = peer.pids
        self._new_tokens = new_tokens
        self._server = peer

    def ask(self, kind: str, size: int = 0, turn: int = 0) -> float:
        with self._server.awake():
            return self._prefill(size, turn) if kind == "prefill" else self._decode(size, turn)

    def _prefill(self, tokens: int, turn: int) -> float:
        [times_s] = self._server.token_times([(0.0, prompt, 1) for prompt in prompts(1, tokens, turn)])
        return times_s[0]

    def _decode(self, batch: int, turn: int) -> float:
        """Those that were first have more tokens to make than are counted: all are there until the end."""
        new = self._new_tokens
        asked = [(0.0, prompt, 1 + 2 * new) for prompt in prompts(batch, PROMPT_TOKENS, turn)]
        last = max(self._server.token_times(asked), key=lambda times_s: times_s[0])
        return (last[new] - last[0]) / new


def floors(facts: dict[str, float], embedding_params: int, bandwidth: float, rate: float) -> dict[str, float]:
    """Seconds that the machine itself needs, for each measurement. The embedding is looked up, the head is untied."""
    result = {"memory_gb_per_s": bandwidth / 1e9, "matmul_gflop_per_s": rate / 1e9}
    read_params = facts["params"] - embedding_params
    for tokens in PREFILL_TOKENS:
        result[f"prefill {tokens}"] = 2 * (read_params - embedding_params) * tokens / rate  # the head: one row
    for batch in DECODE_BATCHES:
        result[f"decode {batch}"] = (2 * read_params + batch * PROMPT_TOKENS * facts["token_kv_bytes"]) / bandwidth
    return result


Turn = dict[str, Any]  # {"seconds": {contender: of it}, and what CpuWatch and Replays say of it}


def measure(
    runners: Sequence[Contending], plan: Sequence[tuple[str, int]], turns: int, say: Callable[[str], None]
) -> tuple[dict[str, list[Turn]], dict[str, float]]:
    """Each measurement's turns, after one that warms up; and what the machine does in a second at its best, of "memory"
    and "matmul": looked at before each measurement. The first runner is ours."""
    machine: dict[str, list[float]] = {"memory": [], "matmul": []}
    measured = {}
    replays = Replays(turns * len(plan))
    for kind, size in plan:
        say(f"{kind} {size}")
        for what, rates in machine.items():
            rates.append(runners[0].ask(what))
        measured[f"{kind} {size}"] = _turns(runners, kind, size, turns, replays)
    return measured, {what: max(rates) for what, rates in machine.items()}


def _turns(runners: Sequence[Contending], kind: str, size: int, turns: int, replays: Replays) -> list[Turn]:
    seeds = itertools.count()  # an attempt has prompts of its own, too
    _turn(runners, kind, size, next(seeds))
    played: list[Turn] = []
    began_s = time.monotonic()
    while len(played) < turns and (len(played) < LEAST_TURNS or time.monotonic() - began_s < MEASUREMENT_S):
        first = len(played) % len(runners)
        asked = [runner for runner in (*runners[first:], *runners[:first]) if not _is_far_behind(played, runner.name)]
        played.append(_clean_turn(asked, kind, size, seeds, replays))
    return played


def _clean_turn(runners: Sequence[Contending], kind: str, size: int, seeds: Iterator[int], replays: Replays) -> Turn:
    return replays.clean(lambda _: _turn(runners, kind, size, next(seeds)))


def _turn(runners: Sequence[Contending], kind: str, size: int, seed: int) -> Turn:
    cpu = CpuWatch(lambda: {**{runner.name: runner.pids() for runner in runners}, "bench": [os.getpid()]})
    cpu.begin()
    seconds = {runner.name: runner.ask(kind, size, seed) for runner in runners}
    return {"seconds": seconds, **cpu.end()}


def _is_far_behind(played: Sequence[Turn], name: str) -> bool:
    if len(played) < LEAST_TURNS:
        return False
    return _median_s(played, name) > FAR_BEHIND * _median_s(played, "kvrelay")


def _of(turns: Sequence[Turn], name: str) -> list[Turn]:
    """Those that count of the turns that it had."""
    return counted(turn for turn in turns if name in turn["seconds"])


def _median_s(turns: Sequence[Turn], name: str) -> float:
    return float(statistics.median(turn["seconds"][name] for turn in _of(turns, name)))


def summary(measured: dict[str, list[Turn]], floor: dict[str, float]) -> list[dict[str, Any]]:
    return [_row(key, turns, floor[key]) for key, turns in measured.items()]


def _row(key: str, turns: Sequence[Turn], floor_s: float) -> dict[str, Any]:
    size = int(key.split()[1])
    median = {name: _median_s(turns, name) for name in (*NAMES, *PEERS) if name in turns[0]["seconds"]}
    of_transformers = [median[name] for name in NAMES[1:] if name in median]
    return {
        "what": key,
        "tokens_per_s": {name: round(size / took_s, 1) for name, took_s in median.items()},
        "ms": {name: round(took_s * 1e3, 2) for name, took_s in median.items()},
        "ratio_to_better": round(min(of_transformers) / median["kvrelay"], 2) if of_transformers else None,
        "ratio_to": {name: _ratio(turns, name) for name in median if name != "kvrelay"},
        "target": TARGETS[key],
        "share_of_floor": round(floor_s / median["kvrelay"], 2),
    }


def _ratio(turns: Sequence[Turn], name: str) -> dict[str, float]:
    """Of its time to ours, in the turns that it had."""
    return spread([(turn["seconds"]["kvrelay"], turn["seconds"][name]) for turn in _of(turns, name)])


def show(result: dict[str, Any], console: Console) -> None:
    table = Table(title=f"124.7M Llama, bfloat16, {result['threads']} threads: tokens/s")
    names = list(result["rows"][0]["tokens_per_s"])
    peers = [name for name in names if name not in NAMES]
    ratios = ["ratio to the better of transformers'", "target", *(f"to {name}'s (least, most)" for name in peers)]
    for column in ("", *names, *ratios, "share of the floor"):
        table.add_column(column, justify="left" if not column else "right")
    for row in result["rows"]:
        rates = [f"{row['tokens_per_s'][name]:,.0f}" for name in names]
        table.add_row(
            row["what"],
            *rates,
            f"{row['ratio_to_better']:.2f}x",
            f"{row['target']:.1f}x",
            *(told(row["ratio_to"][name]) for name in peers),
            f"{row['share_of_floor']:.0%}",
        )
    console.print(table)
    console.print(
        f"memory {result['floor']['memory_gb_per_s']:.0f} GB/s, bfloat16 products "
        f"{result['floor']['matmul_gflop_per_s']:.0f} GFLOP/s; {result['other_cores_before']:.1f} cores were busy with "
        f"other work before, {result['other_cores_after']:.1f} after"
    )


def run(
    names: Sequence[str], peers: Mapping[str, Server], plan: Sequence[tuple[str, int]], quick: bool, threads: int
) -> dict[str, Any]:
    """What is written: of `names`, ours the first, and of the other servers, for each measurement of the plan."""
    turns, new_tokens = (3, 6) if quick else (15, 8)
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning:multiprocessing.resource_tracker")
    directory = str(demo_model("125m"))
    config = transformers.AutoConfig.from_pretrained(directory)
    before = other_cores()
    with contextlib.ExitStack() as running:
        own = [Runner(name, directory, threads, new_tokens) for name in names]
        for runner in own:
            running.callback(runner.close)
        runners: list[Contending] = [*own, *(PeerRunner(peer, new_tokens) for peer in peers.values())]
        measured, machine = measure(runners, plan, turns, partial(print, "measuring", file=sys.stderr, flush=True))
    floor = floors(own[0].facts, config.vocab_size * config.hidden_size, machine["memory"], machine["matmul"])
    return {
        **about(),
        "threads": threads,
        "turns": turns,
        "transformers": transformers.__version__,
        "other_cores_before": round(before, 2),
        "other_cores_after": round(other_cores(), 2),
        "floor": floor,
        "rows": summary(measured, floor),
        **noise_report(measured),
        "rounds": measured,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer turns and tokens; figures are rough")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the result there, not to bench/results")
    parser.add_argument("--threads", type=int, default=min(2, psutil.cpu_count()), help="of each; default %(default)s")
    parser.add_argument(
        "--peers", type=peer_names, default=[], metavar="NAMES", help=f"beside, too: {', '.join(PEERS)}"
    )
    args = parser.parse_args()
    console = Console()
    set_environment(args.threads)  # as a worker's; read by the contenders' processes when they start
    cores = sorted(os.sched_getaffinity(0))[: args.threads]
    with servers(args.peers, demo_model("125m"), cores, print) as peers:
        result = run(NAMES, peers, PLAN, args.quick, args.threads)
    show(result, console)
    if args.json is None:
        console.print(f"written to {save(on_this_cpu('engine'), result)}")
    else:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
