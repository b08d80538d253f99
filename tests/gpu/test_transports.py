"""Handing KV over on real GPUs: the contract of transports, order against the engine's stream, NCCL, a lost peer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.pages.layout import LayerKv
from kv_transfer.base import Segment, Wire
from kv_transfer.checksum import device_checksummer
from kv_transfer.options import TransferOptions
from kv_transfer.transports.faulty import Faults
from kv_transfer.transports.registry import load_transport
from tests.kv_transfer import sides
from tests.kv_transfer.sides import LAYERS, assert_pages_moved, random_memory, snapshot

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here"),
    pytest.mark.timeout(280),
]

GPU = "cuda:0"
ROOT = Path(__file__).resolve().parents[2]
cuda: Any = torch.cuda


def test_the_contract_of_transports_holds_on_a_gpu() -> None:
    """The same tests as on CPU, unchanged."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/kv_transfer/test_transports.py"],
        cwd=ROOT,
        env=os.environ | {"KVRELAY_TEST_DEVICE": GPU},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]


def open_ipc(seed: int = 1) -> tuple[Any, Any, Any, Any]:
    source, target = random_memory(23, seed=seed, device=GPU), random_memory(31, seed=2, device=GPU)
    transport = load_transport("cuda_ipc")
    receiver = transport.offer(target, peer="prefill-0", wire=Wire(host="127.0.0.1", timeout_s=5))
    sender = transport.connect(source, receiver.params, peer="decode-0", wire=Wire(host="127.0.0.1", timeout_s=5))
    return source, target, sender, receiver


def test_a_layer_that_is_still_being_computed_is_waited_for() -> None:
    source, target, sender, receiver = open_ipc()
    before = snapshot(target)
    new = random_memory(23, seed=9, device=GPU)
    cuda._sleep(2_000_000_000)  # the engine's stream is busy for a second or so
    source.bytes.copy_(new.bytes, non_blocking=True)
    sender.send(Segment(seq=0, layers=range(3), src_pages=[4, 1], dst_pages=[0, 9], after=source.mark()))
    assert_pages_moved(before, new, target, range(3), [4, 1], [0, 9])
    sender.close()
    receiver.close()


def test_what_the_receiver_launches_next_sees_the_pages() -> None:
    source, target, sender, receiver = open_ipc()
    segment = Segment(seq=0, layers=range(3), src_pages=list(range(20)), dst_pages=list(range(20)))
    sender.send(segment)
    receiver.receive(segment)
    for layer in range(3):
        assert torch.equal(
            target.k(layer)[:20].flatten(1).view(torch.uint8), source.k(layer)[:20].flatten(1).view(torch.uint8)
        )
    sender.close()
    receiver.close()


@pytest.mark.parametrize("layers", [LAYERS, (LayerKv(8, 128, 128),) * 4, (LayerKv(1, 3, 1),)], ids=["a", "b", "odd"])
def test_the_digest_is_the_one_that_is_written_down(layers: tuple[LayerKv, ...]) -> None:
    """Against the plain formula on the host; and it changes when two pages change places."""
    memory, pages = random_memory(23, layers=layers, seed=4, device=GPU), [5, 11, 2, 19]
    checksummer = device_checksummer(memory)
    assert checksummer is not None
    parts = [part for i in range(len(layers)) for part in (memory.k(i), memory.v(i))]
    data = b"".join(part[pages].contiguous().view(torch.uint8).cpu().numpy().tobytes() for part in parts)
    has_words = all(part[0].nbytes % 8 == 0 for part in parts)
    words = np.frombuffer(data, np.int64 if has_words else np.uint8).astype(np.int64)
    with np.errstate(over="ignore"):
        mixed = np.arange(1, len(words) + 1, dtype=np.int64) * np.int64(-7046029254386353131)
        mixed = (mixed ^ (mixed >> 32)) * np.int64(-4658895280553007687)
        wanted = int((words * (mixed | 1)).sum()) % (1 << 64)
    assert checksummer.digest(range(len(layers)), pages) == wanted
    assert checksummer.digest(range(len(layers)), pages[::-1]) != wanted


@pytest.mark.parametrize("corrupt", [frozenset(), frozenset({1})], ids=["intact", "damaged"])
async def test_a_handoff_brings_the_right_pages_and_finds_damaged_ones(corrupt: frozenset[int]) -> None:
    options = TransferOptions(transports=("cuda_ipc",), layers_per_group=1)
    memory = random_memory(29, seed=1, device=GPU)
    target = random_memory(37, seed=2, device=GPU)
    async with sides.decode_side(options, memory=target) as decode:
        peer = await sides.connect(decode, options, memory, faults=Faults(corrupt=corrupt))
        handoff = peer.reserve(sides.request("r", 30), on_stalled=lambda reason: None)
        grant = await handoff.granted()
        src = list(range(7, 7 + len(grant.pages)))
        for layer in range(3):
            handoff.segment_ready(range(layer, layer + 1), 0, len(src), src, memory.mark())
        receipt = await handoff.commit(token_id=1, num_tokens=30, computed_ns=0)
        assert (receipt.transport, receipt.checksums_ok) == ("cuda_ipc", True)
        assert receipt.resends == len(corrupt)
        for layer in range(3):
            ours, theirs = memory.k(layer)[src], target.k(layer)[list(grant.pages)]
            assert torch.equal(ours.flatten(1).view(torch.uint8), theirs.flatten(1).view(torch.uint8))
        await peer.close()


def test_bytes_between_two_processes() -> None:
    from bench.gpu import transports as gpu_transports

    rows = gpu_transports.measure("cuda_ipc", (128, 512), (GPU, GPU), rehearse=False, rounds=2)  # raises on wrong bytes
    assert {row["pages"] for row in rows} == {"consecutive", "scattered"}


def test_a_killed_process_is_noticed_and_harms_no_other_pair() -> None:
    from bench.gpu import transports as gpu_transports

    assert gpu_transports.check_lost_peer("cuda_ipc", (GPU, GPU), rehearse=False)["reason"]


def test_nccl_brings_the_right_bytes_where_two_ranks_can_meet() -> None:
    from bench.gpu import transports as gpu_transports

    found = gpu_transports.check_nccl(rehearse=False)  # raises on wrong bytes
    if not found["way"]:
        pytest.skip(f"NCCL cannot be tried here: {'; '.join(found['refused'])}")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this needs two GPUs")
@pytest.mark.parametrize("name", ["cuda_ipc", "process_group"])
def test_a_lost_pair_between_two_gpus(name: str) -> None:
    from bench.gpu import transports as gpu_transports

    found = gpu_transports.check_lost_peer(name, (GPU, "cuda:1"), rehearse=False)
    assert found["noticed_s"] < gpu_transports.KILL_LIMIT_S
