"""What process_group makes of gloo's timeout, which is for a whole message and not for silence."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from kv_transfer.base import TransferError
from kv_transfer.plan import SEGMENT_BYTES
from kv_transfer.transports.gloo import GlooGroup

SOON_S = 30.0


class Work:
    def __init__(self, is_in_time: bool) -> None:
        self._is_in_time = is_in_time

    def wait(self) -> None:
        if not self._is_in_time:
            raise RuntimeError("Timed out waiting 5000ms for send operation to complete")


class SlowLink:
    """A process group whose link moves so many bytes within its timeout."""

    def __init__(self, bytes_in_time: int) -> None:
        self._bytes_in_time = bytes_in_time
        self.moved: list[bytes] = []

    def send(self, tensors: Sequence[torch.Tensor], rank: int, tag: int) -> Work:
        (data,) = tensors
        assert tag == data.numel()
        self.moved.append(data.numpy().tobytes())
        return Work(data.numel() <= self._bytes_in_time)

    recv = send


@pytest.mark.parametrize("way", ["send", "receive"])
def test_a_link_that_moves_a_part_of_a_segment_in_time_is_waited_for(way: str) -> None:
    link = SlowLink(SEGMENT_BYTES // 4)
    group = GlooGroup(lambda: link, "decode-0", timeout_s=5.0)
    group.open()
    data = torch.arange(SEGMENT_BYTES - 5).to(torch.uint8)
    getattr(group, way)(data).result(SOON_S)
    group.abort("the test is over")
    group.join()
    assert b"".join(link.moved) == data.numpy().tobytes()


@pytest.mark.parametrize("way", ["send", "receive"])
def test_a_link_that_moves_nothing_in_time_is_given_up(way: str) -> None:
    group = GlooGroup(lambda: SlowLink(0), "decode-0", timeout_s=5.0)
    group.open()
    with pytest.raises(TransferError, match="decode-0 moved nothing for 5 s or is gone"):
        getattr(group, way)(torch.zeros(100, dtype=torch.uint8)).result(SOON_S)
    group.join()
