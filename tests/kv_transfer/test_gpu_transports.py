"""What the GPU transports promise beyond the contract: order, fences, deadlines. On a fake GPU that does nothing
until it must (fake_gpu.py)."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.pages.memory import KvMemory
from kv_transfer.base import Segment, TransferError, Wire
from kv_transfer.transports.gloo import Gloo
from kv_transfer.transports.gpu import nccl, nccl_settings
from kv_transfer.transports.gpu.cuda_ipc import EVENTS, CudaIpcReceiveEnd, CudaIpcSendEnd, CudaIpcTransport
from kv_transfer.transports.pair_file import PrefillPairFile
from kv_transfer.transports.pair_socket import dial
from kv_transfer.transports.process_group import ProcessGroupReceiveEnd, ProcessGroupSendEnd, ProcessGroupTransport
from kv_transfer.transports.registry import nccl_counters, usable
from tests.kv_transfer.fake_gpu import FakeEvent, FakeGpu, FakeGroup, FakeNccl
from tests.kv_transfer.sides import DEVICE, assert_pages_moved, random_memory, snapshot

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="a fake GPU's memory is the CPU's")

HOST = "127.0.0.1"
LAYERS = range(3)


def segment(seq: int = 0, after: object | None = None, src: int = 1, dst: int = 2) -> Segment:
    return Segment(seq=seq, layers=LAYERS, src_pages=[src], dst_pages=[dst], after=after)


class Ipc:
    """A cuda_ipc pair in this process."""

    def __init__(self, timeout_s: float = 20.0) -> None:
        self.gpu = FakeGpu()
        self.source, self.target = random_memory(9, seed=1), random_memory(11, seed=2)
        transport = CudaIpcTransport(lambda device: self.gpu)
        receiver = transport.offer(self.target, peer="prefill-0", wire=Wire(host=HOST, timeout_s=timeout_s))
        sender = transport.connect(
            self.source, receiver.params, peer="decode-0", wire=Wire(host=HOST, timeout_s=timeout_s)
        )
        assert isinstance(receiver, CudaIpcReceiveEnd)
        assert isinstance(sender, CudaIpcSendEnd)
        self.receiver, self.sender = receiver, sender
        self.before = snapshot(self.target)
        self.gpu.log.clear()

    def assert_moved(self, pages: list[int], to: list[int]) -> None:
        assert_pages_moved(self.before, self.source, self.target, LAYERS, pages, to)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as opened:
        yield opened


def overwrite(memory: KvMemory, page: int) -> None:
    for layer in range(memory.layout.num_layers):
        memory.k(layer)[page] = 7.0
        memory.v(layer)[page] = 8.0


def test_cuda_ipc_reads_a_layer_only_once_it_was_computed(pool: ThreadPoolExecutor) -> None:
    pair, computed = Ipc(), FakeEvent()
    sending = pool.submit(pair.sender.send, segment(after=computed))
    with pytest.raises(TimeoutError):
        sending.result(0.05)
    pair.assert_moved([], [])
    overwrite(pair.source, 1)  # what the engine's kernels do
    computed.happen()
    sending.result(20)
    pair.assert_moved([1], [2])


def test_cuda_ipc_returns_when_the_copy_is_done_and_then_only() -> None:
    pair = Ipc()
    pair.sender.send(segment())
    pair.assert_moved([1], [2])
    assert [name for name, _ in pair.gpu.log] == ["copy", "record", "finish"]


def test_the_receivers_own_stream_waits_for_the_pairs_event() -> None:
    pair = Ipc()
    pair.sender.send(segment())
    pair.gpu.log.clear()
    pair.receiver.receive(segment())
    assert [name for name, _ in pair.gpu.log] == ["wait", "finish"]


def test_a_receiver_does_not_wait_for_what_the_sender_does_next(pool: ThreadPoolExecutor) -> None:
    pair, computed = Ipc(), FakeEvent()
    pair.sender.send(segment())
    later = pool.submit(pair.sender.send, segment(1, after=computed, src=3, dst=4))  # a layer that is still computed
    while ("record", None) not in pair.gpu.log[3:]:
        threading.Event().wait(0.001)
    pool.submit(pair.receiver.receive, segment()).result(20)
    computed.happen()
    later.result(20)
    pair.receiver.receive(segment(1))
    pair.assert_moved([1, 3], [2, 4])


def test_the_note_brings_the_events_to_another_process() -> None:
    pair = Ipc()
    events = list(pair.receiver.events)
    pair.receiver.events = []
    handles = {id(event): handle for handle, event in pair.gpu.events.items()}
    pair_file = PrefillPairFile(pair.receiver.params, "decode-0")
    pair_file.leave_note(b"".join(handles[id(event)] for event in events))
    pair.sender.send(segment())
    pair.receiver.receive(segment())
    assert pair.receiver.events == events
    assert len(events) == EVENTS


def test_a_senders_event_that_cannot_be_opened_is_told_once_and_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pair = Ipc()
    pair.receiver.events = []  # as for a sender in another process, which left a note that means nothing here
    pair.sender._pair_file.leave_note(bytes(64 * EVENTS))
    pair.sender.send(segment())
    pair.receiver.receive(segment())
    pair.receiver.receive(segment(1))
    assert [record.message for record in caplog.records] == [
        "prefill-0's CUDA events cannot be opened (another process's event cannot be opened by the fake GPU): "
        "its own wait orders the copies"
    ]


def test_a_copy_that_does_not_end_is_an_error_and_keeps_the_fence_up() -> None:
    pair = Ipc(timeout_s=0.05)
    with pytest.raises(TransferError, match=r"copied nothing for 0\.05 s"):
        pair.sender.send(segment(after=FakeEvent()))  # a GPU that hangs before the layer is computed
    pair.sender.close()
    assert not pair.receiver.sender_closed, "the copy may still happen: the pages are nobody's yet"


def test_a_page_that_does_not_exist_is_refused_before_anything_is_launched() -> None:
    pair = Ipc()
    for wrong in (segment(src=9), segment(dst=11), segment(dst=-1)):
        with pytest.raises(TransferError, match=r"pages cannot be copied: pages .* of (9|11) are to be copied"):
            pair.sender.send(wrong)
    assert not pair.gpu.log


def test_another_layout_is_refused() -> None:
    pair = Ipc()
    params = {**pair.receiver.params, "num_pages": "12"}
    with pytest.raises(TransferError, match="decode-0 says its KV has"):
        CudaIpcTransport(lambda device: pair.gpu).connect(
            pair.source, params, peer="decode-0", wire=Wire(host=HOST, timeout_s=1)
        )


def test_a_receiver_that_has_gone_is_not_found() -> None:
    pair = Ipc()
    params = dict(pair.receiver.params)
    keep = pair.receiver._pair_file  # its file is there, the receiver is not
    del pair.receiver
    with pytest.raises(TransferError, match="decode-0 is not in this process any more"):
        CudaIpcTransport(lambda device: pair.gpu).connect(
            pair.source, params, peer="decode-0", wire=Wire(host=HOST, timeout_s=1)
        )
    assert keep.sender_closed


def test_cuda_ipc_is_for_gpu_memory() -> None:
    with pytest.raises(TransferError, match="cuda_ipc moves GPU memory only, and this worker's KV is on cpu"):
        CudaIpcTransport().offer(random_memory(3), peer="p", wire=Wire(host=HOST, timeout_s=1))


@pytest.mark.parametrize(
    ("device", "wanted"),
    [
        ("cpu", ["shared_memory", "process_group", "loopback"]),
        ("cuda:1", ["cuda_ipc", "process_group"]),
    ],
)
def test_a_worker_offers_only_what_moves_its_memory(device: str, wanted: list[str]) -> None:
    assert usable(["cuda_ipc", "shared_memory", "process_group", "loopback"], device) == wanted


# NCCL


class NcclPair:
    def __init__(self, timeout_s: float = 20.0, target: KvMemory | None = None) -> None:
        self.fake = FakeNccl()
        self.source, self.target = random_memory(9, seed=1), target or random_memory(11, seed=2)
        self.queues = FakeGpu(uuid="GPU-0"), FakeGpu(uuid="GPU-1")
        offering = ProcessGroupTransport(lambda memory, host: nccl.Nccl(self.queues[1], self.fake.make))
        joining = ProcessGroupTransport(lambda memory, host: nccl.Nccl(self.queues[0], self.fake.make))
        receiver = offering.offer(self.target, peer="prefill-0", wire=Wire(host=HOST, timeout_s=timeout_s))
        with ThreadPoolExecutor(1) as pool:
            opened: Future[None] = pool.submit(receiver.open, timeout_s)
            sender = joining.connect(
                self.source, receiver.params, peer="decode-0", wire=Wire(host=HOST, timeout_s=timeout_s)
            )
            opened.result(20)
        assert isinstance(receiver, ProcessGroupReceiveEnd)
        assert isinstance(sender, ProcessGroupSendEnd)
        self.receiver, self.sender = receiver, sender
        self.before = snapshot(self.target)

    def take(self, *segments: Segment) -> None:
        for announced in segments:
            self.receiver.receive(announced)
            self.receiver.place(announced)

    def assert_moved(self, pages: list[int], to: list[int]) -> None:
        assert_pages_moved(self.before, self.source, self.target, LAYERS, pages, to)

    def group(self, rank: int) -> Any:
        return next(group for group in self.fake.groups if group.rank == rank)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        self.sender._group.join()
        self.receiver._group.join()


def test_nccl_gathers_a_layer_only_once_it_was_computed(pool: ThreadPoolExecutor) -> None:
    pair, computed = NcclPair(), FakeEvent()
    sending = pool.submit(pair.sender.send, segment(after=computed))
    with pytest.raises(TimeoutError):
        sending.result(0.05)
    overwrite(pair.source, 1)
    computed.happen()
    sending.result(20)
    pair.take(segment())
    pair.assert_moved([1], [2])
    pair.close()


def test_when_a_send_returns_the_source_pages_may_be_used_again() -> None:
    pair = NcclPair()
    original = {layer: pair.source.k(layer)[1].clone() for layer in LAYERS}
    pair.sender.send(segment())
    overwrite(pair.source, 1)
    pair.take(segment())
    for layer in LAYERS:
        assert torch.equal(pair.target.k(layer)[2].view(torch.uint8), original[layer].view(torch.uint8))
    pair.close()


def test_a_lost_pair_aborts_its_own_group_and_no_other() -> None:
    lost, other = NcclPair(timeout_s=1.0), NcclPair()
    with pytest.raises(TransferError, match=r"prefill-0 moved nothing for 1 s"):
        lost.take(segment())
    lost.receiver._group.join()
    assert lost.group(1).is_aborted
    assert not any(group.is_aborted for group in other.fake.groups)
    other.sender.send(segment())
    other.take(segment())
    other.assert_moved([1], [2])
    lost.close()
    other.close()


def test_a_deadline_does_not_count_what_the_message_is_computed_behind() -> None:
    pair, computed = NcclPair(timeout_s=0.2), FakeEvent()
    staging: Any = pair.receiver._staging
    staging.queue.wait_for(computed)
    done = pair.receiver._group.receive(torch.zeros(1, dtype=torch.uint8))
    with pytest.raises(TimeoutError):
        done.result(0.6)
    computed.happen()
    with pytest.raises(TransferError, match=r"prefill-0 moved nothing for 0\.2 s"):
        done.result(20)
    pair.close()


def test_buffers_are_kept_until_the_group_was_aborted() -> None:
    """An operation that still runs writes into its buffer: freed before, it would write into another's memory."""
    pair, kept = NcclPair(), []
    group: Any = pair.receiver._group
    abort = pair.group(1).abort

    def counting_abort() -> None:
        kept.append(len(group._posted))
        abort()

    pair.group(1).abort = counting_abort
    pair.receiver.expect(segment())
    while not group._posted:
        threading.Event().wait(0.001)
    pair.receiver.abort()
    group.join()
    assert kept == [1]
    assert not group._posted
    pair.close()


def test_a_peer_that_never_comes_to_the_group_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "MEETING_S", 0.1)
    forever = threading.Event()
    kind = nccl.Nccl(FakeGpu(), lambda store, rank, device: forever.wait(30) and FakeGroup(FakeNccl(), store, rank))
    wire = Wire(host=HOST, timeout_s=0.1)
    receiver = ProcessGroupTransport(lambda memory, host: kind).offer(random_memory(3), peer="prefill-0", wire=wire)
    with ThreadPoolExecutor(1) as pool:
        dialled = pool.submit(dial, receiver.params, replace(wire, timeout_s=20.0), "decode-0")
        with pytest.raises(TransferError, match=r"prefill-0 did not come to the process group within 0\.1 s"):
            receiver.open(20.0)
        dialled.result().close()
    forever.set()
    receiver.close()


def test_two_ranks_on_one_gpu_are_refused_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "loaded_version", lambda: (2, 28, 9))
    kind = nccl.Nccl(FakeGpu(uuid="GPU-same"))
    with pytest.raises(TransferError) as caught:
        kind.check({"kind": "nccl", "gpu": "GPU-same"}, "decode-0")
    assert str(caught.value) == (
        "decode-0 is on our GPU, and NCCL 2.28.9 refuses two ranks on one GPU (from 2.30 "
        "NCCL_MULTI_RANK_GPU_ENABLE=1 allows them); use cuda_ipc"
    )
    kind.check({"kind": "nccl", "gpu": "GPU-other"}, "decode-0")


@pytest.mark.parametrize(
    ("version", "environ", "is_allowed"),
    [
        (None, {}, False),
        ((2, 28, 9), {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, False),
        ((2, 30, 7), {}, False),
        ((2, 30, 7), {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, True),
        ((2, 28, 9), {"KVRELAY_NCCL_ONE_GPU": "1"}, True),
    ],
)
def test_when_two_ranks_may_share_a_gpu(version: Any, environ: dict[str, str], is_allowed: bool) -> None:
    assert (nccl_settings.why_not_on_one_gpu(version, environ) == "") == is_allowed


@pytest.mark.parametrize(("ours", "theirs"), [("gloo", "nccl"), ("nccl", "gloo")])
def test_memory_of_two_kinds_is_refused(ours: str, theirs: str) -> None:
    kinds: dict[str, Any] = {"gloo": Gloo(HOST), "nccl": nccl.Nccl(FakeGpu())}
    with pytest.raises(TransferError, match="give both pools the same device"):
        kinds[ours].check(kinds[theirs].params, "decode-0")


def test_what_is_chosen_wins_over_the_environment_and_that_over_ours() -> None:
    environ = {"TORCH_NCCL_ENABLE_MONITORING": "1", "NCCL_DEBUG": "INFO"}
    assert nccl_settings.settings_for({"NCCL_IB_HCA": "mlx5"}, environ, 7) == {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "1",
        "NCCL_IB_HCA": "mlx5",
    }
    chosen = {"TORCH_NCCL_ENABLE_MONITORING": "0"}
    assert nccl_settings.settings_for(chosen, environ, 7)["TORCH_NCCL_ENABLE_MONITORING"] == "0"


def test_on_loopback_nccl_keeps_to_it_unless_it_is_told_otherwise() -> None:
    assert nccl_settings.settings_for({}, {}, 7, "127.0.0.1")["NCCL_SOCKET_IFNAME"] == "lo"
    assert "NCCL_SOCKET_IFNAME" not in nccl_settings.settings_for({}, {}, 7, "10.0.0.1")
    for chosen, environ in (({"NCCL_SOCKET_IFNAME": "eth0"}, {}), ({}, {"NCCL_SOCKET_IFNAME": "eth0"})):
        assert nccl_settings.settings_for(chosen, environ, 7, "127.0.0.1")["NCCL_SOCKET_IFNAME"] == "eth0"


def test_the_one_gpu_switch_makes_each_process_a_host_of_its_own() -> None:
    settings = nccl_settings.settings_for({}, {"KVRELAY_NCCL_ONE_GPU": "1"}, 7)
    assert settings["NCCL_HOSTID"] == "kvrelay-7"
    assert (settings["NCCL_SHM_DISABLE"], settings["NCCL_P2P_DISABLE"]) == ("1", "1")


@pytest.mark.parametrize(("there", "taken"), [("kvrelay-6", "kvrelay-7"), ("rack-3", "rack-3")])
def test_the_host_that_a_parent_called_itself_is_not_inherited(there: str, taken: str) -> None:
    """A child with its parent's id would be the same host on the same GPU, which NCCL refuses."""
    settings = nccl_settings.settings_for({}, {"KVRELAY_NCCL_ONE_GPU": "1", "NCCL_HOSTID": there}, 7)
    assert settings["NCCL_HOSTID"] == taken


def test_the_installed_torch_takes_what_a_group_is_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU it is refused for that alone."""
    if not torch.distributed.is_nccl_available() or torch.cuda.is_available():
        pytest.skip("this is for a torch with NCCL where there is no GPU")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(nccl, "prepare", lambda: None)
    store = nccl.dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises((RuntimeError, ValueError), match="no GPUs found"):
        nccl.make_group(store, 0, "cuda:0")
    assert callable(nccl.dist.ProcessGroupNCCL.abort)


def test_a_version_is_written_as_nccl_writes_it() -> None:
    assert nccl_settings.version_code((2, 28, 9)) == 22809


def test_a_gpu_worker_sets_nccl_up_and_tells_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("NCCL_DEBUG", "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_ASYNC_ERROR_HANDLING"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setattr(nccl_settings, "loaded_version", lambda: (2, 29, 7))
    assert nccl_settings.set_up({"NCCL_DEBUG": "WARN"}, "10.0.0.1") == {"nccl_version": 22907}
    assert os.environ["NCCL_DEBUG"] == "WARN"
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "0"


def test_a_cpu_worker_leaves_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    assert nccl_counters({"NCCL_DEBUG": "WARN"}, random_memory(3), "127.0.0.1") == {}
    assert "NCCL_DEBUG" not in os.environ
