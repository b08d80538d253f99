"""What a prefill worker may say in a pair: each check raises Malformed with a sentence that names the peer."""

from __future__ import annotations

from engine.pages.layout import KvLayout
from kv_transfer.decode_side.reservation import IncomingKv, Reservation
from kv_transfer.plan import MAX_SEGMENT_BYTES
from kvrelay.v1 import worker_pb2


class Malformed(Exception):
    """The peer breaks the protocol: the pair is closed with this sentence."""


def check_size(peer: str, announce: worker_pb2.Announce, layout: KvLayout, *, one_sided: bool) -> None:
    """Whether there can be such a segment at all."""
    layers = range(announce.layer_begin, announce.layer_end)
    num_pages = announce.page_end - announce.page_begin
    if not (0 <= layers.start < layers.stop <= layout.num_layers and 0 < num_pages <= layout.num_pages):
        raise Malformed(f"{peer} announces {_range_text(announce)} of {layout.num_layers} layers")
    nbytes = layout.page_bytes(layers) * num_pages
    if announce.bytes != nbytes or (nbytes > MAX_SEGMENT_BYTES and not one_sided):
        raise Malformed(f"{peer} announces {announce.bytes} bytes for {_range_text(announce)}, which is {nbytes}")


def check_announce(peer: str, announce: worker_pb2.Announce, incoming: IncomingKv, *, max_resends: int) -> None:
    """Whether the segment belongs into the lease, and is its next. One that came again and again would never expire."""
    granted, num_segments = incoming.granted, len(incoming.segments)
    if not granted.cached_pages <= announce.page_begin < announce.page_end <= len(granted.pages):
        both = f"the lease has {len(granted.pages)}, {granted.cached_pages} of them cached"
        raise Malformed(f"{peer} announces {_range_text(announce)}, but {both}")
    if announce.segment != num_segments:
        raise Malformed(f"{peer} announces segment {announce.segment}; {num_segments} is next")
    if num_segments >= incoming.num_cells * (1 + max_resends):
        raise Malformed(f"{peer} announces segment {num_segments} of a lease with {incoming.num_cells} pages of layers")
    if incoming.commit is not None:
        raise Malformed(f"{peer} announces a segment of lease {announce.lease_id} after its commit")


def check_commit(peer: str, commit: worker_pb2.Commit, reservation: Reservation, vocab_size: int) -> None:
    incoming, num_more, num_unread = reservation.incoming, len(commit.more_token_ids), commit.unread_tokens
    num_segments = len(incoming.segments) if incoming is not None else 0
    wanted = (num_segments, reservation.num_tokens + num_more)
    if (commit.segments, commit.num_tokens + num_unread) != wanted or (num_more and num_unread):
        ours = f"{num_segments} segments and was reserved for {reservation.num_tokens} tokens"
        new = f", {num_more} of them new" if num_more else ""
        new += f", with {num_unread} unread" if num_unread else ""
        theirs = f"{commit.segments} segments and {commit.num_tokens} tokens{new}"
        raise Malformed(f"{peer} commits {theirs} to lease {commit.lease_id}, which has {ours}")
    if num_unread and reservation.room_tokens:
        why = f"reserved with room for {reservation.room_tokens}, as one that is decoded"
        raise Malformed(f"{peer} leaves {num_unread} tokens of lease {commit.lease_id} unread, which was {why}")
    if num_more > reservation.most_more:
        room = f"has room for {reservation.most_more}"
        raise Malformed(f"{peer} commits {num_more} new tokens to lease {commit.lease_id}, which {room}")
    if (largest := max((commit.token_id, *commit.more_token_ids))) >= vocab_size:
        raise Malformed(f"{peer} commits token {largest}; the model's ids go from 0 to {vocab_size - 1}")


def _range_text(announce: worker_pb2.Announce) -> str:
    layers = f"layers {announce.layer_begin} to {announce.layer_end}"
    return f"{layers}, pages {announce.page_begin} to {announce.page_end}"
