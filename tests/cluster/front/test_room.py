"""Who asks for as many tokens as fit gets those that a decode worker grants, to the last page, along beams, too."""

from __future__ import annotations

import pytest

from cluster.front.requests import AS_MANY_AS_FIT, _room
from engine.types import BeamOptions, SamplingParams
from kv_transfer.lease import Granted
from tests.policies.decoding import PAGE, policy_of

pytestmark = pytest.mark.unit

NUM_PAGES = 65


def is_granted(prompt_len: int, num_beams: int, max_tokens: int) -> bool:
    """By a worker that gets all of the prompt, or for a search all but its last token."""
    policy = policy_of(NUM_PAGES)
    read = prompt_len - (num_beams > 0)
    answer = policy.reserve(
        "a", num_tokens=read, max_new_tokens=prompt_len + max_tokens - read, hashes=[], num_beams=num_beams
    )
    return isinstance(answer, Granted)


@pytest.mark.parametrize("num_beams", [0, 2, 3, 7, 16])
@pytest.mark.parametrize("prompt_len", [1, 3, 4, 5, 9, 63, 64, 200])
def test_as_many_as_fit_is_what_a_decode_worker_grants(prompt_len: int, num_beams: int) -> None:
    search = BeamOptions(num_beams=num_beams) if num_beams else None
    params = SamplingParams(max_tokens=AS_MANY_AS_FIT, beam_search=search)
    room = _room(prompt_len, params, 4096, NUM_PAGES * PAGE, PAGE)
    assert is_granted(prompt_len, num_beams, room)
    assert not is_granted(prompt_len, num_beams, room + 2)  # of the last token there is no KV
