"""RooflineLatency computes a step's time from a model's shape and a machine's figures, kernel group by kernel group.

    matrices    the greater of arithmetic (2 flops a parameter and token) and reading the weights once, and of the other
                what is not hidden behind it; narrow products get less of the arithmetic
    head        the same, for the tokens that are drawn
    attention   the greater of arithmetic and reading the KV; in decode a line in the context, of few heads a slower one
    collective  with TP, a layer's ring all-reduces: 2 (tp - 1) hops, 2 (tp - 1) / tp of the activations on the link
    pipeline    with PP, a stage is 1/pp of the layers and of the head, and passes the activations on
    overhead    once a layer, once a step, once a step of prompts, once a request

They run one after another, so their times add up; nothing here is fitted to a model. Ceilings, and the share of them
that an engine gets, come from the hardware file. All shares are taken when the object is made: asking costs little.

KV leaves by as many links as GPUs hold different parts of it: a TP degree above the number of KV heads adds none. The
link is that of the sender and of the receiver: `with_peer` narrows it to the fewer of both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from placement.catalogs.base import Degrees
from placement.latency.base import DecodeLine, LatencyModel
from placement.latency.hardware import Hardware
from placement.latency.model_shape import ModelShape
from placement.latency.scaled import ScaledLatency


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineLatency:
    """Seconds, of one stage and one GPU of it: all of its GPUs do the same at the same time."""

    source: str
    stages: int
    matrix_s_per_token: float
    dense_weights_s: float  # reading what every step reads
    expert_weights_s: float  # reading all experts
    expert_miss: float  # probability that a token is not sent to a given expert; 1 where there are none
    head_s_per_row: float
    head_weights_s: float
    exposed: float  # share of the lesser of arithmetic and reading that the greater does not hide
    attention_s_per_pair: float  # one token attending to one other, in every layer
    half_batch: float  # requests whose KV a decode step reads half as fast as that of many
    read_s_per_token: float  # reading the KV of one token of context, in every layer
    window_share: float  # of layers, that look no further back than `window` tokens
    window: int
    reduce_s_per_token: float  # all-reduces and passing on, by bytes
    fixed_s: float  # hops, launches, step
    prefill_step_s: float
    request_s: float
    link_s_per_token: float  # the KV of a token over all links of the worker
    link_parts: int  # links that carry different parts of the KV
    prefill_factor: float = 1.0  # of a power cap
    decode_factor: float = 1.0

    def prefill_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        if not chunks:
            return 0.0
        tokens = sum(length for length, _ in chunks)
        work_s = self._matrices_s(tokens, len(chunks)) + self._attention_s(chunks)
        return work_s * self.prefill_factor + self.prefill_step_s + self._around_s(len(chunks))

    def decode_line(self, batch_size: int, context_tokens: int) -> DecodeLine:
        base_s = self._matrices_s(batch_size, batch_size) * self.decode_factor + self._around_s(batch_size)
        read_s = self.read_s_per_token * (1 + self.half_batch / batch_size)
        full = max(self.attention_s_per_pair, read_s) * self.decode_factor
        if not self.window_share:
            return DecodeLine(base_s + full * context_tokens, full)
        reach = batch_size * self.window  # beyond it windowed layers read no more; requests taken to be alike
        near, far = min(context_tokens, reach), max(0, context_tokens - reach)
        slope = full * (1 - self.window_share)
        step_s = base_s + full * near + slope * far
        if context_tokens < reach:
            return DecodeLine(step_s, full, until_tokens=reach)
        return DecodeLine(step_s, slope)

    def mixed_s(self, chunks: Sequence[tuple[int, int]], batch_size: int, context_tokens: int) -> float:
        """The matrices see all tokens at once; attention is done for each part."""
        if not batch_size:
            return self.prefill_s(chunks)
        line = self.decode_line(batch_size, context_tokens)
        if not chunks:
            return line.step_s
        tokens = sum(length for length, _ in chunks) + batch_size
        matrices_s = self._matrices_s(tokens, len(chunks) + batch_size)
        decode_attention_s = line.step_s - self._around_s(batch_size)
        decode_attention_s -= self._matrices_s(batch_size, batch_size) * self.decode_factor
        prompts_s = (matrices_s + self._attention_s(chunks)) * self.prefill_factor + self.prefill_step_s
        return prompts_s + decode_attention_s + self._around_s(len(chunks) + batch_size)

    def transfer_s(self, num_tokens: int) -> float:
        return num_tokens * self.link_s_per_token / self.link_parts

    def with_peer(self, peer: RooflineLatency) -> RooflineLatency:
        """KV goes to (or comes from) a worker of other degrees: the side with fewer links holds the other up."""
        if self.link_s_per_token >= peer.link_s_per_token:
            return replace(self, link_parts=min(self.link_parts, peer.link_parts))
        return replace(self, link_parts=min(self.link_parts, peer.link_parts), link_s_per_token=peer.link_s_per_token)

    def _matrices_s(self, tokens: int, rows: int) -> float:
        weights_s = self.dense_weights_s
        if self.expert_miss < 1.0:
            weights_s += self.expert_weights_s * (1.0 - self.expert_miss**tokens)
        layers_s = self._overlapped_s(self.matrix_s_per_token * tokens, weights_s)
        head_s = self._overlapped_s(self.head_s_per_row * rows, self.head_weights_s)
        return layers_s + head_s + self.reduce_s_per_token * tokens

    def _around_s(self, rows: int) -> float:
        return self.fixed_s + self.request_s * rows

    def _overlapped_s(self, compute_s: float, read_s: float) -> float:
        return max(compute_s, read_s) + self.exposed * min(compute_s, read_s)

    def _attention_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        pairs, read = 0.0, 0
        for length, context in chunks:
            own = length * (context + (length + 1) / 2)
            if self.window_share:
                own += self.window_share * (min(own, float(length * self.window)) - own)
            pairs += own
            read += length + context
        return max(pairs * self.attention_s_per_pair, read * self.read_s_per_token)


def narrowed(latency: LatencyModel, peers: Iterable[LatencyModel]) -> LatencyModel:
    """A worker's times where its KV goes to any of the peers: over the narrowest of their links."""
    for peer in peers:
        if isinstance(peer, ScaledLatency):
            peer = peer.model  # held to less power, its link is as wide
        if isinstance(latency, RooflineLatency) and isinstance(peer, RooflineLatency):
            latency = latency.with_peer(peer)
    return latency


def roofline_latency(
    shape: ModelShape,
    hardware: Hardware,
    degrees: Degrees = Degrees(),  # noqa: B008 - a frozen value
    *,
    power_cap: float = 1.0,
    within_node: bool = True,
) -> RooflineLatency:
    """`within_node` False: the KV leaves over the link between nodes. TP groups larger than a node reduce over it, too.

    Raises PlanError for a dtype or a power cap that the hardware file does not know.
    """
    tp, pp = degrees.tp, degrees.pp
    is_one_node = tp <= hardware.gpus_per_node
    width = math.sqrt(shape.active_params / shape.num_layers / tp)
    matrix_flops = hardware.matrix_flops_for(shape.compute_dtype, width)
    plain_flops = hardware.flops_for(shape.dtype)
    weight_bps = hardware.memory_bytes_per_s * hardware.efficiency.decode_bandwidth.value
    gpus = tp * pp
    experts_bytes = shape.num_moe_layers * shape.experts * shape.expert_params * shape.weight_bits / 8
    attention_flops = plain_flops * hardware.efficiency.attention_flops.value
    pair_flops = 2.0 * shape.num_layers * shape.heads * (shape.k_dim + shape.v_dim)
    read_bps = hardware.memory_bytes_per_s * hardware.efficiency.attention_bandwidth.value
    kv_heads = kv_heads_per_gpu(shape, tp)
    held = shape.num_layers * kv_heads * (shape.k_dim + shape.v_dim) * shape.kv_dtype_bytes
    cap = hardware.cap(power_cap)
    link = (hardware.node_link_bytes_per_s if within_node else hardware.cross_link_bytes_per_s) * (
        hardware.efficiency.link.value
    )
    return RooflineLatency(
        source=f"roofline of {shape.name} on {hardware.name}, {degrees}"
        + (f", {power_cap:.0%} power" if power_cap < 1 else ""),
        stages=pp,
        matrix_s_per_token=shape.flops_per_token / gpus / matrix_flops,
        dense_weights_s=shape.dense_bytes / gpus / weight_bps,
        expert_weights_s=experts_bytes / gpus / weight_bps,
        expert_miss=1.0 - shape.experts_per_token / shape.experts if shape.experts else 1.0,
        head_s_per_row=shape.head_flops / gpus / (plain_flops * hardware.efficiency.prefill_flops.value),
        head_weights_s=shape.head_bytes / gpus / weight_bps,
        exposed=1.0 - hardware.efficiency.overlap.value,
        attention_s_per_pair=pair_flops / gpus / attention_flops,
        read_s_per_token=held / pp / read_bps,
        half_batch=hardware.efficiency.half_heads.value / kv_heads,
        window_share=shape.num_window_layers / shape.num_layers,
        window=shape.window,
        reduce_s_per_token=_reduce_s_per_token(shape, hardware, degrees, is_one_node),
        fixed_s=_fixed_s(shape, hardware, degrees, is_one_node),
        prefill_step_s=hardware.overhead.prefill_step_s.value / pp,
        request_s=hardware.overhead.request_s.value / pp,
        link_s_per_token=shape.kv_bytes_per_token / link,
        link_parts=min(tp, shape.kv_heads) * pp,
        prefill_factor=cap.prefill_time,
        decode_factor=cap.decode_time,
    )


def kv_heads_per_gpu(shape: ModelShape, tp: int) -> int:
    """A KV head that cannot be cut is held by several GPUs."""
    return max(1, math.ceil(shape.kv_heads / tp))


def _reduce_s_per_token(shape: ModelShape, hardware: Hardware, degrees: Degrees, is_one_node: bool) -> float:
    """A layer's all-reduces of hidden activations over a ring; one hand-over of them a stage."""
    link = hardware.node_link_bytes_per_s if is_one_node else hardware.cross_link_bytes_per_s
    row_bytes = shape.hidden * shape.dtype_bytes
    shares = 2 * (degrees.tp - 1) / degrees.tp
    reduced_bytes = shape.reduces_per_layer * shape.num_layers / degrees.pp * row_bytes
    reduce_s = reduced_bytes * shares / (link * hardware.efficiency.collective.value)
    pass_link = _stage_link(hardware, degrees)
    pass_s = row_bytes / degrees.tp / (pass_link * hardware.efficiency.link.value) if degrees.pp > 1 else 0.0
    return reduce_s + pass_s


def _stage_link(hardware: Hardware, degrees: Degrees) -> float:
    fits = degrees.gpus <= hardware.gpus_per_node
    return hardware.node_link_bytes_per_s if fits else hardware.cross_link_bytes_per_s


def _fixed_s(shape: ModelShape, hardware: Hardware, degrees: Degrees, is_one_node: bool) -> float:
    overhead = hardware.overhead
    hop_s = overhead.hop_s.value if is_one_node else overhead.cross_hop_s.value
    layers = shape.num_layers / degrees.pp
    reduce_s = overhead.reduce_s.value + 2 * (degrees.tp - 1) * hop_s if degrees.tp > 1 else 0.0
    hops_s = layers * shape.reduces_per_layer * reduce_s
    pass_s = overhead.cross_hop_s.value if degrees.pp > 1 else 0.0
    return hops_s + layers * overhead.layer_s.value + pass_s + overhead.step_s.value / degrees.pp
