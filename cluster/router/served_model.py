"""ServedModel is what the router knows of the model that its workers serve, as they say when they come up.

All workers of a router serve one model from pages of one size; one that differs from those that are ready is refused.
It opens no stream, and routes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cluster.router.links.worker_link import WorkerRefused
from cluster.router.live.prompt_hashes import PromptHashes
from engine.pages.pool import PageHash
from engine.types import LengthRope
from kvrelay.v1 import generate_pb2
from kvrelay.v1 import worker_pb2 as pb
from kvrelay.v1.generate_pb2 import KvPolicy
from worker.convert import rope_from_proto
from worker.requests import most_kept_pages


class ServedModel:
    def __init__(self) -> None:
        self.info: generate_pb2.GetModelInfoResponse | None = None  # of the worker that came up last
        self._page_size = 0  # tokens
        self._rope: LengthRope | None = None

    def admit(self, hello: pb.WorkerHello, others: Iterable[pb.WorkerHello]) -> None:
        """A worker comes up beside `others`, which are ready. Raises WorkerRefused if it does not fit them."""
        for other in others:
            if hello.model.fingerprint != other.model.fingerprint:
                ours, theirs = _named(hello.model), _named(other.model)
                raise WorkerRefused(f"it serves {ours}; {other.worker.name} serves {theirs}")
            if hello.page_size != other.page_size:
                raise WorkerRefused(
                    f"its pages hold {hello.page_size} tokens; those of {other.worker.name} {other.page_size}"
                )
        self.info, self._page_size, self._rope = hello.model, hello.page_size, rope_from_proto(hello)

    def page_hashes(self, prompt: PromptHashes, output_ids: Sequence[int]) -> list[PageHash]:
        """Of the pages that the workers' prefix caches may hold; none before the first worker came up."""
        if self.info is None:
            return []
        return prompt.followed_by(output_ids, self._page_size, self.info.fingerprint.encode(), self._rope)

    def most_held(self, policy: KvPolicy) -> int:
        """Tokens of a request with this policy whose KV is held where it is decoded."""
        return self.tokens_in(most_kept_pages(policy, self._page_size))

    def tokens_in(self, num_pages: int) -> int:
        return num_pages * self._page_size


def _named(model: generate_pb2.GetModelInfoResponse) -> str:
    return f"{model.name} ({model.fingerprint})"
