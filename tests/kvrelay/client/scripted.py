"""A server of the public API that answers from a script: for tests of the client and of the commands built on it.

What to do is written in the prompt: "fail CODE", "hang", "break CODE" (after two tokens), "say WORD ..." or anything
else, which is answered with max_tokens tokens, token i being 100 + i and its text "é<i> ". It runs in a thread with
its own event loop, so that plain and asyncio clients can both call it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvrelay.v1 import cluster_pb2, cluster_pb2_grpc, generate_pb2, generate_pb2_grpc

SERVICE = "kvrelay.v1.Generate"
VOCAB_SIZE = 1000
MAX_MODEL_LEN = 512
EOS = 2


class ScriptedServer(generate_pb2_grpc.GenerateServicer, cluster_pb2_grpc.ClusterServicer):
    """Starts in `with`; `endpoint` is where. Keeps what it was asked in `requests` and counts `cancelled`."""

    def __init__(self, *, ready: bool = True, answering: str = "") -> None:
        self.requests: list[generate_pb2.GenerateRequest] = []
        self.deadlines_s: list[float | None] = []
        self.hanging = threading.Event()  # a call waits for ever
        self.cancelled = threading.Event()  # a call was cancelled
        self.most_running = 0
        self._running = 0
        self._ready = ready
        self._answering = answering  # stands before every prompt
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._started = threading.Event()
        self._health = health.aio.HealthServicer()

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._server.stop(None), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def become_ready(self) -> None:
        setting = self._health.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
        asyncio.run_coroutine_threadsafe(setting, self._loop).result()

    def stop_abruptly(self) -> None:
        asyncio.run_coroutine_threadsafe(self._server.stop(None), self._loop).result()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._started.set()
        self._loop.run_forever()

    async def _start(self) -> None:
        self._server = grpc.aio.server()
        generate_pb2_grpc.add_GenerateServicer_to_server(self, self._server)
        cluster_pb2_grpc.add_ClusterServicer_to_server(self, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        status = health_pb2.HealthCheckResponse
        await self._health.set(SERVICE, status.SERVING if self._ready else status.NOT_SERVING)
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[generate_pb2.GenerateResponse]:
        self.requests.append(request)
        self.deadlines_s.append(context.time_remaining())
        self._running += 1
        self.most_running = max(self.most_running, self._running)
        try:
            async for message in self._answer(request, context):
                yield message
        except (asyncio.CancelledError, GeneratorExit):  # the second when gRPC was sending just then
            self.cancelled.set()
            raise
        finally:
            self._running -= 1

    async def _answer(self, request: Any, context: Any) -> AsyncIterator[generate_pb2.GenerateResponse]:
        verb, _, rest = (self._answering or request.text).partition(" ")
        if verb == "fail":
            await _abort(context, rest)
        if verb == "hang":
            yield _part(request, 0, [100], "first")
            self.hanging.set()
            await asyncio.Event().wait()
        if verb == "break":
            yield _part(request, 0, [100], "one ")
            yield _part(request, 0, [101], "two ")
            await _abort(context, rest)
        words = rest.split() if verb == "say" else [f"é{i} " for i in range(request.sampling.max_tokens or 16)]
        for index in range(request.sampling.n or 1):
            for i, word in enumerate(words):
                await asyncio.sleep(0)
                yield _part(request, index, [100 + i], word, last=i == len(words) - 1)
        yield _end(request, len(words) * (request.sampling.n or 1))

    async def GenerateOnce(self, request: Any, context: Any) -> generate_pb2.GenerateOnceResponse:
        self.requests.append(request)
        self.deadlines_s.append(context.time_remaining())
        answer = generate_pb2.GenerateOnceResponse()
        choices: dict[int, Any] = {}
        try:
            async for part in self._answer(request, context):
                choice = choices.setdefault(part.index, generate_pb2.Choice(index=part.index))
                choice.text += part.text
                choice.token_ids.extend(part.token_ids)
                choice.logprobs.extend(part.logprobs)
                choice.finish_reason = part.finish_reason or choice.finish_reason
                answer.MergeFrom(
                    generate_pb2.GenerateOnceResponse(
                        request_id=part.request_id,
                        usage=part.usage if part.HasField("usage") else None,
                        timeline=part.timeline if part.HasField("timeline") else None,
                        receipt=part.receipt if part.HasField("receipt") else None,
                        moved=part.moved,
                    )
                )
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        answer.choices.extend(choices.values())
        return answer

    async def Tokenize(self, request: Any, context: Any) -> generate_pb2.TokenizeResponse:
        return generate_pb2.TokenizeResponse(ids=list(request.text.encode()))

    async def GetModelInfo(self, request: Any, context: Any) -> generate_pb2.GetModelInfoResponse:
        return generate_pb2.GetModelInfoResponse(
            name="scripted",
            architecture="None",
            dtype="float32",
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN,
            num_params=7,
            eos_token_ids=[EOS],
            fingerprint="f",
        )

    async def GetStatus(self, request: Any, context: Any) -> cluster_pb2.GetStatusResponse:
        worker = cluster_pb2.WorkerStatus(name="decode-0", role="decode", state="ready", counters={"tokens": 3})
        return cluster_pb2.GetStatusResponse(
            router_id="r", model="scripted", workers=[worker], counters={"requests": 1}
        )


async def _abort(context: Any, code: str) -> None:
    trailers = (("retry-after-ms", "1500"),) if code == "RESOURCE_EXHAUSTED" else ()
    await context.abort(grpc.StatusCode[code], f"the script says {code}", trailers)


def _part(request: Any, index: int, ids: list[int], text: str, *, last: bool = False) -> Any:
    part = generate_pb2.GenerateResponse(request_id=request.request_id or "r-1", index=index, text=text, token_ids=ids)
    if last:
        part.finish_reason = generate_pb2.FINISH_REASON_LENGTH
    if request.sampling.HasField("logprobs"):
        chosen = generate_pb2.TokenLogprob(token_id=ids[0], logprob=-0.5)
        part.logprobs.add().CopyFrom(generate_pb2.PositionLogprobs(chosen=chosen, top=[chosen]))
    return part


def _end(request: Any, num_tokens: int) -> Any:
    prompt_tokens = len(request.token_ids.ids) or len(request.text)
    phases = [generate_pb2.Phase(name="prefill", seconds=0.25), generate_pb2.Phase(name="decode", seconds=0.75)]
    return generate_pb2.GenerateResponse(
        request_id=request.request_id or "r-1",
        usage=generate_pb2.Usage(prompt_tokens=prompt_tokens, completion_tokens=num_tokens, cached_tokens=1),
        timeline=generate_pb2.Timeline(
            phases=phases, ttft_s=0.25, tpot_s=0.1, e2e_s=1.0, prefill_worker="prefill-0", decode_worker="decode-0"
        ),
        receipt=generate_pb2.HandoffReceipt(
            transport="loopback", pages=4, bytes=4000, checksums_ok=True, transfer_s=0.002, exposed_s=0.001
        ),
        moved=[generate_pb2.HandoffReceipt(transport="loopback", pages=5, bytes=5000, checksums_ok=True)],
    )


# The first line of a program that takes SIGINT as in a terminal, also where whoever runs the tests ignores it. What a
# test's process did for it between fork and exec could wait for gRPC's threads without end.
HEED_INTERRUPTS = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
