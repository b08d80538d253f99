import torch

from engine.attention.base import build_meta
from engine.pages.layout import KvLayout, LayerKv, LayerState, StateTensor
from engine.pages.memory import KvMemory
from engine.state.pieces import Piece
from engine.state.states import States
from engine.types import Chunk

SHAPE = LayerState((StateTensor(0, (3, 5), "float32"),), (StateTensor(0, (2, 7), "bfloat16"),))
LAYOUT = KvLayout(4, "float32", (LayerKv(1, 2, 2), SHAPE), 6)


def states_of(memory: KvMemory) -> States:
    chunk = Chunk(request_id="r", token_ids=[1], start=0, block_table=[0])
    return States(memory, build_meta([chunk], LAYOUT.page_size))


def write(states: States, pieces: list[Piece], value: float) -> None:
    pages = torch.tensor([piece.write for piece in pieces])
    conv, recurrent = torch.full((len(pieces), 3, 5), value), torch.full((len(pieces), 2, 7), value).bfloat16()
    states.write(1, SHAPE, pages, pieces, [conv], [recurrent])


def read(states: States, *pages: int) -> list[float]:
    """The one number that each page's tensors hold."""
    conv, recurrent = states.read(1, SHAPE, torch.tensor(pages))
    numbers = [float(each.float().unique()) for each in conv[0]]
    assert numbers == [float(each.float().unique()) for each in recurrent[0]]
    return numbers


def test_what_is_written_is_read() -> None:
    states = states_of(KvMemory(LAYOUT))
    write(states, [Piece(0, 1, 3, 4), Piece(1, 2, 0, 1)], 2.0)
    assert read(states, 1, 4, 3) == [2.0, 2.0, 0.0]


def test_what_was_written_over_is_taken_back_and_no_more() -> None:
    memory = KvMemory(LAYOUT)
    before = states_of(memory)
    write(before, [Piece(0, 1, 3, 4), Piece(1, 2, 0, 1)], 2.0)
    failing = states_of(memory)
    write(failing, [Piece(0, 1, 4, 4), Piece(1, 2, 1, 5)], 3.0)
    assert read(failing, 4, 5) == [3.0, 3.0]
    failing.take_back()
    assert read(failing, 4, 5) == [2.0, 3.0]  # nobody goes on from 5 but by writing it again


def test_the_signature_tells_what_is_kept() -> None:
    assert LAYOUT.signature == (
        "page_size=4 dtype=float32 layers=1x(1h,k2,v2)+1x(conv 3x5 float32; recurrent 2x7 bfloat16)"
    )
    assert [LAYOUT.k_page_bytes(1), LAYOUT.v_page_bytes(1)] == [64, 64]  # 60 and 28 bytes, and what fills lines
