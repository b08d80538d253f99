"""The Python client: `Client` for plain code, `AsyncClient` for asyncio. Both speak gRPC to one router.

    client = Client("127.0.0.1:50051")
    client.wait_ready(timeout_s=60)
    print(client.generate("Once upon a time", max_tokens=32).text)

    with client.stream("Once upon a time", max_tokens=32, temperature=0.7, seed=1) as deltas:
        for delta in deltas:
            print(delta.text, end="", flush=True)
    print(deltas.completion().usage)

Owns one channel. No gRPC type leaves it, and `KvrelayError` is the only exception. It never retries a request: the
server does that inside, and what the server gives up on is for the caller to decide.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from ipaddress import IPv6Address
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvrelay.client.access import Access, FoundAccess, find_access
from kvrelay.client.adapters import AdapterInfo, adapters_from
from kvrelay.client.failures import cancelled_error, raise_kvrelay
from kvrelay.client.messages import (
    build_request,
    completion_from,
    explained_from,
    load_from,
    model_from,
    pending_from,
    pool_from,
    status_from,
)
from kvrelay.client.specs import RunningSpec, SpecChange, changes_from, running_from
from kvrelay.client.streams import AsyncStream, Stream
from kvrelay.client.traces import trace_metadata
from kvrelay.client.types import (
    ClusterStatus,
    Completion,
    ExplainedRequest,
    GenerateOptions,
    KvrelayError,
    PendingWorker,
    PoolState,
    RouterLoad,
    ServedModel,
)
from kvrelay.client.usage import Usage, usage_from
from kvrelay.v1 import cluster_pb2, cluster_pb2_grpc, generate_pb2, generate_pb2_grpc
from worker.wire.credentials import channel_credentials
from worker.wire.rpc import channel_options, open_channel
from worker.wire.tls import TlsError, TlsFiles
from worker.wire.tokens import TokenError

DEFAULT_ENDPOINT = "127.0.0.1:50051"
SERVICE = "kvrelay.v1.Generate"
_RETRY_WAIT_S = 0.1  # between two Watch calls that ended at once
_CALL_TIMEOUT_S = 30.0  # of the small questions: tokenize, model_info, status
_FOREVER_S = 1e9  # what is longer would overflow in gRPC, and be over at once


class Client:
    """A router's client. Safe to share between threads. Raises KvrelayError for everything that goes wrong.

    endpoint: "host:port". token: who calls; None: KVRELAY_TOKEN, KVRELAY_TOKENS_FILE, or that of the cluster which was
    started from here. tls: certificates and authorities, True for public ones; None: KVRELAY_TLS_CA and its like, or as
    the cluster has it that was started from here. Files are read now: a renewed certificate wants a new client.
    """

    def __init__(
        self, endpoint: str = DEFAULT_ENDPOINT, *, token: str | None = None, tls: TlsFiles | bool | None = None
    ) -> None:
        self.endpoint = _checked(endpoint)
        with _told():
            access = find_access(endpoint, Access(token=token, tls=tls))
            self._channel = _channel(access)
        self._metadata = access.metadata
        self._stub = _stub(generate_pb2_grpc.GenerateStub, self._channel)

    def generate(
        self, prompt: str | Sequence[int], *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """The whole answer at once. `prompt` is text or token ids; options as in GenerateOptions.

        timeout_s: the request's deadline. When it passes, the server drops the request and gives its memory back.
        """
        request = build_request(prompt, options)
        return completion_from(self._call(self._stub.GenerateOnce, request, timeout_s))

    def stream(
        self, prompt: str | Sequence[int], *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Stream:
        """The answer as it is generated: iterate over the deltas. Same arguments as `generate`."""
        return self.send(build_request(prompt, options), timeout_s=timeout_s)

    def send(self, request: generate_pb2.GenerateRequest, *, timeout_s: float | None = None) -> Stream:
        """`stream` for a request that was built before, with kvrelay.client.messages.build_request."""
        opened_s = time.perf_counter()
        call = self._stub.Generate(request, timeout=_grpc_s(timeout_s), metadata=self._metadata + trace_metadata())
        return Stream(call, self.endpoint, opened_s)

    def tokenize(self, text: str, *, model: str = "") -> list[int]:
        """The token ids that the server would make of `text`."""
        request = generate_pb2.TokenizeRequest(model=model, text=text)
        return list(self._call(self._stub.Tokenize, request, _CALL_TIMEOUT_S).ids)

    def model_info(self, model: str = "") -> ServedModel:
        """What is served: name, vocabulary, longest sequence."""
        request = generate_pb2.GetModelInfoRequest(model=model)
        return model_from(self._call(self._stub.GetModelInfo, request, _CALL_TIMEOUT_S))

    def status(self, *, timeout_s: float = _CALL_TIMEOUT_S) -> ClusterStatus:
        """The router's view of itself and of every worker."""
        stub = _stub(cluster_pb2_grpc.ClusterStub, self._channel)
        return status_from(self._call(stub.GetStatus, cluster_pb2.GetStatusRequest(), timeout_s))

    def drain(self, worker: str, *, undo: bool = False, force: bool = False, remove: bool = False) -> None:
        """Have a worker take nothing new and be left by what it decodes, or take it back; `status` says how far it is.
        With `remove` it is ended then, and its pool is one smaller.

        Raises KvrelayError: NOT_FOUND, PERMISSION_DENIED, FAILED_PRECONDITION for the only one of its kind unless
        forced.
        """
        stub = _stub(cluster_pb2_grpc.ClusterStub, self._channel)
        request = cluster_pb2.DrainRequest(worker=worker, undo=undo, force=force, remove=remove)
        self._call(stub.Drain, request, _CALL_TIMEOUT_S)

    def scale(
        self, pool: str, replicas: int = 0, *, force: bool = False, look: bool = False
    ) -> tuple[PendingWorker, ...]:
        """Have a pool of so many workers. Returns those that are on their way: none once it has them. With `look` it
        changes nothing, and says how far they are.

        Raises KvrelayError as `drain` does, and UNIMPLEMENTED where nobody keeps the workers.
        """
        stub = _stub(cluster_pb2_grpc.ClusterStub, self._channel)
        request = cluster_pb2.ScaleRequest(pool=pool, replicas=replicas, force=force, look=look)
        return pending_from(self._call(stub.Scale, request, _CALL_TIMEOUT_S))

    def pool(self, pool: str) -> PoolState:
        """How many workers a pool shall have, and those that are on their way. Raises KvrelayError as `scale` does."""
        stub = _stub(cluster_pb2_grpc.ClusterStub, self._channel)
        request = cluster_pb2.ScaleRequest(pool=pool, look=True)
        return pool_from(self._call(stub.Scale, request, _CALL_TIMEOUT_S))

    def set_role(self, worker: str, role: str, chunk_tokens: int | None = None, *, force: bool = False) -> None:
        """Drain a worker and have it be a `prefill`, `decode` or `mixed` worker then; `status` says when it is.

        `chunk_tokens`: of prompts that a mixed worker computes in a step that decodes, too; one that is mixed already
        is not drained for it. Raises KvrelayError as `drain` does, and INVALID_ARGUMENT for another role.
        """
        stub = _stub(cluster_pb2_grpc.ClusterStub, self._channel)
        request = cluster_pb2.SetRoleRequest(worker=worker, role=role, chunk_tokens=chunk_tokens, force=force)
        self._call(stub.SetRole, request, _CALL_TIMEOUT_S)

    def spec(self) -> RunningSpec:
        """What the cluster runs with, where each value comes from, and how far a change of it is. Raises KvrelayError
        as `scale` does."""
        stub = _stub(cluster_pb2_grpc.ClusterStub, self._channel)
        return running_from(self._call(stub.GetSpec, cluster_pb2.GetSpecRequest(), _CALL_TIMEOUT_S))

    def apply_spec(
        self, spec: str, sources: Mapping[str, str], *, dry_run: bool = False, max_surge: int | None = None
    ) -> tuple[SpecChange, ...]:
        """Have the cluster run with this spec, as JSON, and return what that changes; `spec` says how far it is.
        `sources`: where its values come from, by key. `max_surge`: workers that a pool may have beyond its size while
        others are replaced, 0 or 1; None: 1 where there is room. Raises KvrelayError as `scale` does, and
        FAILED_PRECONDITION for a spec that the cluster cannot run with: then nothing has changed."""
        stub = _stub(cluster_pb2_grpc.ClusterStub, self._channel)
        request = cluster_pb2.ApplySpecRequest(spec=spec, sources=sources, dry_run=dry_run, max_surge=max_surge)
        return changes_from(self._call(stub.ApplySpec, request, _CALL_TIMEOUT_S))

    def adapters(self, timeout_s: float = _CALL_TIMEOUT_S) -> tuple[AdapterInfo, ...]:
        """The LoRA adapters that requests may name. Raises KvrelayError as `drain` does."""
        stub = _stub(cluster_pb2_grpc.ClusterStub, self._channel)
        return adapters_from(self._call(stub.ListAdapters, cluster_pb2.ListAdaptersRequest(), timeout_s))

    def set_adapters(self, *, add: Mapping[str, str], remove: Sequence[str] = ()) -> None:
        """Have requests name these, directories by name, and those not any more; or nothing changes. Raises
        KvrelayError as `scale` does, and FAILED_PRECONDITION for one that cannot be."""
        stub = _stub(cluster_pb2_grpc.ClusterStub, self._channel)
        self._call(stub.SetAdapters, cluster_pb2.SetAdaptersRequest(add=add, remove=remove), _CALL_TIMEOUT_S)

    def roll(self, *pools: str, max_surge: int | None = None) -> None:
        """Have the workers of these pools, or of all, replaced one after another, with nothing lost; `spec` says how
        far it is. Raises KvrelayError as `scale` does."""
        stub = _stub(cluster_pb2_grpc.ClusterStub, self._channel)
        self._call(stub.RollPools, cluster_pb2.RollPoolsRequest(pools=pools, max_surge=max_surge), _CALL_TIMEOUT_S)

    def load(self, window_s: float = 0.0) -> RouterLoad:
        """The requests that ended lately at this router, of those that came in the last so many seconds; 0: all that
        it keeps. Raises KvrelayError as `drain` does."""
        stub = _stub(cluster_pb2_grpc.ClusterStub, self._channel)
        return load_from(self._call(stub.GetLoad, cluster_pb2.GetLoadRequest(window_s=window_s), _CALL_TIMEOUT_S))

    def explain(self, request_id: str) -> tuple[ExplainedRequest, ...]:
        """Where the time of a request went, by its id, of each of its choices. Raises KvrelayError: NOT_FOUND where
        this router keeps nothing of it, or it is another client's."""
        stub = _stub(cluster_pb2_grpc.ClusterStub, self._channel)
        request = cluster_pb2.ExplainRequest(request_id=request_id)
        return explained_from(self._call(stub.Explain, request, _CALL_TIMEOUT_S).choices)

    def slow(self, last: int = 0) -> tuple[ExplainedRequest, ...]:
        """The last slow requests, and those that failed, the newest first; 0: all that are kept."""
        stub = _stub(cluster_pb2_grpc.ClusterStub, self._channel)
        return explained_from(
            self._call(stub.ListSlow, cluster_pb2.ListSlowRequest(last=last), _CALL_TIMEOUT_S).requests
        )

    def usage(self, since_s: float = 0.0, until_s: float = 0.0) -> Usage:
        """What each key used, by the hour, of every hour that has a part in this time, in seconds since 1970; 0: no
        begin, no end. Operators are told of all keys, others of their own. Raises KvrelayError: FAILED_PRECONDITION
        where nothing is counted."""
        stub = _stub(cluster_pb2_grpc.ClusterStub, self._channel)
        request = cluster_pb2.GetUsageRequest(since_s=since_s, until_s=until_s)
        return usage_from(self._call(stub.GetUsage, request, _CALL_TIMEOUT_S))

    def note_decision(self, by: str, what: str, reason: str, *, acted: bool) -> None:
        """Have this router show a decision, beside its own, to who watches."""
        stub = _stub(cluster_pb2_grpc.ClusterStub, self._channel)
        request = cluster_pb2.NoteDecisionRequest(by=by, what=what, reason=reason, acted=acted)
        self._call(stub.NoteDecision, request, _CALL_TIMEOUT_S)

    def wait_ready(self, timeout_s: float) -> None:
        """Return once the server says that it can serve; it may be started after this call.

        Raises KvrelayError DEADLINE_EXCEEDED when it does not within `timeout_s`.
        """
        stub = _stub(health_pb2_grpc.HealthStub, self._channel)
        deadline_s = time.monotonic() + timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            request = health_pb2.HealthCheckRequest(service=SERVICE)
            watch = stub.Watch(request, timeout=_grpc_s(left_s), wait_for_ready=True)
            try:
                for answer in watch:
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            except grpc.RpcError as error:
                if not _may_become_ready(error):
                    raise_kvrelay(error, self.endpoint)
            finally:
                watch.cancel()
            time.sleep(min(_RETRY_WAIT_S, max(0.0, deadline_s - time.monotonic())))
        raise _not_ready(self.endpoint, timeout_s)

    def close(self) -> None:
        """Cancels what runs and closes the connection."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _call(self, method: Any, request: Any, timeout_s: float | None) -> Any:
        try:
            return method(request, timeout=_grpc_s(timeout_s), metadata=self._metadata + trace_metadata())
        except grpc.RpcError as error:
            raise_kvrelay(error, self.endpoint)


class AsyncClient:
    """The same for asyncio. Make and use it inside one running event loop.

    Cancelling a task that awaits an answer cancels the request at the server.
    """

    def __init__(
        self, endpoint: str = DEFAULT_ENDPOINT, *, token: str | None = None, tls: TlsFiles | bool | None = None
    ) -> None:
        self.endpoint = _checked(endpoint)
        with _told():
            access = find_access(endpoint, Access(token=token, tls=tls))
            self._channel = open_channel(access.endpoint, access.tls)
        self._metadata = access.metadata
        self._stub = _stub(generate_pb2_grpc.GenerateStub, self._channel)

    async def generate(
        self, prompt: str | Sequence[int], *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """See Client.generate."""
        request = build_request(prompt, options)
        return completion_from(await self._call(self._stub.GenerateOnce, request, timeout_s))

    def stream(
        self, prompt: str | Sequence[int], *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncStream:
        """See Client.stream; not awaited itself: `async for delta in client.stream(...)`."""
        return self.send(build_request(prompt, options), timeout_s=timeout_s)

    def send(self, request: generate_pb2.GenerateRequest, *, timeout_s: float | None = None) -> AsyncStream:
        """`stream` for a request that was built before, with kvrelay.client.messages.build_request."""
        opened_s = time.perf_counter()
        call = self._stub.Generate(request, timeout=_grpc_s(timeout_s), metadata=self._metadata + trace_metadata())
        return AsyncStream(call, self.endpoint, opened_s)

    async def tokenize(self, text: str, *, model: str = "") -> list[int]:
        """See Client.tokenize."""
        request = generate_pb2.TokenizeRequest(model=model, text=text)
        return list((await self._call(self._stub.Tokenize, request, _CALL_TIMEOUT_S)).ids)

    async def model_info(self, model: str = "") -> ServedModel:
        """See Client.model_info."""
        request = generate_pb2.GetModelInfoRequest(model=model)
        return model_from(await self._call(self._stub.GetModelInfo, request, _CALL_TIMEOUT_S))

    async def status(self, *, timeout_s: float = _CALL_TIMEOUT_S) -> ClusterStatus:
        """See Client.status."""
        stub = _stub(cluster_pb2_grpc.ClusterStub, self._channel)
        return status_from(await self._call(stub.GetStatus, cluster_pb2.GetStatusRequest(), timeout_s))

    async def drain(self, worker: str, *, undo: bool = False, force: bool = False, remove: bool = False) -> None:
        """See Client.drain."""
        stub = _stub(cluster_pb2_grpc.ClusterStub, self._channel)
        request = cluster_pb2.DrainRequest(worker=worker, undo=undo, force=force, remove=remove)
        await self._call(stub.Drain, request, _CALL_TIMEOUT_S)

    async def scale(
        self, pool: str, replicas: int = 0, *, force: bool = False, look: bool = False
    ) -> tuple[PendingWorker, ...]:
        """See Client.scale."""
        stub = _stub(cluster_pb2_grpc.ClusterStub, self._channel)
        request = cluster_pb2.ScaleRequest(pool=pool, replicas=replicas, force=force, look=look)
        return pending_from(await self._call(stub.Scale, request, _CALL_TIMEOUT_S))

    async def pool(self, pool: str) -> PoolState:
        """See Client.pool."""
        stub = _stub(cluster_pb2_grpc.ClusterStub, self._channel)
        request = cluster_pb2.ScaleRequest(pool=pool, look=True)
        return pool_from(await self._call(stub.Scale, request, _CALL_TIMEOUT_S))

    async def set_role(self, worker: str, role: str, chunk_tokens: int | None = None, *, force: bool = False) -> None:
        """See Client.set_role."""
        stub = _stub(cluster_pb2_grpc.ClusterStub, self._channel)
        request = cluster_pb2.SetRoleRequest(worker=worker, role=role, chunk_tokens=chunk_tokens, force=force)
        await self._call(stub.SetRole, request, _CALL_TIMEOUT_S)

    async def spec(self) -> RunningSpec:
        """See Client.spec."""
        stub = _stub(cluster_pb2_grpc.ClusterStub, self._channel)
        return running_from(await self._call(stub.GetSpec, cluster_pb2.GetSpecRequest(), _CALL_TIMEOUT_S))

    async def apply_spec(
        self, spec: str, sources: Mapping[str, str], *, dry_run: bool = False, max_surge: int | None = None
    ) -> tuple[SpecChange, ...]:
        """See Client.apply_spec."""
        stub = _stub(cluster_pb2_grpc.ClusterStub, self._channel)
        request = cluster_pb2.ApplySpecRequest(spec=spec, sources=sources, dry_run=dry_run, max_surge=max_surge)
        return changes_from(await self._call(stub.ApplySpec, request, _CALL_TIMEOUT_S))

    async def adapters(self) -> tuple[AdapterInfo, ...]:
        """See Client.adapters."""
        stub = _stub(cluster_pb2_grpc.ClusterStub, self._channel)
        return adapters_from(await self._call(stub.ListAdapters, cluster_pb2.ListAdaptersRequest(), _CALL_TIMEOUT_S))

    async def set_adapters(self, *, add: Mapping[str, str], remove: Sequence[str] = ()) -> None:
        """See Client.set_adapters."""
        stub = _stub(cluster_pb2_grpc.ClusterStub, self._channel)
        request = cluster_pb2.SetAdaptersRequest(add=add, remove=remove)
        await self._call(stub.SetAdapters, request, _CALL_TIMEOUT_S)

    async def roll(self, *pools: str, max_surge: int | None = None) -> None:
        """See Client.roll."""
        stub = _stub(cluster_pb2_grpc.ClusterStub, self._channel)
        await self._call(
            stub.RollPools, cluster_pb2.RollPoolsRequest(pools=pools, max_surge=max_surge), _CALL_TIMEOUT_S
        )

    async def load(self, window_s: float = 0.0) -> RouterLoad:
        """See Client.load."""
        stub = _stub(cluster_pb2_grpc.ClusterStub, self._channel)
        return load_from(await self._call(stub.GetLoad, cluster_pb2.GetLoadRequest(window_s=window_s), _CALL_TIMEOUT_S))

    async def explain(self, request_id: str) -> tuple[ExplainedRequest, ...]:
        """See Client.explain."""
        stub = _stub(cluster_pb2_grpc.ClusterStub, self._channel)
        request = cluster_pb2.ExplainRequest(request_id=request_id)
        return explained_from((await self._call(stub.Explain, request, _CALL_TIMEOUT_S)).choices)

    async def slow(self, last: int = 0) -> tuple[ExplainedRequest, ...]:
        """See Client.slow."""
        stub = _stub(cluster_pb2_grpc.ClusterStub, self._channel)
        answer = await self._call(stub.ListSlow, cluster_pb2.ListSlowRequest(last=last), _CALL_TIMEOUT_S)
        return explained_from(answer.requests)

    async def wait_ready(self, timeout_s: float) -> None:
        """See Client.wait_ready."""
        stub = _stub(health_pb2_grpc.HealthStub, self._channel)
        deadline_s = time.monotonic() + timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            request = health_pb2.HealthCheckRequest(service=SERVICE)
            watch = stub.Watch(request, timeout=_grpc_s(left_s), wait_for_ready=True)
            try:
                async for answer in watch:
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            except grpc.RpcError as error:
                if not _may_become_ready(error):
                    raise_kvrelay(error, self.endpoint)
            finally:
                watch.cancel()
            await asyncio.sleep(min(_RETRY_WAIT_S, max(0.0, deadline_s - time.monotonic())))
        raise _not_ready(self.endpoint, timeout_s)

    async def close(self) -> None:
        """Cancels what runs and closes the connection."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def _call(self, method: Any, request: Any, timeout_s: float | None) -> Any:
        try:
            return await method(request, timeout=_grpc_s(timeout_s), metadata=self._metadata + trace_metadata())
        except grpc.RpcError as error:
            raise_kvrelay(error, self.endpoint)
        except asyncio.CancelledError as error:
            raise cancelled_error(error, self.endpoint) from None


@contextmanager
def _told() -> Iterator[None]:
    """A token or certificates that cannot be used, as the one error that leaves the client."""
    try:
        yield
    except (TokenError, TlsError) as error:
        raise KvrelayError("INVALID_ARGUMENT", str(error)) from None


def _channel(access: FoundAccess) -> grpc.Channel:
    options = channel_options(access.tls)
    if access.tls is None:
        return grpc.insecure_channel(access.endpoint, options=options)
    return grpc.secure_channel(access.endpoint, channel_credentials(access.tls), options=options)


def _stub(kind: Any, channel: Any) -> Any:
    """Generated stubs are untyped; this is where they enter."""
    return kind(channel)


def _checked(endpoint: str) -> str:
    host, _, port = endpoint.rpartition(":")
    is_url = host.lower().startswith(("http://", "https://"))  # gRPC would look for a host of that name
    if not host or is_url or not port.isdigit() or not 0 < int(port) < 65536:
        raise KvrelayError("INVALID_ARGUMENT", f"endpoint is {endpoint!r}; give host:port, such as {DEFAULT_ENDPOINT}")
    if _is_ipv6(host):
        raise KvrelayError("INVALID_ARGUMENT", f"endpoint is {endpoint!r}; give [{host}]:{port}")
    return endpoint


def _is_ipv6(host: str) -> bool:
    try:
        return IPv6Address(host).version == 6
    except ValueError:
        return False


def _grpc_s(timeout_s: float | None) -> float | None:
    return None if timeout_s is None or timeout_s > _FOREVER_S else timeout_s


def _may_become_ready(error: grpc.RpcError) -> bool:
    return error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


def _not_ready(endpoint: str, timeout_s: float) -> KvrelayError:
    return KvrelayError("DEADLINE_EXCEEDED", f"{endpoint} was not ready within {timeout_s:g} s")
