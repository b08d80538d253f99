"""MixedPolicy: prompts and answers share steps and pages, whoever asked first has pages first, and all come back."""

from __future__ import annotations

import random

import pytest

from decode_worker.batches import DecodeBatch
from engine.pages.pool import PagePool, page_hashes
from kv_transfer.lease import Denied, Granted, Queued
from mixed_worker.options import MixedOptions
from mixed_worker.policy import MixedPolicy
from prefill_worker.policy import PrefillBatch

pytestmark = pytest.mark.unit

PAGE = 4


@pytest.mark.parametrize(
    ("chunks", "answers", "tokens"), [(128, 0, 64), (128, 40, 24), (128, 64, 1), (8, 50, 8), (0, 9, 0)]
)
def test_prompts_go_on_beside_as_many_answers_as_a_step_holds(chunks: int, answers: int, tokens: int) -> None:
    policy = MixedPolicy(PagePool(16, PAGE), MixedOptions(max_batch_tokens=64, chunk_tokens=chunks))
    assert policy.prompt_tokens(answers) == tokens


class Worker:
    """What MixedRole does with the policy, without an engine."""

    def __init__(self, num_pages: int = 16, **options: object) -> None:
        chosen = {"max_batch_tokens": 16, "chunk_tokens": 6, **options}
        self.policy = MixedPolicy(PagePool(num_pages, PAGE), MixedOptions(**chosen))  # type: ignore[arg-type]
        self.left: dict[str, int] = {}  # tokens, of answers; those that stay, first of all
        self.staying: set[str] = set()
        self.granted: set[str] = set()
        self.leaving: set[str] = set()

    def prompt(
        self, name: str, length: int, new_tokens: int, *, stays: bool = True, text: str = "", priority: int = 0
    ) -> Denied | None:
        """`text`: those of the same one begin alike."""
        tokens = random.Random(text or name).choices(range(1000), k=length)
        max_len = length + (new_tokens - 1 if stays else 0)
        denied = self.policy.decode.expect(name, num_tokens=length, max_len=max_len, priority=priority)
        if denied is None:
            self.policy.prefill.add(name, length, page_hashes(tokens, PAGE), priority)
            self.left[name] = new_tokens
            (self.staying if stays else self.leaving).add(name)
        return denied

    def reserve(self, name: str, length: int, new_tokens: int, priority: int = 0) -> None:
        answer = self.policy.decode.reserve(
            name, num_tokens=length, max_new_tokens=new_tokens, hashes=[], priority=priority
        )
        self.left[name] = new_tokens
        if isinstance(answer, Granted):
            self.granted.add(name)
        else:
            assert isinstance(answer, Queued)

    def commit(self, name: str) -> None:
        self.granted.remove(name)
        self.left[name] -= 1
        self.policy.decode.on_committed(name)

    def pass_on(self, name: str, num_read: int) -> None:
        """Its KV comes, of so many tokens: the rest is read here."""
        self.granted.remove(name)
        policy = self.policy
        num_tokens = policy.decode._requests[name].prompt_len
        pages, hashes, computed = policy.decode.on_unread(name, num_read)
        assert num_read <= computed < num_tokens or computed == num_tokens - PAGE
        policy.prefill.take_over(name, num_tokens, hashes, pages, computed, has_begun=num_read > 0)
        self.staying.add(name)

    def cancel(self, name: str) -> None:
        if self.policy.prefill.holds(name):
            self.policy.prefill.on_cancelled(name)
        else:
            self.policy.decode.on_cancelled(name)
        self.forget(name)

    def forget(self, name: str) -> None:
        self.left.pop(name, None)
        for group in (self.staying, self.granted, self.leaving):
            group.discard(name)

    def step(self) -> tuple[DecodeBatch, PrefillBatch | None]:
        policy = self.policy
        answers = policy.decode.next_batch()
        for name in answers.preempted:
            self.forget(name)
        prompts = policy.prefill.next_batch(policy.prompt_tokens(len(answers.entries)))
        policy.decode.on_batch_done(answers)
        for entry in answers.entries:
            self.left[entry.request_id] -= 1
            if not self.left[entry.request_id]:
                policy.decode.on_finished(entry.request_id)
                self.forget(entry.request_id)
        for chunk in prompts.chunks if prompts else ():
            if chunk.is_last and policy.prefill.holds(chunk.request_id) and chunk.request_id in self.left:
                self._on_first_token(chunk.request_id)
        if prompts:
            policy.prefill.on_batch_done(prompts)
        self.granted |= {name for name, _ in policy.decode.next_grants()}
        policy.check_invariants()
        return answers, prompts

    def _on_first_token(self, name: str) -> None:
        policy = self.policy
        self.left[name] -= 1
        if name in self.staying and self.left[name]:
            policy.decode.adopt(name, policy.prefill.pages_of(name), policy.prefill.hashes_of(name))
        else:
            self.forget(name)
        policy.prefill.on_finished(name)


def lengths(prompts: PrefillBatch | None) -> list[int]:
    return [chunk.length for chunk in prompts.chunks] if prompts else []


def test_a_step_holds_all_that_decode_and_a_chunk_of_a_prompt() -> None:
    worker = Worker()
    worker.prompt("a", 5, 9)
    assert lengths(worker.step()[1]) == [5]
    worker.prompt("b", 14, 9)
    seen = [worker.step() for _ in range(4)]
    assert [lengths(prompts) for _, prompts in seen] == [[6], [6], [2], []]
    assert [len(answers.entries) for answers, _ in seen] == [1, 1, 1, 2]


def test_no_chunk_beside_answers_reads_prompts_when_nothing_decodes() -> None:
    worker = Worker(chunk_tokens=0)
    worker.prompt("a", 5, 3)
    worker.prompt("b", 14, 3)
    worker.policy.prefill.on_cancelled("b")
    worker.step()
    worker.prompt("c", 14, 3)
    assert [lengths(worker.step()[1]) for _ in range(3)] == [[], [], [14]]


def test_answers_leave_prompts_the_rest_of_a_step() -> None:
    worker = Worker(max_batch_tokens=4, chunk_tokens=4)
    for name in "abc":
        worker.prompt(name, 1, 40)
    worker.step()
    worker.prompt("d", 4, 2)
    answers, prompts = worker.step()
    assert (len(answers.entries), lengths(prompts)) == (3, [1])


def test_one_that_stays_keeps_its_pages() -> None:
    worker = Worker()
    worker.prompt("a", 10, 4)
    worker.step()
    held = worker.policy.pool.usage.held
    answers, _ = worker.step()
    assert held == worker.policy.pool.usage.held == 3
    assert [entry.position for entry in answers.entries] == [10]


def test_a_prefix_is_shared_by_what_was_read_and_what_was_written() -> None:
    worker = Worker()
    worker.prompt("a", 9, 2, text="alike")
    while worker.left:
        worker.step()
    worker.prompt("b", 9, 2, text="alike")
    assert lengths(worker.step()[1]) == [1]


@pytest.mark.parametrize("num_read", [0, 5, 8])
def test_what_another_worker_has_read_in_part_is_read_on_in_the_pages_that_it_came_in(num_read: int) -> None:
    worker = Worker()
    worker.reserve("a", 11, 4)
    worker.pass_on("a", num_read)
    assert lengths(worker.step()[1]) == [11 - num_read]
    answers, _ = worker.step()
    assert [entry.position for entry in answers.entries] == [11]
    assert worker.policy.pool.usage.held == 3
    while worker.left:
        worker.step()
    assert worker.policy.pool.usage.held == 0


def test_of_what_is_all_cached_here_the_last_page_is_read_again_in_a_page_of_its_own() -> None:
    worker = Worker()
    policy, hashes = worker.policy, page_hashes(range(8), PAGE)
    kept = policy.pool.allocate(2)
    for page, page_hash in zip(kept, hashes, strict=True):
        policy.pool.publish(page, page_hash)
    granted = policy.decode.reserve("a", num_tokens=8, max_new_tokens=4, hashes=hashes)
    assert isinstance(granted, Granted)
    assert list(granted.pages) == kept
    pages, _, computed = policy.decode.on_unread("a", 6)
    assert (pages[0], pages[1] in kept, computed) == (kept[0], False, 4)
    policy.prefill.take_over("a", 8, hashes, pages, computed, has_begun=True)
    policy.check_invariants()
    batch = policy.prefill.next_batch()
    assert batch is not None
    assert [(chunk.start, chunk.length, chunk.is_first) for chunk in batch.chunks] == [(4, 4, False)]


def test_a_reservation_that_came_first_has_pages_first() -> None:
    worker = Worker(num_pages=4, watermark=0.0)
    worker.reserve("a", 12, 4)
    worker.reserve("b", 12, 4)
    worker.prompt("c", 4, 2)
    assert lengths(worker.step()[1]) == []
    worker.commit("a")
    while "a" in worker.left:
        assert lengths(worker.step()[1]) == []
    assert "b" in worker.granted


def test_a_prompt_that_came_first_has_pages_first() -> None:
    worker = Worker(num_pages=4, watermark=0.0)
    worker.reserve("a", 12, 4)
    worker.commit("a")
    worker.prompt("c", 12, 2)
    worker.step()
    worker.reserve("b", 4, 2)
    while "a" in worker.left:
        assert "b" not in worker.granted
        worker.step()
    assert lengths(worker.step()[1]) == [12]


def test_a_prompt_that_was_not_passed_on_after_all_has_its_place_again() -> None:
    """Behind the last one it waits for that, which waits for the reservation between, which waits for the first."""
    worker = Worker(num_pages=3, watermark=0.0)
    worker.reserve("running", 8, 2)
    worker.commit("running")
    worker.prompt("a", 8, 2)
    worker.reserve("b", 6, 2)
    worker.prompt("c", 9, 2)
    worker.policy.prefill.on_passing("a")
    worker.policy.prefill.on_passing_failed("a")
    for _ in range(20):
        for name in list(worker.granted):
            worker.commit(name)
        worker.step()
    assert not worker.left


def test_what_can_never_fit_is_denied() -> None:
    denied = Worker(num_pages=4).prompt("a", 8, 12)
    assert denied is not None
    assert denied.reason == "mixed: 5 pages needed, 4 exist"


@pytest.mark.parametrize("admission", ["watermark", "worst_case"])
@pytest.mark.parametrize("seed", range(40))
def test_whatever_comes_all_ends_and_every_page_comes_back(seed: int, admission: str) -> None:
    rng = random.Random(seed)
    worker = Worker(num_pages=rng.choice([8, 12, 20]), admission=admission, max_batch_size=rng.choice([2, 8]))
    for number in range(60):
        length, new_tokens = rng.randint(1, 20), rng.randint(2, 12)
        kind, priority = rng.random(), rng.choice((0, 0, -1, 2))
        if kind < 0.4:
            worker.prompt(f"p{number}", length, new_tokens, priority=priority)
        elif kind < 0.6:
            worker.prompt(f"p{number}", length, new_tokens, stays=False, priority=priority)
        elif kind < 0.8:
            worker.reserve(f"r{number}", length, new_tokens, priority)
        for name in [name for name in worker.granted if rng.random() < 0.5]:
            if rng.random() < 0.3:
                worker.pass_on(name, rng.randrange(worker.policy.decode._requests[name].prompt_len))
            else:
                worker.commit(name)
        if worker.left and rng.random() < 0.2:
            worker.cancel(rng.choice(sorted(worker.left)))
        worker.step()
    for _ in range(600):
        for name in list(worker.granted):
            worker.commit(name)
        worker.step()
    assert not worker.left, "something waits for ever"
    assert worker.policy.pool.usage.held == 0
    if admission == "worst_case":
        assert not worker.policy.decode.preemptions
