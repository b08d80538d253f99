"""The probe learns a model by one short forward: the shape of each attention call's K and V, and its mask's pattern;
and of what layers keep beside KV (engine/state).

Nothing is attended. The masks of this forward are filled with their own pattern's code, so that the code reaches the
layers the mask was made for. What paged attention does not know is refused here, by the layer's name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.attention.held import held_by
from engine.errors import UnsupportedModel
from engine.pages.layout import LayerKv, LayerState

LAYER = "kvrelay_layer"  # attribute of an attention module, or of one with a state: its number among the calls

FULL = 0.0  # what the probe's masks are filled with: this, a window's width, a chunk's below 0, or OTHER
OTHER = 0.5
LONGEST = 1 << 24  # tokens of a window or a chunk: what is beyond is a mask's own filling


@dataclass(frozen=True, slots=True)
class LayerProbe:
    kv: LayerKv
    dtype: torch.dtype
    num_heads: int
    window: int
    scaling: float
    chunk: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    has_slopes: bool = False


@dataclass(slots=True)
class Probe:
    """What one short forward of `num_tokens` tokens showed. Layers are numbered in the order of the calls."""

    num_tokens: int
    layers: list[LayerProbe | LayerState] = field(default_factory=list)
    layer_of: dict[int, int] = field(default_factory=dict)  # id(module) -> layer

    @property
    def shapes(self) -> tuple[LayerKv | LayerState, ...]:
        """What pages hold of each layer."""
        return tuple(layer.kv if isinstance(layer, LayerProbe) else layer for layer in self.layers)

    @property
    def attentions(self) -> list[LayerProbe]:
        return [layer for layer in self.layers if isinstance(layer, LayerProbe)]

    @property
    def has_states(self) -> bool:
        return any(isinstance(layer, LayerState) for layer in self.layers)

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of all attention calls; float32 where there is none, and no KV."""
        return next((layer.dtype for layer in self.attentions), torch.float32)

    def attention(self, layer: int) -> LayerProbe:
        found = self.layers[layer]
        assert isinstance(found, LayerProbe), f"layer {layer} does not attend"
        return found

    def state(self, layer: int) -> LayerState:
        found = self.layers[layer]
        assert isinstance(found, LayerState), f"layer {layer} keeps no state"
        return found

    def record_state(self, module: torch.nn.Module, shape: LayerState) -> None:
        self._number(module)
        self.layers.append(shape)

    def record(
        self,
        module: torch.nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        code: float,
        scaling: float | None,
        softcap: float | None,
        has_sinks: bool,
        has_slopes: bool,
    ) -> None:
        if k.shape[2] != self.num_tokens or q.shape[2] != self.num_tokens:
            raise UnsupportedModel(
                f"{type(module).__name__} attends over {k.shape[2]} keys for {self.num_tokens} tokens: "
                "its keys are not one for each token"
            )
        kv = LayerKv(kv_heads=k.shape[1], k_dim=k.shape[3], v_dim=v.shape[3])
        self._number(module)
        scaling = q.shape[-1] ** -0.5 if scaling is None else float(scaling)
        window, chunk = max(0, int(code)), max(0, -int(code))
        self.layers.append(
            LayerProbe(kv, k.dtype, q.shape[1], window, scaling, chunk, softcap or 0.0, has_sinks, has_slopes)
        )

    def _number(self, module: torch.nn.Module) -> None:
        """The module's layer is the next."""
        if id(module) in self.layer_of:
            raise UnsupportedModel(
                f"{type(module).__name__} is called twice in one forward pass, which pages cannot hold"
            )
        self.layer_of[id(module)] = len(self.layers)
        object.__setattr__(module, LAYER, len(self.layers))


def probe_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *args: Any,
    kvrelay: Probe | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    is_causal: bool | None = None,
    slopes: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    block_indices: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    name = type(module).__name__
    if kvrelay is None:
        kvrelay = held_by(module)
    if kvrelay is None:
        raise UnsupportedModel(
            f"{name} does not get the forward's keyword arguments, through which attention reaches the pages"
        )
    if position_bias is not None:
        raise UnsupportedModel(f"{name} adds a position bias to its scores, which paged attention does not know")
    if indices is not None or block_indices is not None:
        raise UnsupportedModel(
            f"{name} attends to those keys that an index chooses anew for each token, and paged attention to all"
        )
    if is_causal is False:
        raise UnsupportedModel(f"{name} attends in both directions; only causal attention can be served from pages")
    code = _code(name, attention_mask, sliding_window)
    kvrelay.record(module, query, key, value, code, scaling, softcap, s_aux is not None, slopes is not None)
    out = query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    return out, None


def _code(name: str, mask: torch.Tensor | None, sliding_window: int | None) -> float:
    """Of the layer's mask (its own eager path obeys the mask); without a mask, the width it names."""
    if mask is None:
        return float(sliding_window or 0)
    codes = set(mask.flatten().tolist()) if isinstance(mask, torch.Tensor) else {OTHER}
    code: float = codes.pop()
    if codes or code == OTHER or not -LONGEST < code < LONGEST:
        raise UnsupportedModel(
            f"{name} carries a pattern in its mask that is neither causal nor a sliding window nor in chunks, "
            "and paged attention knows only these"
        )
    return code


def probe_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *args: Any,
    mask_function: Callable[..., Any],
    config: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """A mask filled with its own pattern's code, so that the code reaches the layers the mask was made for."""
    code = _pattern(mask_function, getattr(config, "kvrelay_max_len", q_length))
    return torch.full((batch_size, 1, q_length, kv_length), code, dtype=torch.float64)


def _pattern(mask_function: Callable[..., Any], max_len: int) -> float:
    """FULL, a window's width, a chunk's below 0, or OTHER: by asking who sees the first position, and for whole rows
    of the mask at several positions up to max_len."""
    zero = torch.zeros((), dtype=torch.long)

    def seen(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(mask_function(zero, zero, queries, keys)).expand(keys.shape)

    try:
        queries = torch.arange(max_len)
        width = int(seen(queries, torch.zeros_like(queries)).sum())
        starts = []
        asked = sorted({0, 1, max_len // 3, max_len // 2, max_len - 1, min(width, max_len - 1)})
        for query in asked:
            keys = torch.arange(query + 3)
            allowed = seen(torch.full_like(keys, query), keys)
            starts.append(query + 1 - int(allowed.sum()))
            if not bool(allowed[starts[-1] : query + 1].all()):
                return OTHER
    except (IndexError, RuntimeError, TypeError):
        return OTHER  # it reads tensors of the prompt's own size
    if width == max_len:
        return FULL if not any(starts) else OTHER
    if starts == [max(0, query + 1 - width) for query in asked]:
        return float(width)
    return -float(width) if width and starts == [query - query % width for query in asked] else OTHER
