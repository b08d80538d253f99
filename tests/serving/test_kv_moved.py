"""The KV really moved: what decode reads is what prefill wrote, byte for byte, and what is lost on the way is seen.

Damage and loss are injected at the sending end (kv_transfer.transports.faulty), below all that could know of them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cluster.deploy.local import LocalCluster
from engine.pages.memory import KvMemory
from engine.types import SampledToken, Step
from kv_transfer.transports.faulty import Faults
from kvrelay.client.client import AsyncClient
from kvrelay.client.types import Completion, KvrelayError
from tests.serving.conftest import ModelDir
from tests.serving.harness import (
    WAIT_S,
    counters,
    engine_with,
    random_prompt,
    router_with,
    transformers_tokens,
    worker_with,
)

TRANSPORTS = ("loopback", "shared_memory", "process_group", "tcp")
PROMPT = random_prompt(100, seed=1)  # three chunks, seven pages
OTHER = random_prompt(60, seed=2)
NEW_TOKENS = 12
MAX_ATTEMPTS = 2

_known: dict[str, list[list[int]]] = {}


def _expected(directory: Path) -> list[list[int]]:
    """Of PROMPT and of OTHER."""
    if str(directory) not in _known:
        _known[str(directory)] = transformers_tokens(directory, [PROMPT, OTHER], NEW_TOKENS)
    return _known[str(directory)]


def _cluster(directory: Path, transport: str, faults: Faults | None = None, timeout_s: float = WAIT_S) -> LocalCluster:
    worker = worker_with(transports=(transport,), timeout_s=timeout_s)
    router = router_with(max_attempts=MAX_ATTEMPTS)
    return LocalCluster(str(directory), engine=engine_with(), worker=worker, router=router, faults=faults)


async def _generate(client: AsyncClient, prompt: list[int]) -> Completion:
    return await client.generate(prompt, temperature=0.0, max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS, timeout_s=60)


def _pages_bytes(memory: KvMemory, pages: list[int]) -> bytes:
    """K and V of the pages in every layer, in the wire's order."""
    planes = (plane for layer in range(memory.layout.num_layers) for plane in (memory.k(layer), memory.v(layer)))
    return b"".join(plane[pages].view(torch.uint8).numpy().tobytes() for plane in planes)


def _on_commit(cluster: LocalCluster, then: Callable[[str], None]) -> None:
    """Call `then(request id)` when the decode worker has given its receipt, before it runs a step."""
    policy = cluster.decode[0].role.policy
    original = policy.on_committed

    def on_committed(request_id: str, more: int = 0) -> None:
        then(request_id)
        original(request_id, more)

    policy.on_committed = on_committed  # type: ignore[method-assign]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
async def test_decode_reads_the_bytes_that_prefill_wrote(name: str, transport: str, model_dir: ModelDir) -> None:
    directory = model_dir(name)
    both: list[tuple[bytes, bytes]] = []
    async with _cluster(directory, transport) as cluster, AsyncClient(cluster.endpoint) as client:
        prefill, decode = cluster.prefill[0], cluster.decode[0]
        blank = _pages_bytes(decode.engine.memory, list(range(decode.engine.layout.num_pages)))
        assert not any(blank)

        def compare(request_id: str) -> None:
            theirs = list(prefill.role.policy.pages_of(request_id))
            ours = list(decode.role.policy._requests[request_id].pages)
            both.append((_pages_bytes(prefill.engine.memory, theirs), _pages_bytes(decode.engine.memory, ours)))

        _on_commit(cluster, compare)
        completion = await _generate(client, PROMPT)
        page_bytes = prefill.engine.layout.page_bytes()

    [(written, read)] = both
    assert written == read
    assert any(written)
    assert list(completion.token_ids) == _expected(directory)[0]
    assert completion.receipt is not None
    assert completion.receipt.transport == transport
    assert completion.receipt.pages == 7
    assert completion.receipt.bytes == len(written) == 7 * page_bytes


async def test_other_bytes_in_the_decode_pages_give_other_tokens(model_dir: ModelDir) -> None:
    """So decode does not compute the prompt again by itself."""
    directory = model_dir("llama")
    async with _cluster(directory, "shared_memory") as cluster, AsyncClient(cluster.endpoint) as client:
        memory = cluster.decode[0].engine.memory

        def blank(_: str) -> None:
            memory.bytes.zero_()

        _on_commit(cluster, blank)
        completion = await _generate(client, PROMPT)
    assert completion.token_ids[0] == _expected(directory)[0][0]
    assert list(completion.token_ids) != _expected(directory)[0]


async def test_decode_workers_compute_one_token_for_each_request_and_step(model_dir: ModelDir) -> None:
    lengths: list[int] = []
    async with _cluster(model_dir("llama"), "shared_memory") as cluster, AsyncClient(cluster.endpoint) as client:
        prefill, decode = cluster.prefill[0], cluster.decode[0]
        original = decode.engine.step

        def step(step: Step) -> list[SampledToken]:
            lengths.extend(len(chunk.token_ids) for chunk in step.chunks)
            return original(step)

        decode.engine.step = step  # type: ignore[method-assign]
        await _generate(client, PROMPT)
        assert lengths == [1] * (NEW_TOKENS - 1)
        assert decode.counters["steps"] == decode.counters["generated_tokens"] == NEW_TOKENS - 1
        assert "prompt_tokens" not in decode.counters
        assert prefill.counters["prompt_tokens"] == len(PROMPT)
        assert prefill.counters["steps"] == 3
        assert prefill.counters["generated_tokens"] == 1


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_damaged_segment_is_sent_again_and_counted(transport: str, model_dir: ModelDir) -> None:
    directory = model_dir("llama")
    faults = Faults(corrupt=frozenset({0, 2}))
    async with _cluster(directory, transport, faults) as cluster, AsyncClient(cluster.endpoint) as client:
        first = await _generate(client, PROMPT)
        second = await _generate(client, OTHER)
        counts = counters(cluster)
        await cluster.settled()
        cluster.check_invariants()
    assert [list(first.token_ids), list(second.token_ids)] == _expected(directory)
    assert first.receipt is not None
    assert second.receipt is not None
    assert (first.receipt.resends, second.receipt.resends) == (2, 0)
    assert first.receipt.recomputed_tokens == 0
    assert first.timeline is not None
    assert first.timeline.attempts == 1
    assert counts["checksum_mismatches"] == 2
    assert counts["receipts_bad"] == 1


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_segment_damaged_every_time_makes_the_request_start_again(transport: str, model_dir: ModelDir) -> None:
    directory = model_dir("llama")
    faults = Faults()
    async with _cluster(directory, transport, faults) as cluster, AsyncClient(cluster.endpoint) as client:
        _damage_all_until(cluster, faults, receipts=3)
        completion = await _generate(client, PROMPT)
        counts = counters(cluster)
        await cluster.settled()
        cluster.check_invariants()
    assert list(completion.token_ids) == _expected(directory)[0]
    assert completion.timeline is not None
    assert completion.timeline.attempts == 2
    assert completion.receipt is not None
    assert completion.receipt.recomputed_tokens > 0
    assert counts["handoffs_failed"] == counts["router_retries"] == 1
    assert counts["receipts_bad"] == 3
    assert counts["router_recomputed_tokens"] == completion.receipt.recomputed_tokens


def _damage_all_until(cluster: LocalCluster, faults: Faults, receipts: int) -> None:
    """Every segment is damaged until the decode worker has given so many bad receipts."""
    servicer = cluster.decode[0].role.reservations.handoffs

    class Everything(frozenset[int]):
        def __contains__(self, number: object) -> bool:
            return servicer.counters["receipts_bad"] < receipts

    faults.corrupt = Everything()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_cluster_whose_transfer_is_dead_fails_the_request_and_says_so(
    transport: str, model_dir: ModelDir
) -> None:
    directory = model_dir("llama")
    faults = Faults(drop_all=True)
    async with (
        _cluster(directory, transport, faults, timeout_s=1.0) as cluster,
        AsyncClient(cluster.endpoint) as client,
    ):
        with pytest.raises(KvrelayError) as failed:
            await _generate(client, PROMPT)
        assert failed.value.code == "UNAVAILABLE"
        assert f"given up after {MAX_ATTEMPTS} failed attempts" in failed.value.message
        counts = counters(cluster)
        assert counts["handoffs_failed"] == MAX_ATTEMPTS
        assert counts["router_retries"] == MAX_ATTEMPTS - 1
        assert counts["router_failed"] == 1
        assert counts["receipts_good"] == 0
        assert cluster.decode[0].counters["generated_tokens"] == 0
        await cluster.settled()
        cluster.check_invariants()

        faults.drop_all = False
        completion = await _generate(client, PROMPT)
        assert list(completion.token_ids) == _expected(directory)[0]
        assert counters(cluster)["receipts_good"] == 2  # one for each side


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_transport_that_breaks_is_made_anew(transport: str, model_dir: ModelDir) -> None:
    directory = model_dir("llama")
    faults = Faults(fail=frozenset({1}))
    async with _cluster(directory, transport, faults) as cluster, AsyncClient(cluster.endpoint) as client:
        completion = await _generate(client, PROMPT)
        counts = counters(cluster)
        await cluster.settled()
        cluster.check_invariants()
    assert list(completion.token_ids) == _expected(directory)[0]
    assert completion.timeline is not None
    assert completion.timeline.attempts == 2
    assert counts["pairs_opened"] == 2
    assert counts["handoffs_failed"] == counts["router_retries"] == 1
