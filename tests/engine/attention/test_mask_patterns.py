"""What a layer's mask is, as the probe learns it from the function that makes it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)

from engine.attention.probe import FULL, OTHER, probe_attention, probe_mask
from engine.errors import UnsupportedModel

NOT_PADDED = torch.zeros(1, dtype=torch.long)
MAX_LEN = 200


class Config:
    kvrelay_max_len = MAX_LEN


def code_of(mask_function: Callable[..., Any]) -> float:
    codes = set(probe_mask(1, 2, 2, mask_function=mask_function, config=Config()).flatten().tolist())
    assert len(codes) == 1
    code: float = codes.pop()
    return code


def a_prefix_sees_all_of_itself(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (query < 7) & (key < 7)


def every_second(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (key <= query) & ((query - key) % 2 == 0)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 32, 66, 100, 199])
def test_windows_and_chunks_are_told_apart(size: int) -> None:
    assert code_of(sliding_window_causal_mask_function(size)) == size
    assert code_of(chunked_causal_mask_function(size, NOT_PADDED)) == (-size if size > 1 else 1)  # one is both


@pytest.mark.parametrize("size", [200, 500])
def test_what_is_as_long_as_any_request_is_none(size: int) -> None:
    assert code_of(causal_mask_function) == FULL
    assert code_of(sliding_window_causal_mask_function(size)) == FULL
    assert code_of(chunked_causal_mask_function(size, NOT_PADDED)) == FULL


@pytest.mark.parametrize("function", [or_masks(causal_mask_function, a_prefix_sees_all_of_itself), every_second])
def test_another_pattern_is_refused(function: Callable[..., Any]) -> None:
    assert code_of(function) == OTHER
    refuses(probe_mask(1, 2, 2, mask_function=function, config=Config()))


def test_a_mask_that_a_layer_filled_itself_is_refused() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        refuses(torch.full((1, 1, 2, 2), torch.finfo(dtype).min, dtype=dtype))


def refuses(mask: torch.Tensor) -> None:
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(UnsupportedModel, match="pattern in its mask"):
        probe_attention(torch.nn.Identity(), q, q, q, mask, kvrelay=object())  # type: ignore[arg-type]
