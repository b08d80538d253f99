"""The load of bench.e2e for another server: the same prompts at the same times, at each rate."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench.common import CpuWatch, demo_model
from bench.e2e import WARMUPS, Run, console, load_of, noted, summary_of
from bench.peers.serve import Server, server
from kvrelay.bench.options import PlayOptions, WorkloadOptions
from kvrelay.bench.run import drawn
from kvrelay.bench.workload import timed_shapes
from kvrelay.client.types import ServedModel


def play(name: str, rates: Sequence[float], seconds: float, first_seed: int) -> list[Run]:
    """Start it, play every rate, stop it. As bench.e2e's rows; no handoffs are in them."""
    model = demo_model("125m")
    with server(name, model, sorted(os.sched_getaffinity(0))[:2], console.print) as peer:
        play_one = partial(_play_rate, peer, _model_of(model))
        return [noted(partial(play_one, rate, load_of(rate, seconds, first_seed + i))) for i, rate in enumerate(rates)]


def _play_rate(peer: Server, model: ServedModel, rate: float, load: WorkloadOptions) -> Run:
    warmups, requests = drawn(load, PlayOptions(num_warmups=WARMUPS), model, timed_shapes(load))
    peer.play(warmups)
    cpu = CpuWatch(peer.parts)
    cpu.begin()
    outcomes, duration_s = peer.play(requests)
    return {"asked_per_s": rate, "seed": load.seed, **summary_of(outcomes, duration_s), **cpu.end()}


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
