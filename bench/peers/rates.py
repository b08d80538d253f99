"""The load of bench.e2e for another server: the same prompts at the same times, at each rate."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench.common import CpuWatch, demo_model
from bench.e2e import Run, load_of, noted, playing, summary_of
from bench.peers.serve import Server
from bench.rounds import Replays
from kvrelay.bench.run import drawn
from kvrelay.bench.workload import timed_shapes
from kvrelay.client.types import ServedModel


def play(peer: Server, rates: Sequence[float], seconds: float, first_seed: int, replays: Replays) -> list[Run]:
    """Every rate; as bench.e2e's rows, no handoffs are in them."""
    with peer.awake():
        return [_clean_run(peer, rate, seconds, first_seed + i, replays) for i, rate in enumerate(rates)]


def _clean_run(peer: Server, rate: float, seconds: float, seed: int, replays: Replays) -> Run:
    return replays.clean(lambda attempt: noted(partial(_play_rate, peer, rate, seconds, seed, attempt)))


def _play_rate(peer: Server, rate: float, seconds: float, seed: int, attempt: int) -> Run:
    load = load_of(rate, seconds, seed)
    warmups, requests = drawn(load, playing(seed, attempt), _model_of(demo_model("125m")), timed_shapes(load))
    peer.play(warmups)
    cpu = CpuWatch(lambda: {peer.name: peer.pids(), "client": [os.getpid()]})
    cpu.begin()
    outcomes, duration_s = peer.play(requests)
    return {"asked_per_s": rate, "seed": seed, **summary_of(outcomes, duration_s), **cpu.end()}


def _model_of(folder: Path) -> ServedModel:
    config = json.loads((folder / "config.json").read_text())
    eos = config["eos_token_id"]
    return ServedModel(
        name=folder.name,
        architecture=config["architectures"][0],
        dtype="bfloat16",
        vocab_size=config["vocab_size"],
        max_model_len=config["max_position_embeddings"],
        num_params=0,
        eos_token_ids=tuple(eos) if isinstance(eos, list) else (eos,),
        fingerprint="",
    )
