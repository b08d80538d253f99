"""ClusterSpec is what a person writes to say what shall run: a model, a router, pools of workers, the transfer.

    file or flags --parse--> ClusterSpec --resolve (cluster/spec/resolve.py)--> no "auto" left --> one plan a worker

It checks; it starts nothing and looks at no machine. A spec is never changed after it is made. Every mistake is one
sentence (SpecError).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from cluster.spec.errors import SpecError, sentences_of, show
from worker.options import Role

__all__ = ["ClusterSpec", "PoolSpec", "RouterSpec", "SpecError", "TransferSpec", "load_spec", "parse_spec"]

SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", re.IGNORECASE)
NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?")
# Between processes, and of which memory; loopback is for tests within one.
TRANSPORTS = {"cuda_ipc": ("cuda",), "shared_memory": ("cpu",), "process_group": ("cpu", "cuda")}
PREFILL_KEYS = ("max_batch_tokens", "max_prefill_requests", "pack_tokens", "short_prompt_tokens", "short_share")
DECODE_KEYS = ("max_batch_size", "admission", "watermark")


def parse_size(value: object) -> object:
    """1GiB, 512 MiB, 100MB, 4096 -> bytes; what is no size is left for pydantic to refuse."""
    if not isinstance(value, str):
        return value
    match = SIZE.fullmatch(value)
    if match is None:
        raise ValueError("give a size such as 512MiB, 2GiB or a number of bytes")
    number, prefix, binary = match.groups()
    base = 1024 if binary else 1000
    return int(float(number) * base ** " KMGT".index(prefix.upper() or " "))


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1


def _check_name(value: str) -> str:
    if not NAME.fullmatch(value):
        raise ValueError("give small letters, digits and -, at most 40, such as chat-1")
    return value


def _degree(value: object) -> object:
    if not _is_count(value):
        raise ValueError("give a whole number of 1 or more")
    return value


def _known_transports(value: tuple[str, ...]) -> tuple[str, ...]:
    for name in value:
        if name not in TRANSPORTS:
            raise ValueError(f"{show(name)} is no transport; give some of {', '.join(TRANSPORTS)}")
    return value


Name = Annotated[str, Field(min_length=1)]
Parallel = Annotated[int, BeforeValidator(_degree)]
MAX_PORT = 65_535
Port = Annotated[int, Field(ge=0, le=MAX_PORT)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Share = Annotated[float, Field(ge=0, lt=1)]


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False)


class RouterSpec(_Spec):
    replicas: int = Field(default=1, ge=1, le=64)
    host: str = "auto"  # auto: loopback where kvrelay starts Ray itself, the node's address where it joins one
    port: Port = 50051  # replica i listens on port + i; 0: any free one
    metrics_port: Port | None = None
    max_queued_requests: int = Field(default=1024, ge=1)  # beyond it requests are rejected
    max_queued_tokens: int = Field(default=1_048_576, ge=1)  # prompt tokens in the router's queue
    max_backlog_tokens: int = Field(default=32_768, ge=1)  # prompt tokens sent to one prefill worker and not computed
    overcommit: float = Field(default=0.25, ge=0)  # share of a decode worker's pages promised beyond those free
    dead_after_s: Seconds = 2.0  # a worker that says nothing for so long is lost
    max_attempts: int = Field(default=4, ge=1)  # after so many failed ones a request fails
    unavailable_grace_s: float = Field(default=0.0, ge=0)  # how long a request may wait while a role has no worker
    drain_s: Seconds = 5.0  # how long running requests may take to end when the cluster stops
    resources: dict[str, float] = {}  # Ray's own names, to place it


class PoolSpec(_Spec):
    name: str = ""  # empty: the role
    role: Role
    replicas: int = Field(default=1, ge=1, le=4096)

    threads: int | Literal["auto"] = "auto"  # of each worker; with tensor_parallel of each of its processes
    cpus: Literal["auto"] | tuple[int, ...] | None = "auto"  # pinned to these, shared out evenly; null: not pinned
    kv_memory: int | Literal["auto"] = "auto"  # of each worker
    device: Literal["auto", "cpu", "cuda"] = "auto"
    attention: Literal["auto", "torch", "native", "flashinfer"] = "auto"
    kv_dtype: Literal["auto", "fp8_e4m3"] = "auto"
    gpu_memory_utilization: float | Literal["auto"] = "auto"  # share of the GPU's memory for all that a worker holds
    cuda_graphs: bool = True
    tensor_parallel: Parallel = 1  # processes (on GPUs: GPUs) that share each layer of a worker
    pipeline_parallel: Parallel = 1  # stages that share the layers: read, for a planner writes it, and not served

    num_cpus: float = Field(default=1.0, ge=0)  # what Ray sets aside for each worker
    num_gpus: float = Field(default=0.0, ge=0)  # 0.5: two workers share one; 0 on a GPU: shared out
    resources: dict[str, float] = {}

    max_batch_tokens: int = Field(default=512, ge=1)
    max_prefill_requests: int = Field(default=64, ge=1)
    pack_tokens: int = Field(default=128, ge=1)  # no more prompts join a step that has so many tokens
    short_prompt_tokens: int = Field(default=256, ge=0)
    short_share: Share = 0.5
    max_batch_size: int = Field(default=64, ge=1)
    admission: Literal["watermark", "worst_case"] = "watermark"
    watermark: Share = 0.02
    prefix_cache: bool = True

    @field_validator("kv_memory", mode="before")
    @classmethod
    def _size_or_auto(cls, value: object) -> object:
        size = value if value == "auto" else parse_size(value)
        if size != "auto" and not _is_count(size):
            raise ValueError("give auto, or a size such as 512MiB or 2GiB")
        return size

    @field_validator("gpu_memory_utilization", mode="before")
    @classmethod
    def _share_or_auto(cls, value: object) -> object:
        if value != "auto" and not (type(value) in (int, float) and 0 < value <= 1):  # type: ignore[operator]
            raise ValueError("give auto, or a share above 0 and up to 1, such as 0.45")
        return value

    @field_validator("threads", mode="before")
    @classmethod
    def _some_threads(cls, value: object) -> object:
        if value != "auto" and not _is_count(value):
            raise ValueError("give auto or a whole number of 1 or more")
        return value

    @field_validator("cpus", mode="before")
    @classmethod
    def _some_cpus(cls, value: object) -> object:
        is_list = isinstance(value, list | tuple) and all(type(cpu) is int and cpu >= 0 for cpu in value)
        if value is not None and value != "auto" and not is_list:
            raise ValueError("give auto, null, or a list of cores such as [0, 1]")
        return value

    @field_validator("name", mode="after")
    @classmethod
    def _good_name(cls, value: str) -> str:
        return _check_name(value) if value else value

    @property
    def label(self) -> str:
        return self.name or self.role


class TransferSpec(_Spec):
    transports: Annotated[tuple[str, ...], Field(min_length=1)] = ("cuda_ipc", "shared_memory", "process_group")
    checksums: bool = True
    layers_per_group: int = Field(default=0, ge=0)  # 0: chosen so that a segment is about a megabyte
    lease_ttl_s: Seconds = 30.0
    timeout_s: Seconds = 5.0
    max_resends: int = Field(default=2, ge=0)
    nccl: dict[str, str] = {}  # environment of NCCL and of torch's use of it, in every worker

    @field_validator("nccl", mode="before")
    @classmethod
    def _only_nccl(cls, value: object) -> object:
        if not isinstance(value, Mapping):
            return value
        for key in value:
            if not str(key).startswith(("NCCL_", "TORCH_NCCL_")):
                raise ValueError(f"{show(key)} is no setting of NCCL's; give keys that begin with NCCL_ or TORCH_NCCL_")
        return {str(key): str(int(v) if isinstance(v, bool) else v) for key, v in value.items()}

    @field_validator("transports", mode="after")
    @classmethod
    def _transports(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return _known_transports(value)


class ClusterSpec(_Spec):
    name: str = "kvrelay"
    model: Name  # a Hugging Face directory or hub id
    served_model_name: str | None = None  # None: the directory's name or the hub id
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_model_len: int | None = Field(default=None, ge=1)  # None: the model's own
    page_size: int = Field(default=16, ge=1, le=1024)
    parity_check: bool = True
    ready_timeout_s: Seconds = 600.0
    router: RouterSpec = RouterSpec()
    pools: Annotated[tuple[PoolSpec, ...], Field(min_length=1)]
    transfer: TransferSpec = TransferSpec()

    @field_validator("name", mode="after")
    @classmethod
    def _good_name(cls, value: str) -> str:
        return _check_name(value)

    @model_validator(mode="after")
    def _pools_make_sense(self) -> ClusterSpec:
        for role in ("prefill", "decode"):
            if not any(pool.role == role for pool in self.pools):
                raise ValueError(f"pools has no pool with role {role}; add one, for each request needs both")
        for label, count in Counter(pool.label for pool in self.pools).items():
            if count > 1:
                raise ValueError(f"pools has {count} pools named {label}; give each a name of its own")
        for index, pool in enumerate(self.pools):
            _check_pool(index, pool)
        check_devices(self.pools, [pool.device for pool in self.pools], self.transfer)
        _check_ports(self.router)
        return self

    @property
    def model_name(self) -> str:
        """What requests call the model."""
        is_path = self.model.startswith((".", "/", "~"))
        return self.served_model_name or (Path(self.model).name if is_path else self.model)


def _check_ports(router: RouterSpec) -> None:
    for key, port in (("port", router.port), ("metrics_port", router.metrics_port)):
        if port and port + router.replicas - 1 > MAX_PORT:
            raise ValueError(
                f"router.{key} is {port}, too high for {router.replicas} replicas with a port each; "
                f"give {MAX_PORT + 1 - router.replicas} or less"
            )


GPU_ONLY = ("gpu_memory_utilization", "cuda_graphs")


def check_devices(pools: Sequence[PoolSpec], devices: Sequence[str], transfer: TransferSpec) -> None:
    """Raises ValueError, one sentence, where pools cannot run on `devices` (auto: not known yet) or cannot hand KV
    over to one another."""
    for index, (pool, device) in enumerate(zip(pools, devices, strict=True)):
        _check_device(index, pool, device)
    for key, values in (("kv_dtype", [pool.kv_dtype for pool in pools]), ("device", list(devices))):
        named = [(index, value) for index, value in enumerate(values) if key == "kv_dtype" or value != "auto"]
        for index, value in named[1:]:
            if value != named[0][1]:
                raise ValueError(
                    f"pools[{index}].{key} is {value!r}, but pools[{named[0][0]}].{key} is {named[0][1]!r}; give both "
                    "the same, for KV is handed over as it is"
                )
    known = next((found for found in devices if found != "auto"), None)
    if known is not None and not any(known in TRANSPORTS[name] for name in transfer.transports):
        able = " or ".join(name for name, moved in TRANSPORTS.items() if known in moved)
        raise ValueError(
            f"transfer.transports is {list(transfer.transports)}, and none of them moves KV with device: {known}; "
            f"add {able}"
        )


def _check_device(index: int, pool: PoolSpec, device: str) -> None:
    if pool.attention == "native" and pool.kv_dtype == "fp8_e4m3":
        raise ValueError(
            f"pools[{index}].attention is 'native', which does not read kv_dtype fp8_e4m3; give attention: flashinfer"
        )
    if device == "cuda" and pool.attention == "native":
        raise ValueError(
            f"pools[{index}].attention is 'native', which is for CPUs; give flashinfer or auto with device: cuda"
        )
    if device != "cpu":
        return
    if pool.attention == "flashinfer":
        raise ValueError(f"pools[{index}].attention is 'flashinfer', which wants a GPU; give device: cuda, or auto")
    if pool.num_gpus > 0:
        raise ValueError(f"pools[{index}].num_gpus is {pool.num_gpus:g} with device: cpu; take one of them out")
    for key in GPU_ONLY:
        if key in pool.model_fields_set:
            raise ValueError(f"pools[{index}].{key} is for GPUs; take it out of this pool with device: cpu")


def _check_pool(index: int, pool: PoolSpec) -> None:
    foreign = DECODE_KEYS if pool.role == "prefill" else PREFILL_KEYS
    for key in foreign:
        if key in pool.model_fields_set:
            other = "decode" if pool.role == "prefill" else "prefill"
            raise ValueError(f"pools[{index}].{key} is for {other} pools; take it out of this {pool.role} pool")
    if pool.kv_dtype != "auto" and pool.tensor_parallel > 1:
        raise ValueError(
            f"pools[{index}].kv_dtype is {pool.kv_dtype!r} with tensor_parallel {pool.tensor_parallel}; "
            "give one of the two"
        )
    ranks = pool.tensor_parallel * pool.pipeline_parallel
    if pool.num_gpus > ranks:
        raise ValueError(f"pools[{index}].num_gpus is {pool.num_gpus:g}; give {ranks} or less")
    if not isinstance(pool.cpus, tuple):
        return
    if len(set(pool.cpus)) != len(pool.cpus):
        raise ValueError(f"pools[{index}].cpus is {list(pool.cpus)}; give each core's number once")
    if not pool.cpus or len(pool.cpus) % (pool.replicas * pool.tensor_parallel):
        of_each = f" of {pool.tensor_parallel} processes each" if pool.tensor_parallel > 1 else ""
        raise ValueError(
            f"pools[{index}].cpus is {list(pool.cpus)}; "
            f"give a number of cores that {pool.replicas} replicas{of_each} can share"
        )


def parse_spec(data: object) -> ClusterSpec:
    """A spec from plain data (a YAML document). Raises SpecError."""
    if not isinstance(data, Mapping):
        raise SpecError(f"the spec is {show(data)}; give keys and values such as model: DIR")
    try:
        return ClusterSpec.model_validate(data)
    except ValidationError as error:
        raise SpecError(*sentences_of(error, ClusterSpec)) from None


def load_spec(path: str | Path) -> ClusterSpec:
    """A spec from a YAML file; a relative model directory is meant from the file's folder. Raises SpecError."""
    import yaml  # not at the top: policies and the simulator import this module without it

    try:
        text = Path(path).read_text(encoding="utf-8")
        _refuse_repeated_keys(yaml.compose(text, yaml.SafeLoader), str(path))
        data = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} cannot be read: {getattr(error, 'strerror', None) or 'it is no text'}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}" if mark else "somewhere"
        problem = getattr(error, "problem", None) or "it does not parse"
        raise SpecError(f"{path} is not YAML: {where}: {problem}") from None
    spec = parse_spec(data)
    beside = Path(path).resolve().parent / spec.model
    if spec.model.startswith(".") and beside.is_dir():
        return spec.model_copy(update={"model": str(beside)})
    return spec


def _refuse_repeated_keys(node: Any, path: str) -> None:
    """YAML would take the last of two equal keys and say nothing."""
    children = node.value if node is not None and isinstance(node.value, list) else []
    for child in children:
        _refuse_repeated_keys(child[1] if isinstance(child, tuple) else child, path)
    keys = [child[0] for child in children if isinstance(child, tuple)]
    for key, count in Counter(key.value for key in keys).items():
        if count > 1:
            line = [k.start_mark.line + 1 for k in keys if k.value == key][1]
            raise SpecError(f"{path} says {key} twice, again in line {line}; keep one of them")
