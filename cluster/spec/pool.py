"""PoolSpec is what a spec says of one pool of alike workers: where they stand, and the options of their role's policy.

It checks a pool's keys among themselves, and pools beside each other; it looks at no machine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeGuard

from pydantic import BeforeValidator, field_validator

from cluster.spec.assumed import Assumed
from cluster.spec.knobs import Spec, setting, with_knobs
from engine.knobs import knobs_of
from engine.options import AS_IT_IS, EngineOptions
from worker.options import WorkerOptions
from worker.roles import ROLES

SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", re.IGNORECASE)
NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?")
# Between processes, and of which memory; loopback is for tests within one.
TRANSPORTS = {"cuda_ipc": ("cuda",), "shared_memory": ("cpu",), "tcp": ("cpu",), "process_group": ("cpu", "cuda")}
ANOTHER_MODEL = "requests that run could not move from one model to another"
MOST_THREADS = 1024  # more than cores anywhere
GPU_ONLY = ("gpu_memory_utilization", "cuda_graphs")


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


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and value >= 1


def check_name(value: str) -> str:
    if not NAME.fullmatch(value):
        raise ValueError("give small letters, digits and -, at most 40, such as chat-1")
    return value


def _some_role(value: object) -> object:
    if not isinstance(value, str) or value not in ROLES:
        *others, last = map(repr, ROLES)
        raise ValueError(f"give {', '.join(others)} or {last}")
    return value


@with_knobs(EngineOptions, *(kind.load_options() for kind in ROLES.values()), WorkerOptions, scope="pool")
class PoolSpec(Spec):
    changes = "rolling"

    if TYPE_CHECKING:  # those of the engine's knobs that are looked at here
        attention: str
        kv_dtype: str
        tensor_parallel: int
        expert_parallel: bool
        pipeline_parallel: int

    name: str = setting("", "of its workers: NAME-0, NAME-1; empty: the role", changes="now")
    role: Annotated[str, BeforeValidator(_some_role)] = setting(
        ..., "what its workers do: " + " or ".join(f"`{role}`" for role in ROLES)
    )
    model: str = setting("", "of the cluster's `models` by name; empty: its own", fixed=ANOTHER_MODEL)
    replicas: int = setting(1, "how many", unit="workers", ge=1, le=4096, changes="now")

    threads: int | Literal["auto"] = setting(
        "auto",
        "of each worker, or of each of its processes; auto: the machine's cores shared out, or "
        "what a cgroup (a container's, a service's) may use of their time; with `--address`: `num_cpus` shared out "
        "among them",
        unit="threads",
    )
    cpus: Literal["auto"] | tuple[int, ...] | None = setting(
        "auto",
        "to pin to, shared out evenly, such as `[0, 1]`; null: not pinned; auto: pinned when there are enough, never "
        "with `--address` or where a cgroup's limit leaves fewer cores' time",
        unit="cores",
    )
    kv_memory: int | Literal["auto"] = setting(
        "auto",
        "of each worker's pages; auto: 40% of memory, or of a cgroup's limit, shared out, at most 2GiB; with "
        "`--address`: 1GiB; on a GPU: what `gpu_memory_utilization` leaves",
        unit="bytes",
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto",
        "`cpu` or `cuda`, the same for all pools; auto: cuda where `num_gpus` is above 0, or where `kvrelay up` runs "
        "beside a GPU with a CUDA torch; see [gpu.md](gpu.md)",
        fixed=AS_IT_IS,
    )
    gpu_memory_utilization: float | Literal["auto"] = setting(
        "auto",
        "of the GPU's memory for all that one worker holds there; auto: 0.9 of its `num_gpus`",
        unit="share",
    )
    num_cpus: float = setting(
        1.0,
        "that Ray sets aside for each worker, all of its processes together; it counts, it does not pin",
        unit="cores",
        ge=0,
    )
    num_gpus: float = setting(
        0.0,
        "that Ray sets aside for each worker: one for each of its processes (`tensor_parallel` times "
        "`pipeline_parallel`), or less than one: 0.5, and two workers share one; 0 with device cuda: the GPUs shared "
        "out, with `--address` one each",
        unit="GPUs",
        fixed="Ray has set them aside",
        ge=0,
    )
    resources: dict[str, float] = setting(
        {}, "that Ray sets aside for each worker, such as `{prefill_host: 1}`", unit="Ray resources"
    )

    assumed: Assumed | None = setting(
        None,
        "what a plan went by for one worker, which it wrote: `prompt_tokens`, `prefill_s`, `decode_s`, `transfer_s`, "
        "`error`; `kvrelay doctor` holds workers against it",
    )

    @field_validator("tensor_parallel", "pipeline_parallel", mode="before", check_fields=False)
    @classmethod
    def _degree(cls, value: object) -> object:
        if not _is_count(value):
            raise ValueError("give a whole number of 1 or more")
        return value

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
        if value != "auto" and not (_is_count(value) and value <= MOST_THREADS):
            raise ValueError(f"give auto or a whole number from 1 to {MOST_THREADS}")
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
        return check_name(value) if value else value

    @property
    def label(self) -> str:
        return self.name or self.role

    @property
    def processes(self) -> int:
        """Of each worker."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def policy(self) -> Any:
        """The options of its role's policy."""
        return self.options(ROLES[self.role].load_options())


def roles_of(name: str) -> list[str]:
    """The roles whose pools have a key; all of them for one that is not of a role's policy."""
    return [role for role, kind in ROLES.items() if name in knobs_of(kind.load_options())] or list(ROLES)


def check_devices(pools: Sequence[PoolSpec], devices: Sequence[str], transports: Sequence[str]) -> None:
    """Raises ValueError, one sentence, where pools cannot run on `devices` (auto: not known yet) or cannot hand KV
    over to one another."""
    for index, (pool, device) in enumerate(zip(pools, devices, strict=True)):
        _check_device(index, pool, device)
    for key, values in (("kv_dtype", [pool.kv_dtype for pool in pools]), ("device", list(devices))):
        named = [(index, value) for index, value in enumerate(values) if key == "kv_dtype" or value != "auto"]
        firsts: dict[str, int] = {}
        for index, value in named:
            first = firsts.setdefault(pools[index].model if key == "kv_dtype" else "", index)
            if value != values[first]:
                raise ValueError(
                    f"pools[{index}].{key} is {value!r}, but pools[{first}].{key} is {values[first]!r}; give both "
                    "the same, for KV is handed over as it is"
                )
    known = next((device for device in devices if device != "auto"), None)
    if known is not None and not any(known in TRANSPORTS[name] for name in transports):
        able = " or ".join(name for name, moved in TRANSPORTS.items() if known in moved)
        raise ValueError(
            f"transfer.transports is {list(transports)}, and none of them moves KV with device: {known}; add {able}"
        )


def _check_device(index: int, pool: PoolSpec, device: str) -> None:
    if pool.attention == "native" and pool.kv_dtype == "fp8_e4m3":
        raise ValueError(
            f"pools[{index}].attention is 'native', which does not read kv_dtype fp8_e4m3; give attention: flashinfer"
        )
    if device == "cuda" and pool.kv_dtype == "int8":
        raise ValueError(f"pools[{index}].kv_dtype is 'int8', which is for CPUs; give fp8_e4m3 with device: cuda")
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


def check_pool(index: int, pool: PoolSpec) -> None:
    for name in PoolSpec.model_fields:
        if name in pool.model_fields_set and pool.role not in (roles := roles_of(name)):
            raise ValueError(
                f"pools[{index}].{name} is for {' and '.join(roles)} pools; take it out of this {pool.role} pool"
            )
    draft = getattr(pool.policy, "speculative_model", "")
    if draft and not pool.policy.num_speculative_tokens:
        raise ValueError(
            f"pools[{index}].speculative_model is {draft!r} with num_speculative_tokens 0; "
            "give how many tokens it guesses, or take it out"
        )
    for key, degree, is_served in (
        ("tensor_parallel", pool.tensor_parallel, pool.kv_dtype == "auto"),
        ("pipeline_parallel", pool.pipeline_parallel, pool.kv_dtype != "fp8_e4m3"),
    ):
        if degree > 1 and not is_served:
            raise ValueError(f"pools[{index}].kv_dtype is {pool.kv_dtype!r} with {key} {degree}; give one of the two")
    if pool.expert_parallel and pool.tensor_parallel == 1:
        raise ValueError(
            f"pools[{index}].expert_parallel is true with tensor_parallel 1, whose one process has all experts; "
            "give tensor_parallel 2 or more, or take it out"
        )
    if pool.num_gpus > pool.processes:
        raise ValueError(f"pools[{index}].num_gpus is {pool.num_gpus:g}; give {pool.processes} or less")
    if not isinstance(pool.cpus, tuple):
        return
    if len(set(pool.cpus)) != len(pool.cpus):
        raise ValueError(f"pools[{index}].cpus is {list(pool.cpus)}; give each core's number once")
    if not pool.cpus or len(pool.cpus) % (pool.replicas * pool.processes):
        of_each = f" of {pool.processes} processes each" if pool.processes > 1 else ""
        raise ValueError(
            f"pools[{index}].cpus is {list(pool.cpus)}; "
            f"give a number of cores that {pool.replicas} replicas{of_each} can share"
        )
