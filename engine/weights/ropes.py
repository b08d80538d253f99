"""Rotary embeddings whose frequencies go by a request's length (LengthRope), made for each row of a packed step.

transformers takes one length for a whole forward, that of its longest sequence, and keeps it for the next one. Ours
stands in place of the module's `forward`: it gives the module's own code a table with frequencies of each row, which it
multiplies by their positions. What a module makes of that is held against what it makes of each length by itself.

Shapes: T rows, F frequencies.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.attention.forward_pass import ForwardPass
from engine.attention.held import held_by
from engine.errors import UnsupportedModel
from engine.types import LengthRope
from engine.weights.config import first_sentence

CLOSE = 4e-7  # of an angle, for each position: a few units in the last place of its frequency


def adopt(model: PreTrainedModel, rope: LengthRope | None) -> None:
    """Have each row turned for its own length. Raises UnsupportedModel for a module that cannot be told lengths."""
    if rope is None:
        return
    rotaries = [module for module in model.modules() if hasattr(module, "original_inv_freq")]
    turned = []
    try:
        for rotary in rotaries:
            turned.append(TurnedByLength(rotary, rope))
            _check(turned[-1])
    except Exception as error:  # a module's own code may want its frequencies in another form
        raise _refusal(model, rope, first_sentence(error)) from error
    if not turned:
        raise _refusal(model, rope, "it has no rotary module of the known kind")
    for rotary, ours in zip(rotaries, turned, strict=True):
        object.__setattr__(rotary, "forward", ours)


def move(model: PreTrainedModel, device: torch.device) -> None:
    """All of the model to the device, what turns its rows by length included."""
    model.to(device)
    for module in model.modules():
        if isinstance(ours := module.__dict__.get("forward"), TurnedByLength):
            ours.move(device)


def _refusal(model: PreTrainedModel, rope: LengthRope, why: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{type(model).__name__} has RoPE whose frequencies follow the longest request of a batch beyond {rope.limit} "
        f"tokens, and they cannot be made for each request: {why}; set max_model_len to at most {rope.limit}"
    )


class TurnedByLength:
    """In place of a rotary module's forward. Outside of a pass over pages it is the module's own."""

    def __init__(self, rotary: nn.Module, rope: LengthRope) -> None:
        config: Any = rotary.config
        self.rotary = rotary
        self.rope = rope
        self.own = rotary.forward
        self._plain = inspect.unwrap(type(rotary).forward)  # without the choice of one length for all rows
        # transformers before 5.18 multiplies each sequence's positions by a column: there each row is a sequence
        self._is_by_sequence = "inv_freq[None, :, None]" in inspect.getsource(self._plain)
        self._short_F: torch.Tensor = rotary.original_inv_freq.detach().clone()  # type: ignore[operator]
        self._long_F, self.device = self._short_F, self._short_F.device
        if rope.is_dynamic:
            parameters, count = config.rope_parameters, self._short_F.shape[0]
            self._theta, self._factor = float(parameters["rope_theta"]), float(parameters["factor"])
            self._exponents_F = torch.arange(count, dtype=torch.float64, device=self.device) / count
        else:
            make = ROPE_INIT_FUNCTIONS["longrope"]
            self._long_F, _ = make(config, self.device, seq_len=rope.limit + 1)

    def move(self, device: torch.device) -> None:
        self.device = device
        self._short_F, self._long_F = self._short_F.to(device), self._long_F.to(device)
        if self.rope.is_dynamic:
            self._exponents_F = self._exponents_F.to(device)

    def __call__(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        state = held_by(self.rotary)
        if not isinstance(state, ForwardPass):
            return self.own(x, position_ids)
        lengths_T = state.meta.rope_lengths
        return self.turned(x, position_ids, state.meta.positions + 1 if lengths_T is None else lengths_T)

    def turned(self, x: torch.Tensor, position_ids: torch.Tensor, lengths_T: torch.Tensor) -> Any:
        """What the module makes of positions [1, T] with each one's length."""
        frequencies_TF = self._frequencies(lengths_T)
        if not self._is_by_sequence:
            return self._plain(_WithFrequencies(self.rotary, frequencies_TF), x, position_ids)
        made = self._plain(_WithFrequencies(self.rotary, _OfSequences(frequencies_TF)), x, position_ids.T)
        return tuple(part.transpose(0, 1) for part in made) if isinstance(made, tuple) else made.transpose(0, 1)

    def _frequencies(self, lengths_T: torch.Tensor) -> torch.Tensor:
        lengths_T1 = lengths_T[:, None]
        long_TF = self._ntk(lengths_T1) if self.rope.is_dynamic else self._long_F
        return torch.where(lengths_T1 > self.rope.limit, long_TF, self._short_F)

    def _ntk(self, lengths_T1: torch.Tensor) -> torch.Tensor:
        """transformers' _compute_dynamic_ntk_parameters, in float64, so that no bit of a row depends on the others."""
        dim = 2 * self._exponents_F.shape[0]
        scale_T1 = self._factor * lengths_T1.double().clamp_min(self.rope.limit) / self.rope.limit - (self._factor - 1)
        base_T1 = self._theta * scale_T1 ** (dim / (dim - 2))
        return (base_T1**-self._exponents_F).to(self._short_F.dtype)


class _WithFrequencies:
    """A rotary module as its own code sees it, but for its frequencies, [T, F] of each row."""

    def __init__(self, rotary: nn.Module, inv_freq: torch.Tensor | _OfSequences) -> None:
        self._rotary = rotary
        self.inv_freq = inv_freq

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rotary, name)


class _OfSequences:
    """Frequencies [T, F] where a module's code asks for those of all sequences as [1, F, 1]."""

    def __init__(self, frequencies_TF: torch.Tensor) -> None:
        self._frequencies_TF1 = frequencies_TF[..., None]

    def __getitem__(self, key: tuple[Any, ...]) -> torch.Tensor:
        return self._frequencies_TF1


def _check(ours: TurnedByLength) -> None:
    """Raise ValueError when rows of several lengths together are not as the module turns each length alone."""
    limit, device = ours.rope.limit, ours.device
    x = torch.zeros(1, 1, 1, device=device)
    lengths = [length for length in (limit, limit + 1, limit + 8) for _ in range(2)]
    positions = torch.tensor([at for length in lengths[::2] for at in (1, length - 1)], device=device)
    together = ours.turned(x, positions[None], torch.tensor(lengths, device=device))
    for first in range(0, len(lengths), 2):
        rows = slice(first, first + 2)
        alone = copy.deepcopy(ours.rotary)(x, positions[None, rows])  # what it keeps of a length is the copy's
        for mine, wanted in zip(together, alone, strict=True):
            if not torch.allclose(mine[:, rows], wanted, rtol=0.0, atol=CLOSE * lengths[first] + 1e-6):
                raise ValueError(f"{type(ours.rotary).__name__} turns rows of several lengths otherwise than alone")
