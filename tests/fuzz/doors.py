"""What comes in from outside, met with messes: each case is refused clearly or served, and the door goes on.

A target is a name and a way to play one seed; what must not happen raises Unclear. `python -m bench.fuzz` plays them
for as long as one likes; what it finds is kept as a seed in corpus.json, which the tests play.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import yaml
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from cluster.deploy.local import SECRET, LocalCluster
from cluster.spec.errors import SpecError
from cluster.spec.load import load_spec
from kvrelay.client import AsyncClient
from kvrelay.v1 import cluster_pb2, generate_pb2, worker_pb2
from placement.workload.requests import read_request_list
from placement.workload.traces import WorkloadError, read_trace
from tests.fuzz import mess
from worker.wire.rpc import SECRET_KEY

CASE_S = 5.0  # a call may take so long before the client leaves
UNCLEAR = frozenset((grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN))
OF_GRPC = (  # on streams between workers: our own write after the refusal, and bytes that are no message
    "Internal error from Core",
    "Error parsing message",
)
SETTLED_S = 30.0
PUBLIC: dict[str, type[Message]] = {
    f"/{service.full_name}/{method.name}": GetMessageClass(method.input_type)
    for file in (generate_pb2, cluster_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
SPEC = {
    "name": "c",
    "model": "./model",
    "ready_timeout_s": 60,
    "router": {"port": 0, "replicas": 2, "max_queued_requests": 10, "overcommit": 0.5},
    "pools": [
        {"role": "prefill", "replicas": 2, "max_batch_tokens": 512},
        {"role": "decode", "replicas": 1, "max_batch_size": 8},
    ],
    "transfer": {"transports": ["shared_memory"], "lease_ttl_s": 10},
}
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:17:0{i}.9799600,{100 + i},{10 + i}\n" for i in range(9)
)
MOONCAKE = "".join(
    json.dumps({"timestamp": 1000 * i, "input_length": 600, "output_length": 5, "hash_ids": [0, i]}) + "\n"
    for i in range(9)
)
LISTED = json.dumps({"reqs": [[0.5 * i, 100, 10] for i in range(9)]})


class Unclear(AssertionError):
    """A door that fails, hangs or says nothing of use."""


# files


def spec_file(seed: int) -> str:
    chance = random.Random(seed)
    good = yaml.safe_dump(SPEC)
    text = mess.text(good, chance) if seed % 4 == 0 else yaml.safe_dump(mess.document(SPEC, chance)).encode()
    return _read(load_spec, text, "cluster.yaml", SpecError)


def trace_file(seed: int) -> str:
    chance = random.Random(seed)
    good, name, read = chance.choice(
        ((AZURE, "t.csv", read_trace), (MOONCAKE, "t.jsonl", read_trace), (LISTED, "t.json", read_request_list))
    )
    return _read(read, mess.text(good, chance), name, WorkloadError)


def _read(read: Callable[[Path], object], text: bytes, name: str, refused: type[Exception]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(text)
        try:
            read(path)
        except refused as error:
            if not str(error) or "Traceback" in str(error):
                raise Unclear(f"a refusal without a sentence: {error!r}") from None
            return "refused"
        except Exception as error:
            raise Unclear(f"{type(error).__name__}: {error}") from error
    return "served"


# services, of a cluster that runs


class Doors:
    """The services of one cluster. Every method plays one seed and says which code came."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster

    async def check(self) -> None:
        """After a while of it: nothing is held, and a request is served as ever."""
        await self._cluster.settled(SETTLED_S)
        self._cluster.check_invariants()
        for worker in self._cluster.workers:
            if worker._step_loop is None or worker._step_loop.done():
                raise Unclear(f"the step loop of {worker.options.name} has ended")
        async with AsyncClient(self._cluster.endpoint) as client, asyncio.timeout(SETTLED_S):
            for worker in self._cluster.workers:  # which messages may have drained, or given another role
                await client.drain(worker.options.name, undo=True)
                await client.set_role(worker.options.name, worker.options.name.partition("-")[0], force=True)
            answer = await client.generate([5, 6, 7], max_tokens=2, ignore_eos=True)
        if len(answer.token_ids) != 2:
            raise Unclear(f"a good request got {answer}")

    async def front(self, seed: int) -> str:
        chance = random.Random(seed)
        path = chance.choice(list(PUBLIC))
        good = mess.message(PUBLIC[path], chance, 0.4)
        body = mess.noise(chance, good.SerializeToString()) if seed % 3 == 0 else good.SerializeToString()
        return await self._call(self._cluster.endpoint, path, [body], ())

    async def worker(self, seed: int) -> str:
        """A router that has the secret and no sense."""
        chance = random.Random(seed)
        worker = chance.choice(self._cluster.workers)
        hello = worker_pb2.RouterMessage(hello=worker_pb2.RouterHello(router_id=f"fuzz-{seed}", protocol_version=1))
        return await self._stream("/kvrelay.v1.Worker/Connect", worker, hello, worker_pb2.RouterMessage, chance)

    async def handoff(self, seed: int) -> str:
        """A prefill worker that has the secret and no sense."""
        chance = random.Random(seed)
        worker = chance.choice(self._cluster.decode)
        theirs = mess.message(worker_pb2.HandoffHello, chance, 0.8)
        if chance.random() < 0.7:
            theirs = _good_hello(worker)
        hello = worker_pb2.PrefillMessage(hello=theirs)
        return await self._stream("/kvrelay.v1.Handoff/Connect", worker, hello, worker_pb2.PrefillMessage, chance)

    async def stranger(self, seed: int) -> str:
        """Whoever has no secret, or another."""
        chance = random.Random(seed)
        path = chance.choice(("/kvrelay.v1.Worker/Connect", "/kvrelay.v1.Handoff/Connect"))
        worker = chance.choice(self._cluster.decode)
        key = chance.choice((SECRET_KEY, "authorization", "x", f"{SECRET_KEY}-bin"))
        value = chance.choice(("", "a", SECRET[:-1], SECRET + " ", "x" * 4000))
        metadata = ((key, value.encode() if key.endswith("-bin") else value),)
        code = await self._call(worker.address.address, path, [chance.randbytes(30)], metadata, stream=True)
        if code not in ("UNAUTHENTICATED", "RESOURCE_EXHAUSTED"):  # the second: gRPC's own limit of metadata
            raise Unclear(f"a stranger got {code}")
        return code

    async def _stream(self, path: str, worker: Any, hello: Any, kind: Any, chance: random.Random) -> str:
        bodies = [hello.SerializeToString()] if chance.random() < 0.9 else []
        for _ in range(chance.randint(1, 8)):
            good = mess.message(kind, chance, 0.6)
            as_noise = chance.random() < 0.1
            bodies.append(mess.noise(chance, good.SerializeToString()) if as_noise else good.SerializeToString())
        return await self._call(worker.address.address, path, bodies, ((SECRET_KEY, SECRET),), stream=True)

    async def _call(
        self, address: str, path: str, bodies: Sequence[bytes], metadata: Any, *, stream: bool = False
    ) -> str:
        async with grpc.aio.insecure_channel(address) as channel:
            if stream:
                call: Any = channel.stream_stream(path)(iter(bodies), metadata=metadata, timeout=CASE_S)
            else:
                call = channel.unary_stream(path)(bodies[0], metadata=metadata, timeout=CASE_S)
            try:
                async with asyncio.timeout(4 * CASE_S):
                    async for _ in call:
                        pass
                    code = await call.code()
            except grpc.aio.AioRpcError as error:
                code = error.code()
                if not error.details():
                    raise Unclear(f"{path}: {code.name} without a sentence") from None
                if code in UNCLEAR and not any(said in (error.details() or "") for said in OF_GRPC):
                    raise Unclear(f"{path}: {code.name}: {error.details()}") from None
            except TimeoutError:
                raise Unclear(f"{path} goes on after its deadline") from None
        return str(code.name)


def _good_hello(worker: Any) -> worker_pb2.HandoffHello:
    from kv_transfer.handshake import make_hello

    me = worker_pb2.WorkerAddress(name="prefill-9", address="127.0.0.1:1", incarnation="z")
    info = worker.engine.info
    return make_hello(me, info.fingerprint, worker.engine.layout, ["shared_memory"])


SERVICES = ("front", "worker", "handoff", "stranger")
FILES: dict[str, Callable[[int], str]] = {"spec": spec_file, "trace": trace_file}


async def play(doors: Doors, target: str, seeds: Sequence[int], outcomes: Counter[str]) -> list[tuple[int, str]]:
    """What was unclear, by seed."""
    unclear = []
    for seed in seeds:
        try:
            outcomes[await getattr(doors, target)(seed)] += 1
        except Unclear as error:
            unclear.append((seed, str(error)))
    return unclear
