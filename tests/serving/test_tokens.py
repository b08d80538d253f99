"""Greedy tokens through the whole cluster equal transformers' `generate`, whatever happens to the requests on the way.

Every architecture goes through one mixed scenario: prompts of one token to several chunks at once, prefixes that are
cached, and a decode pool so small that requests are preempted. Llama goes over every transport, the others over one.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cluster.deploy.local import LocalCluster
from kvrelay.client.client import AsyncClient
from tests.serving.conftest import ModelDir
from tests.serving.harness import (
    ROUTER,
    Gate,
    counters,
    engine_with,
    generate_all,
    random_prompt,
    transformers_tokens,
    until,
    worker_with,
)
from tests.zoo import HYBRIDS, TEN
from worker.driver import Worker

TRANSPORTS = ("loopback", "shared_memory", "process_group")
LENGTHS = (1, 7, 16, 33, 90, 130)  # tokens; the window is 32, a chunk 48
NEW_TOKENS = 40
PREFIX_LEN = 80  # of the prompt of 90: five pages
DECODE_PAGES = 22  # all prompts take 21, with their output 35; any five of them with their output 24 or more

PROMPTS = [random_prompt(length, seed=length) for length in LENGTHS]
LIKE_90 = [PROMPTS[4][:PREFIX_LEN] + random_prompt(5 + i, seed=i) for i in range(2)]

CASES = [("llama", transport) for transport in TRANSPORTS]
CASES += [(name, TRANSPORTS[i % 3]) for i, name in enumerate(sorted((TEN | HYBRIDS).keys() - {"llama"}))]


@pytest.mark.parametrize(("name", "transport"), CASES)
async def test_greedy_tokens_equal_transformers(name: str, transport: str, model_dir: ModelDir) -> None:
    directory = model_dir(name)
    expected = _expected(name, directory)
    cluster = LocalCluster(
        str(directory),
        engine=engine_with(),
        decode_engine=engine_with(num_pages=DECODE_PAGES),
        worker=worker_with(transports=(transport,)),
        router=ROUTER,
    )
    async with cluster:
        client = AsyncClient(cluster.endpoint)
        decode = cluster.decode[0]
        gate = Gate(decode.engine)  # until all are there: over a slow transport they could come and go one by one
        answers = asyncio.create_task(generate_all(client, PROMPTS, NEW_TOKENS))
        await until(lambda: _num_arrived(decode) >= len(PROMPTS) - 1, "so many are there that pages will run out")
        gate.open()
        first = await answers
        counts = counters(cluster)
        again = await generate_all(client, [PROMPTS[4], *LIKE_90], NEW_TOKENS)
        await cluster.settled()
        cluster.check_invariants()
        await client.close()

    assert [list(c.token_ids) for c in first] == expected[: len(PROMPTS)]
    assert [list(c.token_ids) for c in again] == [expected[4], *expected[len(PROMPTS) :]]
    assert counts["preemptions"] > 0
    assert counts["router_preempted"] == counts["preemptions"]
    for completion in again:
        assert completion.usage is not None
        assert completion.usage.cached_tokens == PREFIX_LEN
    receipts = [c.receipt for c in first if c.receipt is not None]
    assert len(receipts) == len(first)
    assert all(receipt.checksums_ok for receipt in receipts)
    assert {receipt.transport for receipt in receipts if receipt.pages} == {transport}
    attempts = sum(c.timeline.attempts for c in first if c.timeline is not None)
    assert attempts == len(first) + counts["preemptions"]


_known: dict[str, list[list[int]]] = {}


def _expected(name: str, directory: Path) -> list[list[int]]:
    if name not in _known:
        _known[name] = transformers_tokens(directory, [*PROMPTS, *LIKE_90], NEW_TOKENS)
    return _known[name]


def _num_arrived(worker: Worker[Any]) -> int:
    return sum(request.num_outputs > 0 for request in worker.role.requests.values())
