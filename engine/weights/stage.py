"""What one pipeline stage has of a model: a run of its decoder layers, with Elsewhere in the place of the others.

    embeddings -> Elsewhere ... -> own layers -> Elsewhere -> norm -> head
                  the last one gives   \\          the first one ends the pass, with what the own layers made
                  the rows that came

transformers' own forward runs over a list of as many layers as ever, so that what it makes for them (rotations, masks,
what it knows of a layer by its number) is the whole model's. Where layers hand on more than hidden states, or something
stands between them, the model is refused by name; what a short look cannot see is left to the parity check.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.attention.probe import Probe
from engine.errors import UnsupportedModel


class PassLeaves(Exception):
    """The pass goes on in the next stage, with these hidden states [1, T, N]. No error: whoever ran it takes them."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class Entry:
    """Where the hidden states of the stage before come in. One thread runs a model."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden  # [1, T, N], of the pass that runs

    def take(self, input_ids: torch.Tensor | None) -> torch.Tensor:
        """In place of embeddings."""
        return self.hidden


class Elsewhere(nn.Module):
    """In the place of a layer that another stage computes. `entry`: of the last one before the own layers."""

    def __init__(self, layer: nn.Module, *, is_behind: bool, entry: Entry | None, in_tuple: bool) -> None:
        super().__init__()
        self.is_behind = is_behind
        self.entry = entry
        self._in_tuple = in_tuple
        for name, value in vars(layer).items():  # what a model asks of its layers, such as their kind of attention
            if not name.startswith("_") and isinstance(value, bool | int | float | str):
                self.__dict__.setdefault(name, value)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.is_behind:
            raise PassLeaves(hidden_states)
        hidden = hidden_states if self.entry is None else self.entry.hidden
        return (hidden,) if self._in_tuple else hidden


@dataclass(frozen=True, slots=True)
class Stage:
    """One of `size` stages, from 1 on."""

    number: int
    size: int

    @property
    def is_first(self) -> bool:
        return self.number == 1

    @property
    def is_last(self) -> bool:
        return self.number == self.size

    def run(self, num_layers: int) -> range:
        """Its layers; the first stages have one more where `size` does not divide them, for the last has the head."""
        each, more = divmod(num_layers, self.size)
        begin = (self.number - 1) * each + min(self.number - 1, more)
        return range(begin, begin + each + (self.number <= more))


@dataclass(frozen=True, slots=True)
class Part:
    """What a stage has of a model."""

    layers: range
    entry: Entry  # of the first nobody asks: it has embeddings


def cut(model: PreTrainedModel, probe: Probe, stage: Stage, run_once: Callable[[], object]) -> Part:
    """Leave the model a stage's layers, and the last stage the head. `run_once` runs the whole of it, on a few tokens.

    Raises UnsupportedModel.
    """
    if stage.size == 1:
        return Part(range(len(probe.layers)), Entry(torch.empty(1, 0, 0)))
    name = type(model).__name__
    if probe.has_states:
        raise UnsupportedModel(f"{name} keeps a state beside KV, which is not cut in stages; {_mend(stage)}")
    if stage.size > len(probe.layers):
        raise UnsupportedModel(
            f"pipeline_parallel is {stage.size}, and {name} has {len(probe.layers)} layers; give as many or fewer"
        )
    layers = _layer_list(model, probe)
    if layers is None:
        raise UnsupportedModel(f"{name} has no list of its decoder layers that could be cut; {_mend(stage)}")
    made, in_tuple = _look_at_chain(name, list(layers), run_once, stage)
    run = stage.run(len(layers))
    entry = Entry(made[max(run.start - 1, 0)])
    for i, layer in enumerate(layers):
        if i not in run:
            enters = entry if i == run.start - 1 else None
            layers[i] = Elsewhere(layer, is_behind=i >= run.stop, entry=enters, in_tuple=in_tuple)
    if not stage.is_last:
        _leave_out(model, model.get_output_embeddings())
    return Part(run, entry)


def _leave_out(model: nn.Module, head: nn.Module | None) -> None:
    """By its name: BERT's own setter takes the bias of what it is given."""
    for name in [name for name, module in model.named_modules() if module is head]:
        model.set_submodule(name, nn.Identity())


def _mend(stage: Stage) -> str:
    return f"give pipeline_parallel 1, and not {stage.size}"


def _layer_list(model: nn.Module, probe: Probe) -> nn.ModuleList | None:
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == len(probe.layers):
            numbers = [[probe.layer_of[id(m)] for m in layer.modules() if id(m) in probe.layer_of] for layer in module]
            if numbers == [[i] for i in range(len(module))]:
                return module
    return None


def _look_at_chain(
    name: str, layers: Sequence[nn.Module], run_once: Callable[[], object], stage: Stage
) -> tuple[list[torch.Tensor], bool]:
    """Each layer's hidden states, and whether it gives them in a tuple. Raises UnsupportedModel unless they are
    one [1, T, N], go from each to the next as they are, and nothing else does."""
    made: list[Any] = []  # by each layer, in the order of the calls

    def look(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        taken = args[0] if args else kwargs.get("hidden_states")
        before = _parts(made[-1]) if made else []
        others = [*args[1:], *kwargs.values()] if args else [v for k, v in kwargs.items() if k != "hidden_states"]
        beside = any(value is part for parts in map(_parts, made) for part in parts for value in others)
        fits = all(part.dim() == 3 and part.shape[0] == 1 for part in _parts(output)[:1])  # [1, T, N]
        follows = layer is layers[len(made) % len(layers)] and (not before or taken is before[0])
        if not fits or not follows or beside:
            raise UnsupportedModel(
                f"{name} hands more than hidden states from layer to layer, or not each layer's to the next; "
                f"{_mend(stage)}"
            )
        made.append(output)

    hooks = [layer.register_forward_hook(look, with_kwargs=True) for layer in layers]
    try:
        run_once()
    finally:
        for hook in hooks:
            hook.remove()
    if len(made) != len(layers):
        raise UnsupportedModel(f"{name} ran {len(made)} of its {len(layers)} layers; {_mend(stage)}")
    return [_parts(output)[0] for output in made], isinstance(made[0], tuple)


def _parts(output: Any) -> list[torch.Tensor]:
    """The tensors that a layer gave; its hidden states are the first."""
    return [part for part in (output if isinstance(output, tuple) else (output,)) if isinstance(part, torch.Tensor)]
