"""Every transport between workers whose pages are divided otherwise: the same pages, and the same checksum."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from kv_transfer.base import Segment, TransferError
from kv_transfer.checksum import Checksummer, RunningDigest
from kv_transfer.transports.registry import load_transport
from tests.engine.pages.test_shares import cut_memory, whole
from tests.kv_transfer import fake_gpu
from tests.kv_transfer.test_transports import ONE_SIDED, SOON_S, TWO_SIDED, send, transport_named, wire_for

PAIRS = [
    ("two ranks", "whole"),
    ("whole", "two ranks in two stages"),
    ("more ranks than heads", "more ranks than heads"),
    ("latents", "latents"),
]


@pytest.mark.parametrize("name", [*ONE_SIDED, *TWO_SIDED])
@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_pages_go_by_heads(name: str, ours: str, theirs: str) -> None:
    (source, our_ranks), (target, their_ranks) = cut_memory(ours, 23, 1), cut_memory(theirs, 31, 2)
    layers, src, dst, digest = range(1, source.layout.num_layers), [4, 19, 11, 12], [30, 2, 7, 8], RunningDigest()
    wanted, kept = whole(source, layers, src), [page for page in range(31) if page not in dst]
    before = whole(target, range(source.layout.num_layers), kept)
    transport, segment = transport_named(name), Segment(seq=0, layers=layers, src_pages=src, dst_pages=dst)
    receiver = transport.offer(target, peer="prefill-0", wire=wire_for(name, SOON_S))
    with ThreadPoolExecutor(1) as pool:
        opened = pool.submit(receiver.open, SOON_S)
        sender = transport.connect(source, receiver.params, peer="decode-0", wire=wire_for(name, SOON_S))
        opened.result(SOON_S)
        receiver.expect(segment)
        if name in fake_gpu.ON_GPU:  # where digests are made of pages
            send(sender, segment)
        else:
            sender.send(segment, digest.see)
            sender.flush()
        receiver.receive(segment)
        receiver.place(segment)
    assert whole(target, layers, dst) == wanted
    assert whole(target, range(source.layout.num_layers), kept) == before
    if name not in fake_gpu.ON_GPU:
        assert digest.value == Checksummer(target).digest(layers, dst)
    sender.close()
    receiver.close()
    assert len(our_ranks) + len(their_ranks) == len(source.shares) + len(target.shares)  # their memory was used


def test_an_offer_that_lacks_heads_is_refused() -> None:
    source, target = cut_memory("whole", 5, 1)[0], cut_memory("two ranks", 5, 2)[0]
    transport = load_transport("shared_memory")
    receiver = transport.offer(target, peer="prefill-0", wire=wire_for("shared_memory", SOON_S))
    for key, value, why in (
        ("share", "0/2,0/2", "nobody has head 2 of layer 0"),
        ("share", "0/2", "nobody has head 2 of layer 0"),
        ("bytes", "64,64", "decode-0 says its KV has 64 bytes, but its layout has"),
    ):
        with pytest.raises(TransferError, match=why):
            transport.connect(source, {**receiver.params, key: value}, peer="decode-0", wire=wire_for("", SOON_S))
    receiver.close()
