"""Mixers are a model's layers that keep a state beside KV: linear attention, state spaces, short convolutions. Each
runs its own code over the pieces of a step, with transformers' own cache layer filled from the pages.

They are known by that they update such a layer (transformers.cache_utils.LinearAttentionLayer), by whatever name. The
parity check at load holds every one against its own eager code, over chunks and single tokens.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import cache_utils
from transformers.cache_utils import Cache

from engine.adapters.products import BARE
from engine.attention.forward_pass import ForwardPass
from engine.attention.held import held_by
from engine.attention.probe import LAYER, Probe
from engine.errors import UnsupportedModel
from engine.pages.layout import LayerState, StateTensor
from engine.state.pieces import NOTHING, Piece
from engine.upload_guard import uploaded

CACHES = ("cache_params", "past_key_values")  # parameters of a mixer's forward that take one
GRIFFIN = "RecurrentGemmaRecurrentBlock"
UPDATES = ("update_conv_state(", "update_recurrent_state(", "set_linear_cache(")
STATE = re.compile(r"state_idx=(\d+)")  # of several that a layer has
WEIGHT = re.compile(r"self\.(\w+)\.weight\b")  # of a part that the mixer multiplies by itself

# [B, T, in] and their states, which it changes -> [B, T, out], or that and more
Run = Callable[[torch.Tensor, "_Cache"], Any]


def adopt(model: nn.Module) -> None:
    """Put ours in the place of every mixer's forward. Raises UnsupportedModel for one whose state is not its own."""
    for module in model.modules():
        if _is_mixer(module):
            object.__setattr__(module, "forward", _Mixer(module))
            for name in WEIGHT.findall(_source(module)):
                object.__setattr__(getattr(module, name), BARE, True)


def has_any(model: nn.Module) -> bool:
    """That `adopt` has found."""
    return any(isinstance(module.forward, _Mixer) for module in model.modules())


def _source(module: nn.Module) -> str:
    """Of its class; empty for one that is not of transformers' models."""
    kind = type(module)
    return _source_of(kind.__module__, kind.__name__) if kind.__module__.startswith("transformers.models.") else ""


@cache
def _source_of(module_name: str, class_name: str) -> str:
    try:
        return inspect.getsource(getattr(sys.modules[module_name], class_name))
    except (AttributeError, OSError, TypeError):
        return ""


def _is_mixer(module: nn.Module) -> bool:
    source, name = _source(module), type(module).__name__
    if name == GRIFFIN:
        return True
    if not any(update in source for update in UPDATES):
        return False
    if ".update(" in source or not cache_name(module):
        raise UnsupportedModel(f"{name} keeps KV and a state in one module, which pages cannot hold")
    return True


def cache_name(module: nn.Module) -> str:
    """Of the parameter that a cache comes in; empty: none."""
    return next((name for name in inspect.signature(type(module).forward).parameters if name in CACHES), "")


def _with_cache(module: Any) -> Run:
    own, name = module.forward, cache_name(module)
    _, *others = inspect.signature(own).parameters.values()
    wanted = [each.name for each in others if each.default is each.empty and each.kind != each.VAR_KEYWORD]
    nothing = dict.fromkeys(each for each in wanted if each != name)

    def run(hidden: torch.Tensor, states: _Cache) -> Any:
        return own(hidden, **nothing, **{name: states})

    return run


def _griffin(module: Any) -> Run:
    """RecurrentGemma's block keeps its state in itself (arXiv 2402.19427)."""
    own = module.forward

    def run(hidden: torch.Tensor, states: _Cache) -> Any:
        conv, recurrent = states.only.conv_states, states.only.recurrent_states
        module.conv1d_state, module.rg_lru.recurrent_states = conv[0], recurrent[0]
        positions = torch.arange(hidden.shape[1], device=hidden.device) + int(states.is_filled)  # 0: it begins
        mixed = own(hidden, positions[None].expand(len(hidden), -1), None, use_cache=True)
        conv[0], recurrent[0] = module.conv1d_state, module.rg_lru.recurrent_states
        module.conv1d_state = module.rg_lru.recurrent_states = None
        states.is_filled = True
        return mixed

    return run


class _Mixer:
    """A mixer's forward, in the place of its own."""

    def __init__(self, module: Any) -> None:
        source, is_griffin = _source(module), type(module).__name__ == GRIFFIN
        self._module = module
        self._own = module.forward
        self._run_own = _griffin(module) if is_griffin else _with_cache(module)
        self._by_tokens = is_griffin or (UPDATES[1] in source and "initial_state" not in source)  # once it has a state
        numbers = [int(number) for number in STATE.findall(source)]
        self._num_states = 1 + max([getattr(module, "conv_idx", 0), *numbers])
        self._gives_more = False  # than what is mixed: its layer takes two things from it
        self._spares_recurrent = False  # it makes new ones of those that it reads, and does not change them

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """[1, T, in] -> [1, T, out]."""
        state = held_by(self._module)
        if isinstance(state, Probe):
            mixed = self._probe(hidden_states, state)
        elif isinstance(state, ForwardPass):
            mixed = self._in_pieces(hidden_states, state)
        else:
            return self._own(hidden_states, *args, **kwargs)  # the model's own word
        return (mixed, None) if self._gives_more else mixed

    def _probe(self, hidden: torch.Tensor, probe: Probe) -> torch.Tensor:
        """Row by row: no Linear in it sees all rows, so that none is thought to be one that adapters may change. Of
        random rows, for of nothing a state may stay nothing."""
        states = _Cache(self._num_states)
        generator = torch.Generator().manual_seed(0)
        first, second = torch.randn(hidden.shape, generator=generator).to(hidden).split(1, dim=1)
        mixed = self._run(first, states)
        recurrent = states.tensors[1]
        before = [each.clone() for each in recurrent]
        mixed = torch.cat([mixed, self._run(second, states)], dim=1)
        self._spares_recurrent = all(torch.equal(x, y) for x, y in zip(recurrent, before, strict=True))
        probe.record_state(self._module, states.shape)
        return mixed

    def _in_pieces(self, hidden: torch.Tensor, state: ForwardPass) -> torch.Tensor:
        assert state.states is not None, "a model with mixers has states"
        layer: int = getattr(self._module, LAYER)
        pieces, mixed = state.states.pieces, None
        for group in [*([each] for each in pieces.one_by_one), *([pieces.together] if pieces.together else [])]:
            rows: Any = slice(group[0].begin, group[0].end)
            if len(group) > 1:
                rows = uploaded([piece.begin for piece in group], hidden.device)
            x = hidden[0, rows]
            out = self._mix(x[None] if len(group) == 1 else x[:, None], group, layer, state).flatten(0, 1)
            if mixed is None:
                mixed = out.new_zeros(1, hidden.shape[1], out.shape[-1])  # padding, too
            mixed[0, rows] = out
        assert mixed is not None, "a step has rows"
        state.tell(layer)
        return mixed

    def _mix(self, x_BTN: torch.Tensor, group: Sequence[Piece], layer: int, state: ForwardPass) -> torch.Tensor:
        assert state.states is not None, "a model with mixers has states"
        shape, states = state.probe.state(layer), _Cache(self._num_states)
        read, write = uploaded([[each.read, each.write] for each in group], x_BTN.device).T
        if group[0].read != NOTHING:
            in_place = any(each.read == each.write for each in group)
            spared = self._spares_recurrent
            states.put(shape, *state.states.read(layer, shape, read, will_be_written=in_place, is_spared=spared))
        out = self._run(x_BTN, states)
        state.states.write(layer, shape, write, *states.tensors)
        return out

    def _run(self, hidden_BTN: torch.Tensor, states: _Cache) -> torch.Tensor:
        parts = hidden_BTN.split(1, dim=1) if self._by_tokens and states.is_filled else (hidden_BTN,)
        mixed = [self._run_own(part, states) for part in parts]
        if isinstance(mixed[0], tuple):
            self._gives_more, mixed = True, [each for each, *_ in mixed]
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=1)


class _OneLayer(cache_utils.LinearAttentionLayer):  # type: ignore[misc]  # transformers has no types
    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **_: Any) -> torch.Tensor:
        """In the place of the old ones, which stay as they were: they are copies of what the pages hold."""
        old = self.recurrent_states[state_idx]
        new = recurrent_states if old is None else recurrent_states.to(old.dtype)
        self.recurrent_states[state_idx], self.is_recurrent_states_initialized[state_idx] = new, True
        return new


class _Cache(Cache):  # type: ignore[misc]  # transformers has no types
    """transformers' own, of one layer under whatever number."""

    def __init__(self, num_states: int) -> None:
        self.only = _OneLayer(num_states)
        self.is_filled = False
        super().__init__(layers=_Always(self.only))

    def put(self, shape: LayerState, conv: Sequence[torch.Tensor], recurrent: Sequence[torch.Tensor]) -> None:
        """Be what was kept of as many requests."""
        only, self.is_filled = self.only, True
        for each, tensor in zip(shape.conv, conv, strict=True):
            only.conv_states[each.number], only.conv_kernel_size[each.number] = tensor, tensor.shape[-1]
            only.is_conv_states_initialized[each.number] = only.has_previous_state[each.number] = True
            only.dtype, only.device = tensor.dtype, tensor.device
        for each, tensor in zip(shape.recurrent, recurrent, strict=True):
            only.recurrent_states[each.number] = tensor
            only.is_recurrent_states_initialized[each.number] = only.has_previous_state[each.number] = True

    def get_linear_cache(self, _: int) -> torch.Tensor | None:
        """As MiniMax's own has it."""
        state: torch.Tensor | None = self.only.recurrent_states[0]
        return state

    def set_linear_cache(self, _: int, state: torch.Tensor) -> None:
        self.only.update_recurrent_state(state)

    @property
    def tensors(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        conv, recurrent = self.only.conv_states, self.only.recurrent_states
        return [x for x in conv.values() if x is not None], [x for x in recurrent.values() if x is not None]

    @property
    def shape(self) -> LayerState:
        """Of one request."""
        conv, recurrent = (
            tuple(
                StateTensor(number, tuple(x.shape[1:]), str(x.dtype).removeprefix("torch."))
                for number, x in states.items()
                if x is not None
            )
            for states in (self.only.conv_states, self.only.recurrent_states)
        )
        return LayerState(conv, recurrent)


class _Always(list[Any]):
    """One thing under every number."""

    def __init__(self, thing: Any) -> None:
        super().__init__([thing])

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, _: Any) -> Any:
        return super().__getitem__(0)
