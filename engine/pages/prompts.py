"""prompts_in_pages makes a step of whole prompts, for what is looked at while a model is loaded."""

from __future__ import annotations

from collections.abc import Iterable

from engine.pages.pool import pages_for
from engine.types import Chunk


def prompts_in_pages(prompts: Iterable[list[int]], page_size: int) -> tuple[list[Chunk], int]:
    """A chunk of each one's token ids, in pages of its own, counted from 0; and how many pages they take."""
    chunks: list[Chunk] = []
    page = 0
    for index, ids in enumerate(prompts):
        table = range(page, page + pages_for(len(ids), page_size))
        chunks.append(Chunk(request_id=str(index), token_ids=ids, start=0, block_table=table))
        page = table.stop
    return chunks, page
