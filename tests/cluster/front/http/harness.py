"""A router between fake workers that serves HTTP, and clients of it that nobody here wrote."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from openai import AsyncOpenAI
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cluster.front.server import server_options
from cluster.front.tokenizer import TextCodec
from tests.cluster.harness import Harness, serving
from tests.fakes import VOCAB

TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }} {% endfor %}{% if tools %}w9 {% endif %}"
    "{% if add_generation_prompt %}w8{% endif %}{# <think> </think> [TOOL_CALLS] #}"
)
MARKS = {"[TOOL_CALLS]": 40, "<think>": 41, "</think>": 42}  # special tokens, as Mistral has them
WORDS = {'[{"name":': 43, '"add",': 44, '"arguments":': 45, '{"a":': 46, "1}}]": 47}


def words(template: str | None = TEMPLATE) -> TextCodec:
    """A tokenizer whose token 17 is the word w17, but for MARKS and WORDS."""
    vocab = {f"w{i}": i for i in range(VOCAB)}
    named = {number: word for word, number in {**MARKS, **WORDS}.items()}
    vocab = {named.get(number, word): number for word, number in vocab.items()}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    return TextCodec(PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template))


class Http:
    def __init__(self, harness: Harness, base: str, token: str) -> None:
        self.harness = harness
        self.base = base
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.raw = httpx2.AsyncClient(base_url=base, headers=headers, timeout=20)
        self.openai = AsyncOpenAI(base_url=f"{base}/v1", api_key=token or "none", max_retries=0, timeout=20)

    async def post(self, path: str, **body: Any) -> tuple[int, Any]:
        answer = await self.raw.post(path, json=body)
        return answer.status_code, answer.json()

    async def events(self, path: str, **body: Any) -> list[Any]:
        """Of a stream, the last of which says that it is done."""
        answer = await self.raw.post(path, json={**body, "stream": True})
        assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
        *events, done, rest = answer.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(each.removeprefix("data: ")) for each in events]


@asynccontextmanager
async def http(
    *, codec: TextCodec | None = None, token: str = "", worker: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[Http]:
    auth = {"auth": True, "tokens": f"somebody:{token}"} if token else {}
    options = server_options(port=0, http_ports=(0,), **auth, **settings)
    async with serving(options=options, codec=codec, worker=worker) as harness:
        client = Http(harness, f"http://127.0.0.1:{harness.server.http_port}", token)
        try:
            yield client
        finally:
            await client.openai.close()
            await client.raw.aclose()
