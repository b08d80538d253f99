"""OpenAIBackend asks any server of OpenAI's API for completions of the same requests that a router would get: prompts
of token ids, the same lengths, sampling and seeds, so that both stand in one table.

Servers that tell usage with each event (vLLM, ours) say how many tokens it brought; for others each event counts as one
until the end tells all.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvrelay.client.openai_http import OpenAIServer
from kvrelay.client.types import Completion, ServedModel, Usage
from kvrelay.v1 import generate_pb2

UNKNOWN_LENGTH = 1 << 20  # of a server that does not say how long its sequences may be


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAITarget:
    base_url: str
    model: str | None = None  # None: the first that is served
    vocab_size: int = 32_000  # that prompts' token ids are drawn from


class OpenAIBackend(OpenAIServer):
    def __init__(self, target: OpenAITarget) -> None:
        super().__init__(target.base_url)
        self._target = target
        self._model = target.model or ""

    async def model_info(self) -> ServedModel:
        """What the server says of it. Raises KvrelayError."""
        models = await self.models()
        model: Mapping[str, Any] = next((each for each in models if each["id"] == self._model), models[0])
        self._model = self._model or str(model["id"])
        return ServedModel(
            name=self._model,
            architecture="",
            dtype="",
            vocab_size=self._target.vocab_size,
            max_model_len=int(model.get("max_model_len") or UNKNOWN_LENGTH),
            num_params=0,
            eos_token_ids=(),
            fingerprint="",
        )

    def send(self, request: generate_pb2.GenerateRequest, *, timeout_s: float | None = None) -> OpenAIAnswer:
        body = {
            "model": self._model,
            "prompt": list(request.token_ids.ids),
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            **_sampling(request.sampling),
        }
        if request.priority:
            body["priority"] = request.priority
        return OpenAIAnswer(self.events("/v1/completions", body, timeout_s=timeout_s))


def _sampling(sampling: generate_pb2.SamplingParams) -> dict[str, Any]:
    return {field.name: value for field, value in sampling.ListFields()} | {"temperature": sampling.temperature}


@dataclass(frozen=True, slots=True)
class CountedTokens:
    token_ids: Sequence[int]  # so many; which, nobody knows


class OpenAIAnswer:
    def __init__(self, events: AsyncIterator[dict[str, Any]]) -> None:
        self._events = events
        self._id = ""
        self._num_tokens = 0
        self._usage: Usage | None = None

    async def read(self) -> CountedTokens | None:
        """None at the end. Raises KvrelayError."""
        event = await anext(self._events, None)
        if event is None:
            return None
        self._id = str(event.get("id") or self._id)
        before = self._num_tokens
        if usage := event.get("usage"):
            self._usage = _usage(usage)
            self._num_tokens = self._usage.completion_tokens
        elif any(choice.get("text") for choice in event.get("choices", ())):
            self._num_tokens += 1
        return CountedTokens((0,) * max(0, self._num_tokens - before))

    def completion(self) -> Completion:
        return Completion(request_id=self._id, choices=(), usage=self._usage)


def _usage(told: Mapping[str, Any]) -> Usage:
    details = told.get("prompt_tokens_details") or {}
    return Usage(
        prompt_tokens=int(told.get("prompt_tokens") or 0),
        completion_tokens=int(told.get("completion_tokens") or 0),
        cached_tokens=int(details.get("cached_tokens") or 0),
    )
