"""KeptPages: which pages of its KV a request sees and holds that asks to keep less than all of it.

A row of the prompt sees all before it. One behind the prompt sees the pages that are kept for good and those of a
window that ends with it: the first tokens and the last ones (StreamingLLM: Xiao et al., ICLR 2024), those of the prompt
that were attended to most (H2O: Zhang et al., NeurIPS 2023), or both. By whole pages, the same for all layers and
heads, and positions stay those of the text. So what a row sees follows from its position alone, and tokens do not
depend on where they are computed, or how often.

Arithmetic only. A *token page* is the number of a page in the request's sequence, from 0.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

POLICY_KEYS = ("window_tokens", "sink_tokens", "heavy_tokens")  # of a KvPolicy; elsewhere kv_window_tokens and so on


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPages:
    pages: tuple[int, ...]  # token pages that are kept for good, ascending
    window: int  # tokens that a row sees besides, its own counted; up to a page's more
    prompt_len: int
    page_size: int

    def num_dropped(self, position: int) -> int:
        """Pages that the row at `position`, and those behind it, do not see: the first so many of those not kept."""
        if position < self.prompt_len:
            return 0
        begin = self._begin(position)
        return begin - bisect_left(self.pages, begin)

    def held(self, num_dropped: int, num_tokens: int) -> list[int]:
        """The token pages of a sequence of `num_tokens` without the first `num_dropped` of those not kept."""
        return [page for page in range(-(-num_tokens // self.page_size)) if self._is_held(page, num_dropped)]

    def index_to_drop(self, num_dropped: int) -> int:
        """Among the pages that are held, the next of those not kept."""
        index = 0
        for page in self.pages:
            if page - index > num_dropped:
                break
            index += 1
        return index

    def pieces(self, start: int, length: int) -> Iterator[tuple[int, int]]:
        """The rows at [start, start + length) in pieces (first position, length) that see the same pages."""
        end = start + length
        while start < end:
            if start < self.prompt_len:
                stop = self.prompt_len
            else:
                stop = (self._begin(start) + 1) * self.page_size + self.window - 1
            stop = min(stop, end)
            yield start, stop - start
            start = stop

    def _begin(self, position: int) -> int:
        """The first token page of the window."""
        return max(0, position + 1 - self.window) // self.page_size

    def _is_held(self, page: int, num_dropped: int) -> bool:
        before = bisect_left(self.pages, page)
        is_kept = before < len(self.pages) and self.pages[before] == page
        return is_kept or page - before >= num_dropped
