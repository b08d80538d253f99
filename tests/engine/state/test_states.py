import torch

from engine.attention.base import build_meta
from engine.pages.layout import KvLayout, LayerKv, LayerState, StateTensor
from engine.pages.memory import KvMemory
from engine.state.states import States
from engine.types import Chunk

SHAPE = LayerState((StateTensor(0, (3, 5), "float32"),), (StateTensor(0, (2, 7), "bfloat16"),))
LAYOUT = KvLayout(4, "float32", (LayerKv(1, 2, 2), SHAPE), 6)


def states_of(memory: KvMemory) -> States:
    chunk = Chunk(request_id="r", token_ids=[1], start=0, block_table=[0])
    return States(memory, build_meta([chunk], LAYOUT.page_size))


def write(states: States, value: float, *pages: int) -> None:
    conv, recurrent = torch.full((len(pages), 3, 5), value), torch.full((len(pages), 2, 7), value).bfloat16()
    states.write(1, SHAPE, torch.tensor(pages), [conv], [recurrent])


def read(states: States, *pages: int, will_be_written: bool = False) -> list[float]:
    """The one number that each page's tensors hold."""
    tensors = states.read(1, SHAPE, torch.tensor(pages), will_be_written=will_be_written, is_spared=False)
    conv, recurrent = ([float(page.float().unique()) for page in each[0]] for each in tensors)
    assert conv == recurrent
    for each in (*tensors[0], *tensors[1]):
        each.fill_(9.0)  # they are copies
    return conv


def test_what_is_written_is_read() -> None:
    states = states_of(KvMemory(LAYOUT))
    write(states, 2.0, 4, 1)
    assert read(states, 1, 4, 3) == [2.0, 2.0, 0.0]


def test_what_was_written_over_is_taken_back_and_no_more() -> None:
    memory = KvMemory(LAYOUT)
    write(states_of(memory), 2.0, 4, 1)
    failing = states_of(memory)
    assert read(failing, 4, 1, will_be_written=True) == [2.0, 2.0]
    write(failing, 3.0, 4, 5)
    assert read(failing, 4, 5, 1) == [3.0, 3.0, 2.0]
    failing.take_back()
    assert read(failing, 4, 5, 1) == [2.0, 3.0, 2.0]  # nobody goes on from 5 but by writing it again


def test_the_signature_tells_what_is_kept() -> None:
    assert LAYOUT.signature == (
        "page_size=4 dtype=float32 layers=1x(1h,k2,v2)+1x(conv 3x5 float32; recurrent 2x7 bfloat16)"
    )
    assert [LAYOUT.k_page_bytes(1), LAYOUT.v_page_bytes(1)] == [64, 64]  # 60 and 28 bytes, and what fills lines
