"""How CUDA is called: the driver through ctypes, against a small library with its own signatures; streams and events
of torch, against stand-ins that happen when a test says so."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.gpu import driver
from engine.pages.layout import KvLayout, LayerKv
from engine.parallel.frames import Frame
from engine.parallel.messages import share_of
from kv_transfer.base import TransferError
from kv_transfer.transports.gpu import cuda
from kv_transfer.transports.gpu.cuda import CudaGpu

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the stand-in for libcuda needs g++")

# As in cuda.h. An "allocation" begins 4096 bytes before what is asked about; contexts must balance.
SOURCE = r"""
#include <cstring>
#include <cstddef>
typedef int CUresult; typedef int CUdevice; typedef void *CUcontext; typedef unsigned long long CUdeviceptr;
typedef struct { char reserved[64]; } CUipcMemHandle;
static int held = 0, pushed = 0; static unsigned last_flags = 0; static CUdeviceptr closed = 0; static int refuse = 0;
static int streams = 0;
extern "C" {
CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = ordinal + 100; return 0; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{ if (device != 103) return 101; held++; *context = (CUcontext)0x7000000000ULL; return 0; }
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) { if (device != 103) return 101; held--; return 0; }
CUresult cuCtxPushCurrent_v2(CUcontext context)
{ if (context != (CUcontext)0x7000000000ULL) return 201; pushed++; return 0; }
CUresult cuCtxPopCurrent_v2(CUcontext *context) { *context = nullptr; pushed--; return 0; }
CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address)
{ if (pushed != 1) return 201; *base = address - 4096; *size = 1 << 20; return 0; }
CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr base)
{ if (refuse) return 1; memset(handle, 0xAB, 64); memcpy(handle, &base, 8); handle->reserved[63] = 0x5A; return 0; }
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned flags)
{ if (pushed != 1 || handle.reserved[63] != 0x5A) return 1; memcpy(address, &handle, 8); last_flags = flags; return 0; }
CUresult cuIpcCloseMemHandle(CUdeviceptr address) { closed = address; return 0; }
CUresult cuStreamCreateWithPriority(void **stream, unsigned flags, int priority)
{ if (pushed != 1 || flags != 1 || priority != -1) return 1; streams++; *stream = (void *)(0x7100000000ULL + streams);
  return 0; }
CUresult cuStreamDestroy_v2(void *stream)
{ if (pushed != 1 || stream < (void *)0x7100000000ULL) return 1; streams--; return 0; }
CUresult cuGetErrorString(CUresult code, const char **text)
{ *text = code == 1 ? "invalid argument" : "bad context"; return 0; }
unsigned stub_flags() { return last_flags; }
unsigned long long stub_closed() { return closed; }
int stub_streams() { return streams; }
int stub_balance() { return held * 10 + pushed; }
void stub_refuse(int yes) { refuse = yes; }
}
"""
ADDRESS = 0x7F12_3456_7000  # more than 32 bits, as real ones are


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("libcuda")
    (folder / "stub.cpp").write_text(SOURCE)
    built = folder / "libcuda.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-O0", "-o", built, folder / "stub.cpp"], check=True)
    loaded = ctypes.CDLL(str(built))
    loaded.stub_closed.restype = ctypes.c_uint64
    return loaded


@pytest.fixture
def gpu(library: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaGpu]:
    def load(name: str) -> Any:
        assert name == "libcuda.so.1"
        return library

    driver.load.cache_clear()
    monkeypatch.setattr("ctypes.CDLL", load)
    made = CudaGpu.__new__(CudaGpu)
    made._device = torch.device("cuda", 3)
    yield made
    assert library.stub_balance() == 0, "every context that was pushed is popped, and released"
    library.stub_refuse(0)
    driver.load.cache_clear()


def memory_at(address: int) -> Any:
    return SimpleNamespace(address=address)


def test_a_handle_names_the_allocation_and_where_the_pages_begin_in_it(gpu: CudaGpu, library: Any) -> None:
    handle, offset = gpu.export(memory_at(ADDRESS))
    assert (len(handle), offset) == (64, 4096)
    opened = gpu.open(handle)
    assert opened + offset == ADDRESS
    assert library.stub_flags() == 1, "peer access is enabled for memory of another GPU"
    gpu.close(opened)
    assert library.stub_closed() == ADDRESS - 4096


def test_a_rank_s_share_is_opened_for_its_leader_s_kernels(gpu: CudaGpu, library: Any) -> None:
    handle, base = driver.export(3, ADDRESS)
    layout = KvLayout(4, "float32", (LayerKv(2, 8, 8),), 5)
    fields = {"share": "1/2", "handle": handle.hex(), "offset": ADDRESS - base}
    share = share_of(Frame("share", fields), layout, torch.device("cuda", 3))
    assert (share.address, share.num_bytes, share.handle, share.offset) == (ADDRESS, 1280, handle, 4096)
    assert share.close is not None
    share.close()
    assert (library.stub_closed(), library.stub_balance()) == (ADDRESS - 4096, 0)


def test_memory_that_cannot_be_shared_is_told_with_the_mend(gpu: CudaGpu, library: Any) -> None:
    library.stub_refuse(1)
    with pytest.raises(TransferError) as caught:
        gpu.export(memory_at(ADDRESS))
    assert str(caught.value) == (
        "CUDA cannot share KV memory with another process (take expandable_segments out of PYTORCH_ALLOC_CONF): "
        "invalid argument (1); use another transport"
    )


@pytest.mark.parametrize(("handle", "reason"), [(b"short", "has 64 bytes, and this one 5"), (bytes(64), "invalid arg")])
def test_a_handle_that_means_nothing_is_refused(gpu: CudaGpu, handle: bytes, reason: str) -> None:
    with pytest.raises(TransferError, match=reason):
        gpu.open(handle)


def test_each_queue_has_a_stream_of_its_own_which_ends_with_it(
    gpu: CudaGpu, library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda.cuda, "ExternalStream", lambda address, device: (address, device.index))
    queues = [cuda.CudaQueue(gpu._device) for _ in range(70)]  # of a priority torch has 32, for all who ask
    assert len({queue._stream for queue in queues}) == library.stub_streams() == 70
    assert {device for _, device in (queue._stream for queue in queues)} == {3}
    del queues
    assert library.stub_streams() == 0


def test_a_machine_without_the_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    driver.load.cache_clear()
    monkeypatch.setattr("ctypes.CDLL", missing)
    with pytest.raises(driver.CudaError, match=r"the CUDA driver cannot be loaded: libcuda\.so\.1"):
        driver.load()


class Event:
    """Happens after so many looks."""

    def __init__(self, looks: float) -> None:
        self.looks = looks

    def query(self) -> bool:
        self.looks -= 1
        return self.looks < 0


class Stream:
    def __init__(self) -> None:
        self.waits_for: list[object] = []

    def wait_event(self, event: object) -> None:
        self.waits_for.append(event)


def queue_with(done: Event) -> cuda.CudaQueue:
    queue = cuda.CudaQueue.__new__(cuda.CudaQueue)
    queue._stream, queue._after = Stream(), None
    queue.mark = lambda: done  # type: ignore[method-assign]
    return queue


def test_the_stream_waits_for_the_engines_event_and_the_caller_for_both() -> None:
    computed, done = Event(3), Event(2)
    queue = queue_with(done)
    queue.wait_for(computed)
    assert queue._stream.waits_for == [computed]
    queue.finish(5.0)
    assert computed.looks < 0
    assert done.looks < 0
    queue.wait_for(None)
    assert queue._stream.waits_for == [computed], "what stands in the pages already is not waited for"


def test_the_copys_deadline_begins_when_its_layers_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = queue_with(Event(0))
    queue.wait_for(Event(40))  # longer than the copy may take
    queue.finish(0.001)
    queue = queue_with(Event(float("inf")))
    with pytest.raises(TransferError, match=r"the GPU copied nothing for 0\.02 s"):
        queue.finish(0.02)
    monkeypatch.setattr(cuda, "COMPUTE_TIMEOUT_S", 0.02)
    queue.wait_for(Event(float("inf")))
    with pytest.raises(TransferError, match=r"the layers were not computed for 0\.02 s"):
        queue.finish(0.001)
