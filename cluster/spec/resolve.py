"""Resolves a spec's "auto" once, for the machine it will run on, and says what each worker is.

It looks at no machine: what there is comes as an argument, so that a test or a planner can ask about any machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.spec.errors import SpecError
from cluster.spec.model import ClusterSpec
from cluster.spec.pool import PoolSpec, check_devices
from engine.options import EngineOptions, degrees_in_words
from kv_transfer.options import TransferOptions
from worker.options import WorkerOptions, given_knobs

AUTO_KV_SHARE = 0.4  # of the machine's memory, over all workers
AUTO_KV_MAX_BYTES = 2 << 30
JOINED_KV_BYTES = 1 << 30
AUTO_GPU_SHARE = 0.9  # of the part of a GPU's memory that is a worker's; the rest is for CUDA itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The one machine on which everything will run. A joined Ray cluster has no such machine: pass None."""

    cores: tuple[int, ...]  # numbers of the cores this process may use
    memory_bytes: int
    core_limit: int | None = None  # so many cores' time, on any of them; None: all of theirs
    gpus: int = 0
    why_no_cuda: str = "this machine has no GPU"  # empty: the GPUs can be used

    @property
    def num_cores(self) -> int:
        return min(len(self.cores), self.core_limit or len(self.cores))


def resolve(spec: ClusterSpec, machine: Machine | None, *, node_host: str = "127.0.0.1") -> ClusterSpec:
    """The same spec without "auto". `node_host` is where this node is reached. Raises SpecError.

    On one machine the cores are shared out, first worker first, and workers are pinned when the cores suffice and are
    ours: under a limit on their time others use them, too, and the kernel finds those that are free.
    """
    if why := why_not_served(spec):
        raise SpecError(why)
    host = spec.router.host if spec.router.host != "auto" else node_host
    if why := spec.router.why_open(host):
        raise SpecError(f"router.{why}")
    pools = _resolve_devices(spec, machine)
    pools = _resolve_joined(pools) if machine is None else _resolve_on(pools, machine)
    return spec.model_copy(update={"pools": pools, "router": spec.router.model_copy(update={"host": host})})


def why_not_served(spec: ClusterSpec) -> str:
    """What of a spec this version does not serve on any machine, in one sentence; empty if it serves all of it."""
    for index, pool in enumerate(spec.pools):
        guesses = getattr(pool.policy, "num_speculative_tokens", 0)
        if pool.pipeline_parallel > 1 and guesses:
            return (
                f"pools[{index}].pipeline_parallel is {pool.pipeline_parallel} with num_speculative_tokens {guesses}; "
                "give one of the two"
            )
        if 1 < pool.processes != pool.num_gpus > 0:
            degrees = degrees_in_words(pool.tensor_parallel, pool.pipeline_parallel)
            return (
                f"pools[{index}].num_gpus is {pool.num_gpus:g} with {degrees}, whose processes each want a GPU of "
                f"their own; give {pool.processes}, or leave it out"
            )
    return ""


def _resolve_devices(spec: ClusterSpec, machine: Machine | None) -> tuple[PoolSpec, ...]:
    """Every pool's device, and for those on GPUs how much of one each worker gets. Raises SpecError."""
    wants = [_device_wanted(pool) for pool in spec.pools]
    chosen = next((device for device in wants if device != "auto"), None) or _device_of(machine)
    devices = [chosen if device == "auto" else device for device in wants]
    for index, (pool, device) in enumerate(zip(spec.pools, devices, strict=True)):
        if device == "cuda" and machine is not None and machine.why_no_cuda:
            raise SpecError(f"pools[{index}] ({pool.label}) is to run on a GPU, but {machine.why_no_cuda}")
    try:
        check_devices(spec.pools, devices, spec.transfer.options(TransferOptions).transports)
    except ValueError as error:
        raise SpecError(str(error)) from None
    if "cuda" not in devices:
        return tuple(pool.model_copy(update={"device": "cpu"}) for pool in spec.pools)
    return _share_gpus(spec.pools, machine)


def _device_wanted(pool: PoolSpec) -> str:
    """What the pool's other keys say of its device."""
    if pool.device != "auto":
        return pool.device
    if pool.num_gpus > 0 or pool.attention == "flashinfer":
        return "cuda"
    return "cpu" if pool.attention == "native" else "auto"


def _device_of(machine: Machine | None) -> str:
    return "cuda" if machine is not None and machine.gpus and not machine.why_no_cuda else "cpu"


def _share_gpus(pools: Sequence[PoolSpec], machine: Machine | None) -> tuple[PoolSpec, ...]:
    """A GPU for each worker, or for each of its processes; where there are fewer, as many workers of one process on
    each as must be. Raises SpecError."""
    num_alone = sum(pool.replicas for pool in pools if pool.processes == 1)
    of_many = sum(pool.replicas * pool.processes for pool in pools if pool.processes > 1)
    left = max(1, num_alone if machine is None else machine.gpus - of_many)
    each = 1.0 / max(1, -(-num_alone // left))
    shares = [pool.num_gpus or (each if pool.processes == 1 else pool.processes) for pool in pools]
    wanted = _gpus_for([share for share, pool in zip(shares, pools, strict=True) for _ in range(pool.replicas)])
    if machine is not None and wanted > machine.gpus:
        raise SpecError(
            f"the pools' num_gpus take {wanted:g} GPUs in all, and this machine has {machine.gpus}; lower num_gpus, "
            "such as 0.5 for two workers on one GPU"
        )
    return tuple(
        pool.model_copy(
            update={
                "device": "cuda",
                "num_gpus": share,
                "gpu_memory_utilization": round(AUTO_GPU_SHARE * share / pool.processes, 4)
                if pool.gpu_memory_utilization == "auto"
                else pool.gpu_memory_utilization,
            }
        )
        for share, pool in zip(shares, pools, strict=True)
    )


def _gpus_for(shares: Sequence[float]) -> float:
    """How many GPUs workers of such shares take, the largest placed first: each share is of one GPU."""
    left: list[float] = []
    for share in sorted((share for share in shares if share < 1), reverse=True):
        at = next((i for i, room in enumerate(left) if room > share - 1e-6), None)
        if at is None:
            left.append(1.0 - share)
        else:
            left[at] -= share
    return len(left) + sum(share for share in shares if share >= 1)


def _resolve_joined(pools: Sequence[PoolSpec]) -> tuple[PoolSpec, ...]:
    def of(pool: PoolSpec) -> dict[str, Any]:
        return {
            "threads": max(1, int(pool.num_cpus) // pool.processes) if pool.threads == "auto" else pool.threads,
            "cpus": None if pool.cpus == "auto" else pool.cpus,
            "kv_memory": JOINED_KV_BYTES if _wants_kv_bytes(pool) else pool.kv_memory,
        }

    return tuple(pool.model_copy(update=of(pool)) for pool in pools)


def _resolve_on(pools: Sequence[PoolSpec], machine: Machine) -> tuple[PoolSpec, ...]:
    num_workers = sum(pool.replicas for pool in pools)
    num_processes = sum(pool.replicas * pool.processes for pool in pools)
    share = max(1, machine.num_cores // num_processes)
    threads = [share if pool.threads == "auto" else pool.threads for pool in pools]
    wanted = [t * pool.replicas * pool.processes for t, pool in zip(threads, pools, strict=True)]
    taken = {cpu for pool in pools if isinstance(pool.cpus, tuple) for cpu in pool.cpus}
    _check_cores(pools, machine)
    spare = [cpu for cpu in machine.cores if cpu not in taken]
    wanted_to_pin = sum(w for w, pool in zip(wanted, pools, strict=True) if pool.cpus == "auto")
    may_pin = machine.num_cores == len(machine.cores) and wanted_to_pin <= len(spare)
    kv_bytes = min(AUTO_KV_MAX_BYTES, int(machine.memory_bytes * AUTO_KV_SHARE) // num_workers)
    resolved = []
    for pool, pool_threads, count in zip(pools, threads, wanted, strict=True):
        cpus = pool.cpus
        if cpus == "auto":
            cpus = tuple(spare[:count]) if may_pin else None
            spare = spare[count:]
        kv = kv_bytes if _wants_kv_bytes(pool) else pool.kv_memory
        resolved.append(pool.model_copy(update={"threads": pool_threads, "cpus": cpus, "kv_memory": kv}))
    return tuple(resolved)


def _wants_kv_bytes(pool: PoolSpec) -> bool:
    """On a GPU `auto` stays: what is left of gpu_memory_utilization beside the weights, which only the worker knows."""
    return pool.kv_memory == "auto" and pool.device == "cpu"


def _check_cores(pools: Sequence[PoolSpec], machine: Machine) -> None:
    for index, pool in enumerate(pools):
        missing = [cpu for cpu in pool.cpus or () if cpu != "auto" and cpu not in machine.cores]
        if isinstance(pool.cpus, tuple) and missing:
            have = ", ".join(map(str, machine.cores))
            raise SpecError(f"pools[{index}].cpus has {missing[0]}; this machine has the cores {have}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """One worker to start: its options, its engine's options by name, its cores, and what Ray sets aside for it."""

    options: WorkerOptions
    engine: Mapping[str, Any]  # keyword arguments of engine.options.EngineOptions
    cpus: tuple[int, ...]  # of the worker's own process, which leads the others; empty: not pinned
    num_cpus: float
    num_gpus: float
    resources: Mapping[str, float]
    model: str  # of the spec's `served`

    @property
    def name(self) -> str:
        return self.options.name

    @property
    def bundle(self) -> dict[str, float]:
        """What Ray sets aside for it, by Ray's names."""
        wanted = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        return {name: amount for name, amount in wanted.items() if amount > 0}

    @property
    def wants(self) -> str:
        """What it waits for before it is started, for people."""
        amounts = ", ".join(f"{what} {amount:g}" for what, amount in self.bundle.items())
        return f"wants {amounts} of Ray" if amounts else ""


def workers_of(spec: ClusterSpec) -> list[WorkerPlan]:
    """One plan for each worker of a resolved spec, in the order of the spec."""
    return [_plan(spec, pool, i) for pool in spec.pools for i in range(pool.replicas)]


def plan_of(spec: ClusterSpec, name: str) -> WorkerPlan:
    """Of any worker of its pools, also of one more than they have: cores to pin it to are shared out then."""
    label, _, index = name.rpartition("-")
    return _plan(spec, next(pool for pool in spec.pools if pool.label == label), int(index))


def _plan(spec: ClusterSpec, pool: PoolSpec, index: int) -> WorkerPlan:
    is_on_gpu = pool.device == "cuda"
    assert "auto" not in (pool.threads, pool.cpus, pool.device), "the spec is not resolved"
    assert is_on_gpu or pool.kv_memory != "auto", "the spec is not resolved"
    cpus = pool.cpus if isinstance(pool.cpus, tuple) else ()
    per_worker = len(cpus) // pool.replicas
    own = cpus[index * per_worker : (index + 1) * per_worker] if index < pool.replicas else ()
    ranks = _shares(own, pool.processes)
    model = spec.served[pool.model]
    return WorkerPlan(
        options=_options(spec, pool, index),
        engine={
            **model.knobs(EngineOptions),
            **pool.knobs(EngineOptions),
            "model": model.model,
            "kv_bytes": None if pool.kv_memory == "auto" else pool.kv_memory,
            "threads": pool.threads,
            "device": pool.device,
            "rank_cpus": tuple(ranks) if ranks[0] and len(ranks) > 1 else (),
            "speculative_model": getattr(pool.policy, "speculative_model", ""),
            **(_gpu_options(spec, pool) if is_on_gpu else {}),
        },
        cpus=ranks[0],
        num_cpus=pool.num_cpus,
        num_gpus=pool.num_gpus,
        resources=pool.resources,
        model=pool.model,
    )


def _shares(cpus: tuple[int, ...], ranks: int) -> list[tuple[int, ...]]:
    """A worker's cores, for each of its processes; the first is the leader."""
    each = len(cpus) // ranks
    return [cpus[rank * each : (rank + 1) * each] for rank in range(ranks)]


def _gpu_options(spec: ClusterSpec, pool: PoolSpec) -> dict[str, Any]:
    batch = getattr(pool.policy, "max_batch_size", None)  # where the role decodes
    graphs = {} if batch is None else {"max_graph_batch": batch}
    alike = [other.policy for other in spec.pools if other.model == pool.model]  # a worker may come to have their role
    steps = {"max_step_tokens": max(getattr(policy, "max_batch_tokens", 0) for policy in alike)}
    return {"gpu_memory_utilization": pool.gpu_memory_utilization, **steps, **graphs}


def _options(spec: ClusterSpec, pool: PoolSpec, index: int) -> WorkerOptions:
    others = [other for other in spec.pools if other.role != pool.role and other.model == pool.model]
    elsewhere = {other.role: given_knobs(other.policy) for other in others}
    quantization = spec.served[pool.model].knobs(EngineOptions)["quantization"]
    return WorkerOptions(
        name=f"{pool.label}-{index}",
        role=pool.role,
        policy=pool.policy,
        transfer=spec.transfer.options(TransferOptions),
        elsewhere=elsewhere,
        tls=spec.tls.files if spec.tls else None,
        tensor_parallel=pool.tensor_parallel,
        pipeline_parallel=pool.pipeline_parallel,
        threads=0 if pool.device == "cuda" else int(pool.threads),
        quantization="" if quantization == "none" else quantization,
        kv_dtype="" if pool.kv_dtype == "auto" else pool.kv_dtype,
        **pool.knobs(WorkerOptions),
    )
