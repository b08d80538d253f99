"""EngineOptions says what one engine is: its model, where it computes, and how much memory its pages may take.

Values only, and torch-free: whoever starts a process makes them before torch is imported there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
KV_DTYPES = ("auto", "fp8_e4m3")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    model: str  # a Hugging Face directory or hub name
    dtype: str = "auto"  # auto | float32 | bfloat16
    page_size: int = 16  # tokens
    num_pages: int | None = None  # or kv_bytes; 1 GiB of pages when neither is given
    kv_bytes: int | None = None
    max_model_len: int | None = None  # None: the config's max_position_embeddings
    attention: str = "auto"  # auto | torch | native (CPU) | flashinfer (GPU)
    threads: int | None = None  # None: torch's own choice
    parity_check: bool = True
    device: str = "auto"  # auto | cpu | cuda | cuda:N; auto is the current GPU where there is one
    kv_dtype: str = "auto"  # auto: as the model computes | fp8_e4m3: scaled, half the bytes to hold and to relay
    gpu_memory_utilization: float = 0.9  # share of a GPU's memory for all of it, where no page count is given
    cuda_graphs: bool = True  # decode steps replay captured graphs
    max_graph_batch: int = 128  # requests of the largest graph; larger decode steps run without one
    tensor_parallel: int = 1  # processes that share each layer's heads and columns; on CPUs, `threads` are of each
    rank_cpus: tuple[tuple[int, ...], ...] = ()  # cores to pin the other ranks to, by rank; empty: not pinned

    def validate(self) -> None:
        """Raise ValueError for the first option that is out of range."""
        for key in ("page_size", "num_pages", "kv_bytes", "threads", "max_graph_batch", "tensor_parallel"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"{key} is {value}; give a whole number of 1 or more")
        if self.num_pages is not None and self.kv_bytes is not None:
            raise ValueError(f"num_pages is {self.num_pages} and kv_bytes is {self.kv_bytes}; give one of the two")
        check_device_name(self.device)
        if self.kv_dtype not in KV_DTYPES:
            raise ValueError(f"kv_dtype is {self.kv_dtype!r}; give one of {', '.join(KV_DTYPES)}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            share = self.gpu_memory_utilization
            raise ValueError(f"gpu_memory_utilization is {share:g}; give a share above 0 and up to 1")
        if self.tensor_parallel > 1 and self.kv_dtype != "auto":
            raise ValueError(
                f"tensor_parallel is {self.tensor_parallel} with kv_dtype {self.kv_dtype!r}; give one of the two"
            )


def check_device_name(name: str) -> None:
    """Raise ValueError for a device that no machine has."""
    if not DEVICE.fullmatch(name):
        raise ValueError(f"device is {name!r}; give one of auto, cpu, cuda, cuda:N")
