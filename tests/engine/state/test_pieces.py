import pytest

from engine.attention.base import build_meta
from engine.state.pieces import NOTHING, Piece, cut
from engine.types import Chunk

PAGE_SIZE = 4


def chunk(start: int, length: int, table: list[int]) -> Chunk:
    return Chunk(request_id="r", token_ids=[7] * length, start=start, block_table=table)


def pieces_of(*chunks: Chunk) -> tuple[list[Piece], list[Piece]]:
    pieces = cut(build_meta(chunks, PAGE_SIZE, row_multiple=8))
    return list(pieces.one_by_one), list(pieces.together)


def test_a_prompt_is_cut_where_its_pages_end() -> None:
    alone, together = pieces_of(chunk(0, 10, [5, 9, 2]))
    assert alone == [Piece(0, 4, NOTHING, 5), Piece(4, 8, 5, 9), Piece(8, 10, 9, 2)]
    assert together == []


def test_it_goes_on_within_a_page_and_from_the_end_of_one() -> None:
    alone, _ = pieces_of(chunk(3, 3, [5, 9]), chunk(4, 2, [6, 8]))
    assert alone == [Piece(0, 1, 5, 5), Piece(1, 3, 5, 9), Piece(3, 5, 6, 8)]


def test_single_tokens_that_go_on_are_computed_together() -> None:
    alone, together = pieces_of(chunk(0, 1, [3]), chunk(4, 1, [5, 9]), chunk(6, 1, [0, 1]))
    assert alone == [Piece(0, 1, NOTHING, 3)]
    assert together == [Piece(1, 2, 5, 9), Piece(2, 3, 1, 1)]


@pytest.mark.parametrize("length", [1, 4, 5, 12])
def test_padding_is_nobodys(length: int) -> None:
    alone, together = pieces_of(chunk(0, length, [0, 1, 2]))
    assert sum(each.end - each.begin for each in [*alone, *together]) == length
