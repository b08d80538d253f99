"""All checks that need no cluster, of this machine and of a spec that is to run on it, or in a Ray that is joined."""

from __future__ import annotations

from collections.abc import Iterator

from cluster.spec.errors import SpecError
from cluster.spec.model import ClusterSpec
from cluster.spec.resolve import resolve, workers_of
from kvrelay.doctor import fitting, machine
from kvrelay.doctor.engine import engine, engine_facts
from kvrelay.doctor.finding import Finding
from kvrelay.doctor.reading import Host, read_host
from kvrelay.doctor.software import software


def static_checks(
    spec: ClusterSpec | None = None, *, address: str | None = None, is_serving: bool = False
) -> list[Finding]:
    """`address`: of the Ray that is joined. `is_serving`: a cluster runs here already; its memory, its ports and the
    time that it takes are its own."""
    from cluster.deploy.deployment import this_machine
    from cluster.deploy.own_ray.local_ray import OBJECT_STORE_BYTES

    host, here = read_host(), this_machine()
    wants_gpu = spec is not None and any(pool.device == "cuda" or pool.num_gpus for pool in spec.pools)
    findings = [*software(), *engine(engine_facts(), gpus=here.gpus, wants_gpu=wants_gpu and address is None)]
    findings += _of_machine(host, spec, here.gpus, is_serving=is_serving, is_joined=address is not None)
    if spec is None:
        return findings
    if address is not None:
        return [*findings, *_of_ray(spec, address)]
    findings += fitting.usage_database(spec)
    if not is_serving:
        findings += fitting.fits(spec, here, host.free, host.shm_bytes, OBJECT_STORE_BYTES)
        findings += fitting.ports(spec)
    return findings


def _of_machine(
    host: Host, spec: ClusterSpec | None, gpus: int, *, is_serving: bool, is_joined: bool
) -> Iterator[Finding]:
    workers = sum(pool.replicas for pool in spec.pools) if spec is not None else 0
    yield machine.cpu(host.cpu, host.flags, host.family_model)
    yield machine.open_files(*host.open_files, workers, is_joined=is_joined)
    yield machine.locked_memory(host.locked_bytes, gpus)
    yield machine.huge_pages(host.huge_pages)
    yield from machine.clock(host.clock_source, host.is_clock_set)
    yield machine.stolen_time(host.stolen)
    if not is_serving:
        yield machine.other_work(host.busy)


def _of_ray(spec: ClusterSpec, address: str) -> Iterator[Finding]:
    import ray

    from cluster.deploy.ray import DeployError, join_ray, node_host, quiet_stdout, why_apart

    try:
        with quiet_stdout():
            join_ray(address, spec.name)
    except DeployError as error:
        mend = "start one with `ray start --head`, or give another --address"
        yield Finding(part="Ray", name="Ray", verdict="bad", found=str(error).partition(";")[0], mend=mend)
        return
    try:
        plans = workers_of(resolve(spec, None, node_host=node_host()))
        if why := why_apart(ray.nodes()):
            found, _, mend = why.partition("; ")
            yield Finding(part="Ray", name="addresses", verdict="bad", found=found, mend=mend)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        yield Finding(part="Ray", name="Ray", verdict="good", found=f"{address}: {len(nodes)} nodes")
        bundles = {plan.name: plan.bundle for plan in plans}
        yield fitting.ray_resources(nodes, ray.available_resources(), bundles)
    except SpecError as error:
        yield Finding(part="spec", name="spec", verdict="bad", found=str(error), mend="change the spec as it says")
    finally:
        ray.shutdown()
