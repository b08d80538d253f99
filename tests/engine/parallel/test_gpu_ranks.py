"""Ranks as they are on GPUs: a process group that sums, steps of their own with graphs, ids that the leader draws.

Rehearsed on a CPU: gloo in NCCL's place, between processes; and between threads, each with what engine/rehearsal.py has
in place of a GPU.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from typing import Any

import pytest
import torch

from engine.errors import EngineBroken
from engine.kept import KeptPages
from engine.options import EngineOptions
from engine.parallel import leader, rank
from engine.parallel.frames import Channel
from engine.parallel.mirror import chunks_frame, step_of
from engine.parallel.process_group import check_gpus
from engine.parallel.processes import SEND_TIMEOUT_S, Processes
from engine.types import PENDING, Chunk, SampleSpec, SamplingParams, Step
from tests.engine.attention import fake_flashinfer
from tests.engine.parallel.test_tensor_parallel import GREEDY, SEEDED, load, tokens_of, wait_until_gone
from tests.engine.rehearsal import RehearsedGpu, rehearse
from tests.engine.test_engine import greedy, prompts, save
from tests.engine.test_rehearsal import counted_replays, overlapped

LENGTHS = (21, 5, 33)
NEW_TOKENS = 6


class RankThread:
    """In the place of a process."""

    def __init__(self, channel: socket.socket, thread: threading.Thread) -> None:
        self.pid = os.getpid()
        self._channel = channel
        self._thread = thread

    def kill(self) -> None:
        self._channel.shutdown(socket.SHUT_RDWR)

    def wait(self, timeout_s: float | None = None) -> int:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise subprocess.TimeoutExpired("a rank's thread", timeout_s or 0.0)
        return 0


class RanksInThreads(Processes):
    def _start(self, number: int) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(SEND_TIMEOUT_S)
        platform = RehearsedGpu("tensor", True, fake_flashinfer)
        thread = threading.Thread(target=rank.run, args=(Channel(theirs), number, self._options, platform), daemon=True)
        process: Any = RankThread(theirs, thread)
        self._processes[number], self._channels[number] = process, Channel(ours)
        thread.start()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("qwen3"), "Qwen3Config", head_dim=32)


@pytest.mark.parametrize("graphs", [True, False])
def test_ranks_take_the_leader_s_steps_in_graphs_or_by_layers(
    directory: str, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = rehearse(directory, cuda_graphs=graphs)
    monkeypatch.setattr(leader, "Processes", RanksInThreads)
    two = rehearse(directory, cuda_graphs=graphs, tensor_parallel=2, collectives="process_group")
    replays = counted_replays(two) if graphs else []
    try:
        wanted = greedy(one, prompts(LENGTHS), NEW_TOKENS, chunk=16)
        assert greedy(two, prompts(LENGTHS), NEW_TOKENS, chunk=16) == wanted
        assert bool(replays) == graphs
        [prompt] = prompts((21,))
        for params in (GREEDY, SEEDED):
            tokens = [[token.token_id for token in overlapped(each, prompt, params, 7)] for each in (one, two)]
            assert tokens[0] == tokens[1]
        told: list[int] = []
        chunk = Chunk(request_id="b", token_ids=[5, 6, 7], start=0, block_table=[7])
        two.step(Step(chunks=[chunk], on_layer=told.append))
        assert told == list(range(two.layout.num_layers))
        with pytest.raises(KeyError, match="stranger"):  # which no rank was told of
            two.begin(Step(chunks=[Chunk(request_id="stranger", token_ids=[PENDING], start=3, block_table=[0])]))
        assert greedy(two, prompts(LENGTHS), NEW_TOKENS, chunk=16) == wanted
    finally:
        two.close()


def test_a_group_between_processes_gives_the_same_tokens_and_ends_with_a_lost_one(directory: str) -> None:
    one, two = load(directory, 1), load(directory, 2, collectives="process_group")
    try:
        for params in (GREEDY, SEEDED):
            assert tokens_of(two, params, chunk=16) == tokens_of(one, params, chunk=512)
        [pid] = two.model.ranks.pids  # type: ignore[union-attr]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineBroken, match=rf"^rank 1 \(process {pid}\) was ended by signal 9$"):
            tokens_of(two, GREEDY, chunk=16)
        wait_until_gone((pid,))
    finally:
        two.close()


@pytest.mark.unit
def test_a_step_reaches_the_ranks_without_what_is_the_leader_s() -> None:
    spec = SampleSpec(params=SamplingParams(temperature=0.7, seed=3), position=9, output_ids=(1, 2))
    kept = KeptPages(pages=(0, 2), window=16, prompt_len=64, page_size=16)
    chunks = [
        Chunk(request_id="a", token_ids=[4, PENDING, 6], start=5, block_table=[9, 1], sample=spec, scores=(spec,) * 2),
        Chunk(request_id="b", token_ids=(7,), start=70, block_table=range(3), kept=kept, num_dropped=1, rope_len=70),
    ]
    step = step_of(chunks_frame(Step(chunks=chunks)))
    for got, sent in zip(step.chunks, chunks, strict=True):
        assert list(got.token_ids) == list(sent.token_ids)
        assert list(got.block_table) == list(sent.block_table)
        assert (got.sample is None, len(got.scores)) == (sent.sample is None, len(sent.scores))
        for name in ("request_id", "start", "kept", "num_dropped", "rope_len"):
            assert getattr(got, name) == getattr(sent, name)
    assert step.on_layer is None
    assert step_of(chunks_frame(Step(chunks=chunks, on_layer=print))).on_layer is not None


@pytest.mark.unit
def test_gpus_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_gpus(EngineOptions(model="any", tensor_parallel=2), torch.device("cuda", 0))
    with pytest.raises(ValueError, match=r"^tensor_parallel is 4, and 2 GPUs are visible; give at most 2$"):
        check_gpus(EngineOptions(model="any", tensor_parallel=4), torch.device("cuda", 0))
    with pytest.raises(ValueError, match=r"^device is 'cuda:1' with tensor_parallel 2, whose GPUs are the first ones"):
        check_gpus(EngineOptions(model="any", tensor_parallel=2, device="cuda:1"), torch.device("cuda", 1))
