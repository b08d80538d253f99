from engine.attention.base import build_meta
from engine.kept import KeptPages
from engine.types import Chunk

SIZE = 4


def kept(*pages: int, window: int = 6, prompt_len: int = 18) -> KeptPages:
    return KeptPages(pages=pages, window=window, prompt_len=prompt_len, page_size=SIZE)


def seen(keeps: KeptPages, position: int) -> list[int]:
    return keeps.held(keeps.num_dropped(position), position + 1)


def test_a_row_of_the_prompt_sees_all() -> None:
    assert seen(kept(0), 17) == [0, 1, 2, 3, 4]


def test_a_row_behind_it_sees_what_is_kept_and_its_window() -> None:
    keeps = kept(0, 3)
    assert seen(keeps, 18) == [0, 3, 4]  # the window is 13 to 18
    assert seen(keeps, 21) == [0, 3, 4, 5]
    assert seen(keeps, 25) == [0, 3, 5, 6]
    assert seen(keeps, 60) == [0, 3, 13, 14, 15]


def test_a_window_wider_than_all_drops_nothing() -> None:
    assert kept(window=100).num_dropped(99) == 0


def test_pages_go_one_by_one_from_among_those_that_are_held() -> None:
    keeps = kept(1, 2, 5)
    held = list(range(12))
    for dropped in range(6):
        assert held == keeps.held(dropped, 48)
        del held[keeps.index_to_drop(dropped)]


def test_rows_in_pieces_see_the_same_pages() -> None:
    for window in (1, 4, 5, 11):
        keeps = kept(0, 2, window=window)
        for start in range(30):
            pieces = list(keeps.pieces(start, 17))
            assert [row for at, length in pieces for row in range(at, at + length)] == [*range(start, start + 17)]
            for at, length in pieces:
                assert {keeps.num_dropped(row) for row in range(at, at + length)} == {keeps.num_dropped(at)}


def test_a_step_has_a_sequence_for_each_piece_and_positions_of_the_text() -> None:
    """Rows 16 to 22 of a prompt of 18, all of whose pages are there."""
    chunk = Chunk(request_id="a", token_ids=range(7), start=16, block_table=range(10, 16), kept=kept(0))
    meta = build_meta([chunk], SIZE)
    assert meta.positions.tolist() == [16, 17, 18, 19, 20, 21, 22]
    assert meta.query_starts.tolist() == [0, 2, 5, 7]
    assert meta.starts.tolist() == [16, 10, 9]  # pages 1 and 2 are not seen by row 18, nor 3 by row 21
    tables = [[10, 11, 12, 13, 14], [10, 13, 14, 15], [10, 14, 15]]
    assert [row[: len(want)] for row, want in zip(meta.block_tables.tolist(), tables, strict=True)] == tables
    assert meta.slots.tolist() == [56, 57, 58, 59, 60, 61, 62]


def test_a_step_of_what_is_held_gives_the_same() -> None:
    keeps = kept(0)
    whole = Chunk(request_id="a", token_ids=[1], start=30, block_table=range(10, 18), kept=keeps)
    late = Chunk(request_id="a", token_ids=[1], start=30, block_table=[10, 14, 15, 16, 17], kept=keeps, num_dropped=3)
    for name in ("starts", "positions", "slots", "block_tables"):
        assert getattr(build_meta([whole], SIZE), name).tolist() == getattr(build_meta([late], SIZE), name).tolist()
