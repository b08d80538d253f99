"""PromptHashes are the hashes of a call's full pages, by which the router knows them in prefix caches. Made once
for all choices and attempts of the call: a long prompt's take the event loop milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.pages.pool import PageHash, chain_root, page_hashes
from engine.types import LengthRope


class PromptHashes:
    """Only calls with the same `cache_salt` and the same adapter (by its digest) share pages."""

    def __init__(self, prompt_ids: Sequence[int], cache_salt: str, adapter: str = "") -> None:
        self.cache_salt = cache_salt
        self._prompt_ids = prompt_ids
        self._adapter = adapter
        self._root = b""
        self._pages = (0, b"", "")  # size and salts of the hashes below
        self._hashes: list[PageHash] = []

    def followed_by(
        self, output_ids: Sequence[int], page_size: int, salt: bytes = b"", rope: LengthRope | None = None
    ) -> list[PageHash]:
        """Of the pages of prompt and output together, of so many tokens each; not to be changed; `salt` and `rope`: a
        model's."""
        prompt_len = len(self._prompt_ids)
        turned = "" if rope is None else rope.salt(rope.length(prompt_len, prompt_len + len(output_ids)))
        if self._pages != (page_size, salt, turned):
            self._root = chain_root(self.cache_salt, self._adapter, turned)
            self._hashes = page_hashes(self._prompt_ids, page_size, salt=salt, parent=self._root)
            self._pages = (page_size, salt, turned)
        tail = self._prompt_ids[len(self._hashes) * page_size :]
        if len(tail) + len(output_ids) < page_size:
            return self._hashes
        parent = self._hashes[-1] if self._hashes else self._root
        return [*self._hashes, *page_hashes([*tail, *output_ids], page_size, salt=salt, parent=parent)]
