"""EngineOptions says what one engine is: its model, where it computes, and how much memory its pages may take.

Values only, and torch-free: whoever starts a process makes them before torch is imported there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from engine.knobs import check, knob

AS_IT_IS = "KV is handed over as it is, so that all workers must have the same"
DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    model: str  # a Hugging Face directory or hub name
    dtype: Literal["auto", "float32", "bfloat16"] = knob(
        "auto", "auto: as the model was saved (float16 becomes bfloat16)", scope="cluster", fixed=AS_IT_IS
    )
    page_size: int | None = knob(
        None,
        "in a page; the same on all workers; null: 16, and where a model keeps a state beside KV as many as make a "
        "page's KV as large as the state in it, 1024 at most",
        unit="tokens",
        scope="cluster",
        ge=1,
        le=1024,
        fixed=AS_IT_IS,
    )
    num_pages: int | None = None  # or kv_bytes; 1 GiB of pages when neither is given
    kv_bytes: int | None = None
    max_model_len: int | None = knob(
        None,
        "longest prompt plus output; null: the model's own",
        unit="tokens",
        scope="cluster",
        ge=1,
        fixed="requests that run were promised it",
    )
    attention: Literal["auto", "torch", "native", "flashinfer"] = knob(
        "auto",
        "`native` (C++, CPU), `flashinfer` (GPU), `torch` (the reference, slow); auto: the fast one of the device "
        "where it works",
        scope="pool",
    )
    threads: int | None = None  # None: torch's own choice
    parity_check: bool = knob(
        True, "refuse a model whose paged path disagrees with its own code", scope="cluster", changes="rolling"
    )
    quantization: Literal["none", "int8"] = knob(
        "none",
        "of weights as they are loaded; int8: of linear layers, a scale for each output, on CPUs in bfloat16: half the "
        "bytes to read, so that few answers at once are written faster",
        scope="cluster",
        fixed="KV is of the weights that made it",
    )
    generation_config: Literal["auto", "none"] = knob(
        "auto",
        "how requests draw that do not say: `auto` as the model's generation_config.json has it (temperature, top_k, "
        "top_p, min_p, repetition_penalty; as in vLLM), `none` by the defaults of the API",
        scope="cluster",
        changes="rolling",
    )
    device: str = "auto"  # auto | cpu | cuda | cuda:N; auto is the current GPU where there is one
    kv_dtype: Literal["auto", "fp8_e4m3", "int8"] = knob(
        "auto",
        "of pages; auto: as the model computes; half the bytes, less exact: `int8` on CPUs, a scale for each row; "
        "`fp8_e4m3` on GPUs, one for each layer; the same for all pools",
        scope="pool",
        fixed=AS_IT_IS,
    )
    gpu_memory_utilization: float = 0.9  # share of a GPU's memory for all of it, where no page count is given
    cuda_graphs: bool = knob(True, "decode steps replay captured graphs; on a GPU", scope="pool")
    max_graph_batch: int = 128  # requests of the largest graph; larger decode steps run without one
    max_step_tokens: int = 0  # of the largest step, for whose memory a GPU keeps room; it keeps room for 8192 anyhow
    tensor_parallel: int = knob(
        1,
        "of one host that share each layer of a worker, or of each of its stages, on GPUs one each; heads and MLP "
        "columns must divide; pools may differ: see *Tensor parallelism*",
        unit="processes",
        scope="pool",
        ge=1,
    )
    expert_parallel: bool = knob(
        False,
        "each of a worker's `tensor_parallel` processes has whole experts, and not a run of the width of each; of a "
        "mixture whose experts they divide",
        scope="pool",
    )
    pipeline_parallel: int = knob(
        1,
        "of one host that have a run of a worker's layers each, and compute as many batches at once; pools may differ: "
        "see *Pipeline parallelism*",
        unit="stages",
        scope="pool",
        ge=1,
    )
    max_adapters: int = knob(
        16,
        "LoRA adapters that a worker keeps in memory, those used last, where a step needs no more",
        unit="adapters",
        scope="pool",
        ge=1,
    )
    speculative_model: str = ""  # guesses tokens ahead of the other: a directory or hub name; empty: none
    collectives: Literal["auto", "shared", "process_group"] = "auto"  # of ranks; auto: shared memory on CPUs, else NCCL
    rank_cpus: tuple[tuple[int, ...], ...] = ()  # cores to pin its processes to, the leader first; empty: not pinned

    def validate(self) -> None:
        """Raise ValueError for the first option that is out of range."""
        check(self)
        for key in ("num_pages", "kv_bytes", "threads", "max_graph_batch"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"{key} is {value}; give a whole number of 1 or more")
        if self.num_pages is not None and self.kv_bytes is not None:
            raise ValueError(f"num_pages is {self.num_pages} and kv_bytes is {self.kv_bytes}; give one of the two")
        check_device_name(self.device)
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            share = self.gpu_memory_utilization
            raise ValueError(f"gpu_memory_utilization is {share:g}; give a share above 0 and up to 1")
        for key in ("tensor_parallel", "pipeline_parallel"):
            if getattr(self, key) > 1 and self.quantization != "none":
                raise ValueError(
                    f"quantization is {self.quantization!r} with {key} {getattr(self, key)}; give one of the two"
                )
        self._validate_stages()
        if self.expert_parallel and self.tensor_parallel == 1:
            raise ValueError(
                "expert_parallel is True with tensor_parallel 1, whose one process has all experts; "
                "give tensor_parallel 2 or more, or leave it out"
            )
        if self.tensor_parallel > 1 and self.kv_dtype != "auto":
            raise ValueError(
                f"tensor_parallel is {self.tensor_parallel} with kv_dtype {self.kv_dtype!r}; give one of the two"
            )

    def _validate_stages(self) -> None:
        if self.pipeline_parallel == 1:
            return
        served = {"speculative_model": ("",), "kv_dtype": ("auto", "int8")}  # int8: no scales
        for key, values in served.items():
            if (value := getattr(self, key)) not in values:
                raise ValueError(
                    f"pipeline_parallel is {self.pipeline_parallel} with {key} {value!r}; give one of the two"
                )

    @property
    def num_processes(self) -> int:
        """That an engine is, its leader counted."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def degrees(self) -> str:
        """For people."""
        return degrees_in_words(self.tensor_parallel, self.pipeline_parallel)


def degrees_in_words(tensor_parallel: int, pipeline_parallel: int) -> str:
    """Those above 1."""
    degrees = {"tensor_parallel": tensor_parallel, "pipeline_parallel": pipeline_parallel}
    return " and ".join(f"{key} {degree}" for key, degree in degrees.items() if degree > 1)


def check_device_name(name: str) -> None:
    """Raise ValueError for a device that no machine has."""
    if not DEVICE.fullmatch(name):
        raise ValueError(f"device is {name!r}; give one of auto, cpu, cuda, cuda:N")
