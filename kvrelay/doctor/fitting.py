"""Whether a spec fits where it is to run: cores, memory, ports, and what a Ray that is joined has.

Pure, but for `ports` and `usage_database`, which try them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cluster.spec.errors import SpecError
from cluster.spec.model import ClusterSpec, ModelSpec
from cluster.spec.resolve import Machine, WorkerPlan, resolve, workers_of
from cluster.usage.accounting import open_database
from cluster.usage.database import DatabaseError
from cluster.usage.options import UsageOptions, UsageUrl
from engine.pages.host_memory import FreeMemory
from kvrelay.doctor.finding import Finding
from kvrelay.doctor.ports import why_taken
from placement.catalogs.base import PlanError
from placement.latency.model_files import load_shape

PART = "spec"
PROCESS_BYTES = 400 << 20  # of a worker or router beside weights and pages: Python, torch and the libraries
NEARLY = 0.9  # of what is free
GIB = 1 << 30


def fits(spec: ClusterSpec, machine: Machine, free: FreeMemory, shm_bytes: int, ray_bytes: int) -> Iterator[Finding]:
    """On this one machine. `ray_bytes`: of shared memory that Ray sets aside."""
    try:
        resolved = resolve(spec, machine)
    except SpecError as error:
        yield Finding(part=PART, name="spec", verdict="bad", found=str(error), mend="change the spec as it says")
        return
    for served in spec.served.values():
        yield model_is_there(served.model)
    if resolved.pools[0].device == "cpu":
        yield cores(workers_of(resolved), machine.num_cores)
        yield memory(resolved, free)
    yield shared_memory(shm_bytes, ray_bytes)


def model_is_there(model: str) -> Finding:
    path = Path(model).expanduser()
    if path.is_dir():
        if (path / "config.json").is_file():
            return Finding(part=PART, name="model", verdict="good", found=model)
        mend = "give a Hugging Face model directory"
        return Finding(part=PART, name="model", verdict="bad", found=f"{model} has no config.json", mend=mend)
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        mend = "give a directory that is there, or a hub id"
        return Finding(part=PART, name="model", verdict="bad", found=f"there is no directory {model}", mend=mend)
    found = f"{model} is taken from the hub, or its cache, when a worker starts"
    return Finding(part=PART, name="model", verdict="unknown", found=found)


def cores(plans: Sequence[WorkerPlan], have: int) -> Finding:
    wanted = sum(int(plan.engine["threads"]) * plan.options.num_processes for plan in plans)
    found = f"{wanted} threads for {have} cores"
    if wanted > have:
        mend = "lower threads or replicas: workers that share cores are slower together than fewer ones alone"
        return Finding(part=PART, name="cores", verdict="doubtful", found=found, mend=mend)
    return Finding(part=PART, name="cores", verdict="good", found=found)


def _weight_bytes(served: ClusterSpec | ModelSpec) -> int:
    return int(load_shape(served.model).with_dtype(served.dtype).weight_bytes)


def memory(spec: ClusterSpec, free: FreeMemory) -> Finding:
    """Of a resolved spec, on CPUs."""
    plans = workers_of(spec)
    pages = sum(int(plan.engine["kv_bytes"]) for plan in plans)
    processes = sum(plan.options.num_processes for plan in plans) + spec.router.replicas
    try:
        weights = sum(_weight_bytes(spec.served[plan.model]) for plan in plans)
    except PlanError:
        weights = None
    wanted = pages + processes * PROCESS_BYTES + (weights or 0)
    parts = "weights unknown" if weights is None else f"{weights / GIB:.1f} of weights"
    found = f"{wanted / GIB:.1f} GiB wanted ({parts}, {pages / GIB:.1f} of pages), "
    found += f"{free.num_bytes / GIB:.1f} free {free.where}"
    if wanted > free.num_bytes:
        mend = "lower kv_memory or replicas, or free memory: a worker that does not get it does not start"
        return Finding(part=PART, name="memory", verdict="bad", found=found, mend=mend)
    if wanted > NEARLY * free.num_bytes:
        mend = "lower kv_memory: what else grows here may have workers killed"
        return Finding(part=PART, name="memory", verdict="doubtful", found=found, mend=mend)
    return Finding(part=PART, name="memory", verdict="good" if weights is not None else "unknown", found=found)


def shared_memory(have_bytes: int, ray_bytes: int) -> Finding:
    """KV goes through memory of its own, and not through /dev/shm; Ray's object store does, and NCCL between processes
    of a host."""
    found = f"/dev/shm has {have_bytes / (1 << 20):.0f} MiB, Ray sets {ray_bytes / (1 << 20):.0f} aside"
    if have_bytes < ray_bytes:
        mend = "docker run --shm-size=1g, or mount a larger one: Ray starts slowly with its store on disk"
        return Finding(part=PART, name="shared memory", verdict="doubtful", found=found, mend=mend)
    return Finding(part=PART, name="shared memory", verdict="good", found=found)


def ports(spec: ClusterSpec) -> Iterator[Finding]:
    """Those that the spec names, at the address where the first router listens."""
    host = "127.0.0.1" if spec.router.host == "auto" else spec.router.host
    if why := why_taken(host, 0):
        mend = "give another, one of this machine"
        yield Finding(part=PART, name="router.host", verdict="bad", found=f"{host}: {why}", mend=mend)
        return
    for key in ("port", "http_port", "metrics_port"):
        first = getattr(spec.router, key)
        if not isinstance(first, int) or not first:
            continue
        tried = {port: why_taken(host, port) for port in range(first, first + spec.router.replicas)}
        name, taken = f"router.{key}", next(((port, why) for port, why in tried.items() if why), None)
        if taken is None:
            yield Finding(part=PART, name=name, verdict="good", found=", ".join(f"{host}:{port}" for port in tried))
        else:
            found = f"{host}:{taken[0]}: {taken[1]}"
            yield Finding(part=PART, name=name, verdict="bad", found=found, mend="give another, or 0 for any free one")


def usage_database(spec: ClusterSpec) -> Iterator[Finding]:
    """One that is elsewhere: from this machine it can be reached and written."""
    place, name = spec.router.options(UsageOptions).place(spec.name), "router.usage_db"
    if not isinstance(place, UsageUrl):
        return
    try:
        database = open_database(place)
        database.store(())
        database.close()
        yield Finding(part=PART, name=name, verdict="good", found=database.name)
    except DatabaseError as error:
        mend = "a router keeps what is used in its ledger until it can; see docs/accounts.md"
        yield Finding(part=PART, name=name, verdict="doubtful", found=str(error), mend=mend)


def ray_resources(
    nodes: Sequence[Mapping[str, float]], free: Mapping[str, float], wanted: Mapping[str, Mapping[str, float]]
) -> Finding:
    """`nodes`: what each has in all; `free`: of all of them, now; `wanted`: by worker. Placed as Ray would, largest
    first, on whatever node has room."""
    left = [dict(node) for node in nodes]
    for worker, bundle in sorted(wanted.items(), key=lambda item: -sum(item[1].values())):
        node = next((each for each in left if all(each.get(what, 0.0) >= n for what, n in bundle.items())), None)
        if node is None:
            asks = ", ".join(f"{what} {amount:g}" for what, amount in bundle.items())
            mend = "add nodes with these resources, or lower num_cpus, num_gpus, resources or replicas"
            found = f"no node has {asks} left for {worker}"
            return Finding(part="Ray", name="resources", verdict="bad", found=found, mend=mend)
        for what, amount in bundle.items():
            node[what] -= amount
    total: dict[str, float] = {}
    for bundle in wanted.values():
        for what, amount in bundle.items():
            total[what] = total.get(what, 0.0) + amount
    told = ", ".join(f"{what} {amount:g} of {free.get(what, 0.0):g} free" for what, amount in total.items())
    if any(free.get(what, 0.0) < amount for what, amount in total.items()):
        mend = "end what else runs in this Ray, or workers wait for it"
        return Finding(part="Ray", name="resources", verdict="doubtful", found=told, mend=mend)
    return Finding(
        part="Ray", name="resources", verdict="good", found=f"{len(nodes)} nodes: {told or 'nothing is asked'}"
    )
