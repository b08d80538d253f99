"""A GPU that computes nothing: its tensors are fake ones, with a device, a shape and no content; the host's are real.

What would make the host wait for a GPU raises: a look at a value, a copy from pageable memory, an index that stands on
the host. So does an operator over two devices. Events never wait. A CPU build of torch knows no CUDA device; of such it
is told that there is one, by a guard that does nothing (c10's own), compiled here.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GPU = torch.device("cuda", 0)
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace {
c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;
c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);
}
"""
aten: Any = torch.ops.aten


class Waits(AssertionError):
    """The host would wait for the GPU."""


class FakeGpu(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._pinned: dict[int, torch.Tensor] = {}  # by the address of their memory

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("pin_memory"):
            made = func(*args, **(kwargs | {"pin_memory": False}))
            self._pinned[made.untyped_storage().data_ptr()] = made
            return made
        if func.overloadpacket is aten.to:
            with self:
                return func.decompose(*args, **kwargs)
        device = kwargs.get("device")
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if not any(is_on_gpu(x) for x in tensors) and (device is None or device.type != "cuda"):
            return func(*args, **kwargs)
        if func is aten.copy_.default:
            return self._copied(
                args[0], args[1], is_queued=bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
            )
        if func is aten._to_copy.default and (device is None or device.type == "cuda") == is_on_gpu(args[0]):
            return self._run(func, args, kwargs)
        if func is aten._to_copy.default:
            self._check_copy(args[0], is_queued=bool(kwargs.get("non_blocking")))
        elif any(not is_on_gpu(x) and x.dim() for x in tensors):
            raise AssertionError(f"{func} of tensors on the host and on the GPU")
        return self._run(func, args, kwargs)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Its like on the GPU."""
        with self._fake:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=GPU)
        return torch.nn.Parameter(made, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else made

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with self._fake:
            return func(*args, **kwargs)

    def _copied(self, target: torch.Tensor, source: torch.Tensor, *, is_queued: bool) -> torch.Tensor:
        if is_on_gpu(target) and is_on_gpu(source):
            self._run(aten.copy_.default, (target, source), {})
            return target
        self._check_copy(target if is_on_gpu(source) else source, is_queued=is_queued)
        return target

    def _check_copy(self, host: torch.Tensor, *, is_queued: bool) -> None:
        if is_on_gpu(host) or not is_queued or not self.is_pinned(host):
            raise Waits("a copy between GPU and host that is not queued, or not of pinned memory")


def is_on_gpu(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


class NoEvent:
    def record(self) -> None: ...

    def synchronize(self) -> None: ...


@contextmanager
def fake_gpu(folder: Path) -> Iterator[FakeGpu]:
    """Inside, tensors on "cuda" are fake ones."""
    if not torch.cuda.is_available():
        ctypes.CDLL(str(_guard(folder)))
    gpu, patch = FakeGpu(), pytest.MonkeyPatch()

    def narrow(*tensors: torch.Tensor) -> None:
        assert all(is_on_gpu(x) for x in tensors), "the kernel reads tables on the GPU"

    patch.setattr(torch.cuda, "_lazy_init", lambda: None)
    patch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    patch.setattr(torch.cuda, "Event", NoEvent)
    patch.setattr(torch.cuda, "device", lambda _: nullcontext())
    patch.setitem(sys.modules, "engine.sampling.selection_kernel", SimpleNamespace(narrow=narrow))
    lifts_only_host = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # or torch.tensor would copy unseen
    try:
        with torch.inference_mode(), gpu:
            yield gpu
    finally:
        torch._C._set_only_lift_cpu_tensors(lifts_only_host)
        patch.undo()


def _guard(folder: Path) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler to tell torch of a CUDA device with")
    root, source, target = Path(torch.__file__).parent, folder / "guard.cpp", folder / "guard.so"
    source.write_text(GUARD)
    flags = ["-std=c++20", "-shared", "-fPIC", f"-I{root / 'include'}", f"-L{root / 'lib'}"]
    subprocess.run([compiler, *flags, str(source), "-o", str(target), "-lc10"], check=True, timeout=120)
    return target


def move(root: object, moved: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Put in the place of every tensor that an object holds, in closures too, its like on the GPU."""
    _Mover(moved).new(root)


class _Mover:
    def __init__(self, moved: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._moved = moved
        self._seen: dict[
            int, tuple[object, object]
        ] = {}  # by identity: what it was, which lives on, and what it is now

    def new(self, old: Any) -> Any:
        if isinstance(old, torch.device):
            return GPU
        if old is None or isinstance(old, str | bytes | int | float | type | ModuleType | torch.dtype):
            return old
        if id(old) not in self._seen:
            self._seen[id(old)] = (old, old)
            self._seen[id(old)] = (old, self._made(old))
        return self._seen[id(old)][1]

    def _made(self, old: Any) -> Any:
        if isinstance(old, torch.Tensor):
            return self._moved(old)
        if isinstance(old, dict):
            for key in list(old):
                old[key] = self.new(old[key])
        elif isinstance(old, list):
            old[:] = [self.new(x) for x in old]
        elif isinstance(old, tuple):
            parts = [self.new(x) for x in old]
            return type(old)(*parts) if hasattr(old, "_fields") else tuple(parts)
        elif isinstance(old, functools.partial):
            return functools.partial(self.new(old.func), *self.new(old.args), **self.new(old.keywords))
        elif isinstance(old, MethodType):
            self.new(old.__self__)
        elif isinstance(old, FunctionType):
            for cell in old.__closure__ or ():
                self._fill(cell)
        else:
            self._fill_in(old)
        return old

    def _fill(self, cell: CellType) -> None:
        try:
            cell.cell_contents = self.new(cell.cell_contents)
        except ValueError:  # an empty one
            return

    def _fill_in(self, old: Any) -> None:
        names = [name for kind in type(old).__mro__ for name in getattr(kind, "__slots__", ()) if hasattr(old, name)]
        for name in {*names, *getattr(old, "__dict__", ())} - {"__dict__", "__weakref__"}:
            before = getattr(old, name, None) if name in names else old.__dict__[name]
            if (after := self.new(before)) is not before:
                object.__setattr__(old, name, after)
