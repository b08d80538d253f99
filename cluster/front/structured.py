"""Forms makes grammars of the forms that requests give their answers. They are read and checked here, with the model's
own tokens, so that what means nothing reaches no worker; what was checked lately is known."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc

from cluster.router.live.requests import RequestFailed
from engine.types import MAX_FORM_CHARS, InvalidRequest, SamplingParams
from kvrelay.v1 import generate_pb2

ANY_OBJECT = '{"type": "object"}'  # as a JSON Schema
NUM_KNOWN = 64
MAX_WAITING = 64
RETRY_AFTER_S = 1.0


def check_form(
    structured: generate_pb2.StructuredOutput, params: SamplingParams, model: generate_pb2.GetModelInfoResponse
) -> None:
    """What costs nothing to check. Raises InvalidRequest."""
    form, text = form_of(structured)
    if len(text) > MAX_FORM_CHARS:
        raise InvalidRequest(f"structured.{form} has {len(text)} characters; give at most {MAX_FORM_CHARS}")
    if not model.eos_token_ids:
        raise InvalidRequest("structured is given but the model has no EOS, which ends such answers; leave it out")
    if params.ignore_eos:
        raise InvalidRequest("ignore_eos is set with structured, whose answers end by EOS; leave one of them out")


def form_of(structured: generate_pb2.StructuredOutput) -> tuple[str, str]:
    """As engine.sampling.structured takes it. Raises InvalidRequest where there is none."""
    match structured.WhichOneof("form"):
        case "json_schema":
            return "json_schema", structured.json_schema
        case "json_object" if structured.json_object:
            return "json_schema", ANY_OBJECT
        case "regex":
            return "regex", structured.regex
        case "choice":
            return "choice", json.dumps(list(structured.choice.texts))
        case "grammar":
            return "grammar", structured.grammar
    raise InvalidRequest("structured is empty; give json_schema, json_object, regex, choice or grammar")


class Forms:
    """One event loop asks."""

    def __init__(self, backend: Any) -> None:
        """`backend`: of a fast tokenizer."""
        self._backend = backend
        self._vocabulary: Any = None
        self._known: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="forms")
        self._reading: dict[tuple[str, str], asyncio.Future[str]] = {}

    async def grammar(self, structured: generate_pb2.StructuredOutput, model: generate_pb2.GetModelInfoResponse) -> str:
        """Takes up to some 100 ms, the first time a second, in a thread which nothing else waits for. Raises
        InvalidRequest, RequestFailed where too many wait."""
        asked = form_of(structured)
        if (known := self._known.get(asked)) is None:
            reading = self._reading.get(asked) or self._read(asked, model)
            known = self._known[asked] = await asyncio.shield(reading)
            if len(self._known) > NUM_KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(asked)
        return known

    def _read(self, asked: tuple[str, str], model: generate_pb2.GetModelInfoResponse) -> asyncio.Future[str]:
        """Once for all that ask for it meanwhile."""
        if len(self._reading) >= MAX_WAITING:
            why = f"{len(self._reading)} forms of answers wait to be read, of {MAX_WAITING}"
            raise RequestFailed(grpc.StatusCode.RESOURCE_EXHAUSTED, why, retry_after_s=RETRY_AFTER_S)
        future = asyncio.get_running_loop().run_in_executor(self._thread, partial(self._checked, *asked, model))
        self._reading[asked] = future
        future.add_done_callback(partial(self._on_done, asked))
        return future

    def _on_done(self, asked: tuple[str, str], future: asyncio.Future[str]) -> None:
        del self._reading[asked]
        if not future.cancelled():
            future.exception()  # is heard by now: who has left does not ask

    def _checked(self, form: str, text: str, model: generate_pb2.GetModelInfoResponse) -> str:
        from engine.sampling.structured import check_grammar, grammar_of, vocabulary  # llguidance comes with it

        try:
            if self._vocabulary is None:
                self._vocabulary = vocabulary(self._backend.to_str(), model.vocab_size, model.eos_token_ids)
            grammar = grammar_of(form, text)
            check_grammar(form, grammar, self._vocabulary)
        except (KeyboardInterrupt, SystemExit, InvalidRequest):
            raise
        except BaseException as error:  # a panic in Rust is no Exception
            raise InvalidRequest(f"structured.{form} cannot be read: {str(error)[:200]}") from error
        return grammar

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
