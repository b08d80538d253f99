"""Ranks as they are on GPUs: a process group that sums, steps of their own with graphs, ids that the leader draws.

Rehearsed on a CPU: gloo in NCCL's place, between processes; and between threads, each with what engine/rehearsal.py has
in place of a GPU.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.engine import Engine
from engine.errors import EngineBroken
from engine.gpu.together import Together
from engine.kept import KeptPages
from engine.options import EngineOptions
from engine.parallel import leader, rank
from engine.parallel.frames import Channel, Frame
from engine.parallel.messages import info_of, steps_frame
from engine.parallel.mirror import chunks_frame, step_of
from engine.parallel.process_group import GroupCollectives, GroupHop, Groups, check_gpus
from engine.parallel.processes import SEND_TIMEOUT_S, Processes
from engine.parallel.shard import Shard
from engine.types import PENDING, Chunk, LengthRope, ModelInfo, SampleSpec, SamplingParams, Step
from engine.weights import experts
from tests.engine.attention import fake_flashinfer
from tests.engine.parallel.test_tensor_parallel import GREEDY, SEEDED, load, tokens_of, wait_until_gone
from tests.engine.rehearsal import RehearsedGpu, rehearse
from tests.engine.test_engine import VOCAB, greedy, prompts, save
from tests.engine.test_rehearsal import counted_replays, overlapped
from tests.forked import forked_ranks
from tests.zoo import make_tiny_model

__all__ = ["forked_ranks"]

LENGTHS = (21, 5, 33)
NEW_TOKENS = 6
SIZES = (1, 2, 4, 6)  # of graphs
REHEARSED: dict[str, Any] = {"num_pages": 64, "dtype": "float32", "device": "cpu", "max_graph_batch": max(SIZES)}


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
    platform: type[RehearsedGpu] = RehearsedGpu

    def _start(self, number: int) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(SEND_TIMEOUT_S)
        platform = self.platform("tensor", True, fake_flashinfer)
        thread = threading.Thread(target=rank.run, args=(Channel(theirs), number, self._options, platform), daemon=True)
        process: Any = RankThread(theirs, thread)
        self._processes[number], self._channels[number] = process, Channel(ours)
        thread.start()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("qwen3"), "Qwen3Config", head_dim=32)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize(("stages", "ranks"), [(1, 2), (2, 1), (2, 2)])
def test_others_take_the_leader_s_steps_in_graphs_or_by_layers(
    directory: str, stages: int, ranks: int, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = rehearse(directory, cuda_graphs=graphs)
    monkeypatch.setattr(leader, "Processes", RanksInThreads)
    degrees: dict[str, Any] = {"tensor_parallel": ranks, "pipeline_parallel": stages}
    many = rehearse(directory, cuda_graphs=graphs, collectives="process_group", **degrees)
    replays = counted_replays(many) if graphs else []
    try:
        assert many.num_stages == stages
        wanted = greedy(one, prompts(LENGTHS), NEW_TOKENS, chunk=16)
        assert greedy(many, prompts(LENGTHS), NEW_TOKENS, chunk=16) == wanted
        assert bool(replays) == graphs
        assert tokens_of(many, SEEDED, chunk=16, lengths=LENGTHS) == tokens_of(one, SEEDED, chunk=64, lengths=LENGTHS)
        if stages == 1:
            check_pending_tokens(one, many)
        else:
            check_steps_of_each_stage(one, many)
        told: list[int] = []
        chunk = Chunk(request_id="b", token_ids=[5, 6, 7], start=0, block_table=[7])
        many.step(Step(chunks=[chunk], on_layer=told.append))
        assert told == list(range(many.layout.num_layers))
        with pytest.raises(KeyError, match="stranger"):  # which nobody else was told of
            many.begin(Step(chunks=[Chunk(request_id="stranger", token_ids=[PENDING], start=3, block_table=[0])]))
        assert greedy(many, prompts(LENGTHS), NEW_TOKENS, chunk=16) == wanted
    finally:
        many.close()


Captured = tuple[Callable[[], object], torch.Tensor]


class ShortOfMemory(RehearsedGpu):
    """Computes nothing while it captures, as a GPU does, and has no memory for the second of the graphs, which has four
    rows."""

    failing = 2

    def capture(self) -> Callable[..., Captured]:
        count = 0

        def capture(run: Callable[[], torch.Tensor]) -> Captured:
            nonlocal count
            count += 1
            if count == self.failing:
                raise torch.OutOfMemoryError("CUDA out of memory")
            logits = torch.zeros(max(SIZES), VOCAB)

            def replay() -> None:
                rows = run()
                logits[: len(rows), : rows.shape[-1]] = rows  # a rank has a part of the vocabulary

            return replay, logits

        return capture


class Roomy(ShortOfMemory):
    failing = 0


class Failing(RehearsedGpu):
    """Has no memory for a step that is no graph."""

    def capture_steps(self, together: Together) -> Callable[..., Captured]:
        def fails(_: object) -> Captured:
            raise torch.OutOfMemoryError("CUDA out of memory")

        return together.computed(fails)


@pytest.mark.parametrize("lacks", ["rank", "leader"])
def test_a_graph_that_one_of_them_cannot_capture_none_has(
    directory: str, lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others would wait for it in the graph's sums."""
    short, roomy = ShortOfMemory, Roomy
    monkeypatch.setattr(leader, "Processes", RanksInThreads)
    monkeypatch.setattr(RanksInThreads, "platform", short if lacks == "rank" else roomy)
    platform = (roomy if lacks == "rank" else short)("tensor", True, fake_flashinfer)
    options = EngineOptions(model=directory, tensor_parallel=2, collectives="process_group", **REHEARSED)
    two = Engine.load(options, platform=platform)
    try:
        graphs = two.steps.graphs  # type: ignore[attr-defined]
        assert graphs is not None
        assert graphs.sizes == (1, 2, max(SIZES))
        replays = counted_replays(two)
        wanted = greedy(rehearse(directory), prompts(LENGTHS), NEW_TOKENS, chunk=16)
        assert greedy(two, prompts(LENGTHS), NEW_TOKENS, chunk=16) == wanted
        assert replays
    finally:
        two.close()


@pytest.mark.parametrize("fails", ["rank", "leader"])
def test_a_step_that_one_of_them_cannot_compute_at_load_ends_the_load(
    directory: str, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And does not leave the others waiting."""
    monkeypatch.setattr(leader, "Processes", RanksInThreads)
    monkeypatch.setattr(RanksInThreads, "platform", Failing if fails == "rank" else Roomy)
    platform = (Roomy if fails == "rank" else Failing)("tensor", True, fake_flashinfer)
    options = EngineOptions(model=directory, tensor_parallel=2, collectives="process_group", **REHEARSED)
    who = "rank 1" if fails == "rank" else "rank 0"
    with pytest.raises(EngineBroken, match=rf"^{who} .*CUDA out of memory; give a smaller max_graph_batch, or cuda"):
        Engine.load(options, platform=platform)


@pytest.mark.unit
def test_groups_are_ended_once_and_nobody_waits_for_a_graph_that_holds_one() -> None:
    """As NCCL has it: it gives a communicator back when no graph has it any more."""
    is_dropped, ended = threading.Event(), []

    class Held:
        def __init__(self, name: str) -> None:
            self._name = name

        def abort(self) -> None:
            ended.append(self._name)
            is_dropped.wait()

    names = ("collectives", "into", "out")
    groups = Groups(*(Held(name) for name in names))  # type: ignore[arg-type]
    for _ in range(2):
        groups.abort()
    deadline_s = time.monotonic() + 10.0
    while len(ended) < len(names) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    is_dropped.set()
    assert sorted(ended) == sorted(names), "what waits in the second never ends, or one was ended twice"


def test_an_engine_gives_up_its_graphs_before_it_ends_the_groups(
    directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    abort, held = Groups.abort, list[bool]()

    def look_and_abort(groups: Groups) -> None:
        held.append(graphs() is not None)
        abort(groups)

    monkeypatch.setattr(leader, "Processes", RanksInThreads)
    monkeypatch.setattr(Groups, "abort", look_and_abort)
    two = rehearse(directory, tensor_parallel=2, collectives="process_group")
    graphs = weakref.ref(two.steps.graphs)  # type: ignore[attr-defined]
    assert graphs() is not None
    two.close()
    assert held
    assert not any(held)


@pytest.mark.unit
def test_messages_go_in_the_stream_that_they_are_posted_in() -> None:
    """One of NCCL's own would wait for that, and be waited for, at each of a step's sums."""

    class Group:
        def __init__(self) -> None:
            self.posted: list[str] = []

        def _note(self, name: str, options: Any) -> None:
            assert not options.asyncOp, name
            self.posted.append(name)

        def allreduce(self, _: list[torch.Tensor], options: Any) -> None:
            self._note("allreduce", options)

        def _allgather_base(self, _: torch.Tensor, __: torch.Tensor, options: Any) -> None:
            self._note("allgather", options)

        def broadcast(self, _: list[torch.Tensor], options: Any) -> None:
            assert options.rootRank == 0
            self._note("broadcast", options)

    group, x = Group(), torch.zeros(2, 4)
    collectives, hop = GroupCollectives(group, Shard(1, 2)), GroupHop(group, x)
    collectives.sum(x)
    collectives.gather(x)
    collectives.broadcast(x)
    hop.send(x)
    hop.receive(2)
    assert group.posted == ["allreduce", "allgather", "broadcast", "broadcast", "broadcast"]


def check_pending_tokens(one: Engine, many: Engine) -> None:
    [prompt] = prompts((21,))
    for params in (GREEDY, SEEDED):
        tokens = [[token.token_id for token in overlapped(each, prompt, params, 7)] for each in (one, many)]
        assert tokens[0] == tokens[1]


def check_steps_of_each_stage(one: Engine, many: Engine) -> None:
    """Several are begun before the first is asked for; none of them wants what another draws."""

    def step(i: int, ids: list[int], start: int) -> Step:
        spec = SampleSpec(params=GREEDY, position=start + len(ids))
        return Step(chunks=[Chunk(request_id=str(i), token_ids=ids, start=start, block_table=[i], sample=spec)])

    last: list[list[int]] = prompts((9, 5, 7))
    for start in (0, None):
        steps = [step(i, ids, len(prompts((9, 5, 7))[i]) if start is None else 0) for i, ids in enumerate(last)]
        got = [pending.result() for pending in [many.begin(each) for each in steps]]
        assert got == [one.step(each) for each in steps]
        last = [[token.token_id] for [token] in got]
    with pytest.raises(AssertionError, match="does not know what the last one draws"):
        many.begin(step(2, [PENDING], 9))


@pytest.mark.parametrize("is_whole", [False, True])
def test_ranks_compute_experts_in_one_product_as_a_single_gpu_does(
    is_whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = str(make_tiny_model("qwen3_moe", tmp_path / "model"))
    one, choose = rehearse(directory), experts.choose_form
    monkeypatch.setattr(leader, "Processes", RanksInThreads)
    monkeypatch.setattr(experts, "choose_form", lambda model, _: choose(model, torch.device("cuda")))
    two = rehearse(directory, tensor_parallel=2, expert_parallel=is_whole, collectives="process_group")
    replays = counted_replays(two)
    try:
        assert two.model.module.config._experts_implementation == "grouped_mm"
        wanted = greedy(one, prompts(LENGTHS), NEW_TOKENS, chunk=16)
        assert greedy(two, prompts(LENGTHS), NEW_TOKENS, chunk=16) == wanted
        assert replays
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
@pytest.mark.parametrize("rope", [None, LengthRope(limit=64, is_dynamic=True, is_anew=False)])
def test_others_make_ready_for_the_same_model(rope: LengthRope | None) -> None:
    """Their graphs have a place for the lengths that rows are turned for, or none, as the leader's."""
    info = ModelInfo(
        name="any",
        architecture="Any",
        fingerprint="a1",
        dtype="float32",
        vocab_size=160,
        max_model_len=256,
        eos_token_ids=(2, 3),
        num_layers=2,
        num_params=1000,
        weight_bytes=4000,
        rope=rope,
    )
    frame = steps_frame(info)
    assert info_of(Frame(frame.kind, json.loads(json.dumps(frame.fields)))) == info


@pytest.mark.unit
def test_gpus_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *pair: True)
    check_gpus(EngineOptions(model="any", tensor_parallel=2), torch.device("cuda", 0))
    with pytest.raises(ValueError, match=r"^tensor_parallel 4 is 4 processes, and 2 GPUs are visible; give at most 2$"):
        check_gpus(EngineOptions(model="any", tensor_parallel=4), torch.device("cuda", 0))
    with pytest.raises(ValueError, match=r"^device is 'cuda:1' with tensor_parallel 2, whose GPUs are the first ones"):
        check_gpus(EngineOptions(model="any", tensor_parallel=2, device="cuda:1"), torch.device("cuda", 1))


@pytest.mark.unit
def test_gpus_whose_memory_the_leader_does_not_reach_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: other < 2)
    check_gpus(EngineOptions(model="any", pipeline_parallel=2), torch.device("cuda", 0))
    told = r"^tensor_parallel 4 wants GPUs whose memory GPU 0 reaches, and it does not that of 2, 3; choose GPUs"
    with pytest.raises(ValueError, match=told):
        check_gpus(EngineOptions(model="any", tensor_parallel=4), torch.device("cuda", 0))
