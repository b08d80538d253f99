"""connect opens the pair with one decode worker: the handshake, and the first transport that works between the two."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio

from engine.pages.memory import KvMemory
from kv_transfer.base import SendEnd, Tls, TransferError, Wire
from kv_transfer.handshake import make_hello
from kv_transfer.options import TransferOptions
from kv_transfer.prefill_side.errors import HandoffError, HandoffLost, HandoffRefused
from kv_transfer.prefill_side.pair import PrefillPair
from kv_transfer.prefill_side.stream import Dial
from kv_transfer.transports.faulty import Faults, FaultySendEnd
from kv_transfer.transports.registry import load_transport, usable
from kvrelay.v1 import worker_pb2


async def connect(
    target: worker_pb2.WorkerAddress,
    *,
    me: worker_pb2.WorkerAddress,
    model_fingerprint: str,
    memory: KvMemory,
    dial: Dial,
    options: TransferOptions,
    host: str,
    tls: Tls | None = None,
    faults: Faults | None = None,
) -> PrefillPair:
    """Open the pair, over the first transport that both sides can use. `host`: this worker's own address.

    Raises HandoffRefused (the two do not fit together) or HandoffLost (the peer is not there, or no bytes can be
    moved to it: it may just be dying, so another attempt or another peer may do better).
    """
    wire = Wire(host=host, timeout_s=options.timeout_s, tls=tls)
    names, failures = usable(options.transports, memory.device), list[str]()
    while names:
        hello = make_hello(me, model_fingerprint, memory.layout, names)
        stream = dial(target.address)
        try:
            welcome = await _shake_hands(stream.call, target, hello, options.connect_timeout_s)
            end = await _open_send_end(welcome, memory, target.name, wire)
            end = end if faults is None else FaultySendEnd(end, memory, faults)
            return PrefillPair(target.name, memory, options, stream, welcome.transport, end)
        except TransferError as error:
            failures.append(f"{welcome.transport}: {error}")
            names.remove(welcome.transport)
            await stream.close()
        except HandoffError as error:
            await stream.close()
            if not failures:
                raise
            failures.append(str(error))  # of what is left, which may fit nobody: why the others failed is to be heard
            break
        except BaseException:
            await stream.close()
            raise
    raise HandoffLost(f"no transport works between {me.name} and {target.name}: {'; '.join(failures)}")


async def _shake_hands(
    call: Any, target: worker_pb2.WorkerAddress, hello: worker_pb2.HandoffHello, timeout_s: float
) -> worker_pb2.HandoffWelcome:
    try:
        async with asyncio.timeout(timeout_s):
            with suppress(asyncio.InvalidStateError):  # refused before the hello was out: read says why
                await call.write(worker_pb2.PrefillMessage(hello=hello))
            answer = await call.read()
            if answer is grpc.aio.EOF:
                raise _refusal(target, await call.code(), await call.details())
    except TimeoutError:
        raise HandoffLost(f"{target.name} at {target.address} did not answer for {timeout_s:g} s") from None
    except grpc.aio.AioRpcError as error:
        raise _refusal(target, error.code(), error.details()) from error
    welcome: worker_pb2.HandoffWelcome = answer.welcome
    if welcome.transport not in hello.transports:
        raise HandoffLost(f"{target.name} at {target.address} chose transport {welcome.transport!r}, which is not ours")
    if target.incarnation and welcome.worker.incarnation != target.incarnation:
        raise HandoffLost(f"{target.name} at {target.address} was restarted")
    return welcome


def _refusal(target: worker_pb2.WorkerAddress, code: Any, details: str | None) -> HandoffError:
    reason = f"{target.name} at {target.address}: {details or code.name}"
    refused = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED)
    return HandoffRefused(reason) if code in refused else HandoffLost(reason)


async def _open_send_end(welcome: worker_pb2.HandoffWelcome, memory: KvMemory, peer: str, wire: Wire) -> SendEnd:
    transport = load_transport(welcome.transport)
    params = dict(welcome.transport_params)
    return await asyncio.to_thread(transport.connect, memory, params, peer=peer, wire=wire)
