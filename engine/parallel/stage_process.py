"""A stage of a pipeline-parallel worker before its last one, in a process of its own (rank.py begins it).

    begin (options, number) -> load, cut, prepare -> loaded | refused -> seat -> [map, step ...] till the leader ends

It decides nothing and keeps no queue: each step that the leader sends it computes over the leader's KV pages, from
token ids or from the hidden states of the stage before, in the order in which the leader sent them.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

import torch

from engine.loading.platform import Platform
from engine.options import EngineOptions
from engine.paged_model import PagedModel
from engine.pages.memory import KvMemory
from engine.parallel.frames import Channel, Frame
from engine.parallel.messages import hidden_frame, hidden_of, mapped_of, step_of
from engine.parallel.stages import cut_model
from engine.weights import loader
from engine.weights.config import served_config
from engine.weights.stage import Part, PassLeaves, Stage


class Neighbour(Exception):
    """A stage beside this one is gone; the leader has heard, or will."""


@dataclass(frozen=True, slots=True)
class LoadedStage:
    """What a stage has of the model, ready to run."""

    model: PagedModel
    part: Part


def load_stage(options: EngineOptions, stage: Stage, platform: Platform) -> LoadedStage:
    """As the leader loads, but for the checks that are its own. Raises UnsupportedModel."""
    served = served_config(options)
    module, whole = loader.load_probed(options.model, served)
    part = cut_model(module, whole, stage)
    return LoadedStage(platform.prepare(module, whole, options, served), part)


class StageProcess:
    def __init__(self, leader: Channel, stage: Stage, loaded: LoadedStage) -> None:
        self._leader = leader
        self._stage = stage
        self._loaded = loaded
        self._into: Channel | None = None  # from the stage before; none at the first
        self._out = leader  # of the stage before the last; else to the next one
        self._pages: KvMemory | None = None  # until the leader has sent its memory

    def serve(self) -> None:
        """Run what the leader sends until it ends."""
        while (frame := self._leader.receive()) is not None:
            if frame.kind == "map":
                self._pages = mapped_of(frame)
                self._pages.close()
            elif frame.kind == "seat":
                self._sit(list(frame.files))
            elif frame.kind == "step":
                try:
                    self._step(frame)
                except Neighbour:
                    continue  # the leader ends us, or ends

    def _sit(self, ends: list[int]) -> None:
        if not self._stage.is_first:
            self._into = Channel(socket.socket(fileno=ends.pop(0)))
        if ends:
            self._out = Channel(socket.socket(fileno=ends.pop()))

    def _step(self, frame: Frame) -> None:
        meta, _ = step_of(frame)
        step, entry = int(frame.fields["step"]), self._loaded.part.entry
        if self._into is not None:
            entry.hidden = self._received(self._into, step)

        def tell(layer: int) -> None:
            self._leader.send(Frame("layer", {"step": step, "layer": layer}))

        assert self._pages is not None, "a step before its memory"
        try:
            self._loaded.model.run_alone(self._pages, meta, None, tell if frame.fields["tells"] else None)
        except PassLeaves as leaves:
            self._send(hidden_frame(step, leaves.hidden))

    def _received(self, into: Channel, step: int) -> torch.Tensor:
        arrived = into.receive()
        if arrived is None:
            raise Neighbour
        if arrived.fields["step"] != step:
            raise RuntimeError(f"step {step} is to be computed, and the rows of step {arrived.fields['step']} came")
        return hidden_of(arrived)

    def _send(self, frame: Frame) -> None:
        try:
            self._out.send(frame)
        except ConnectionError:
            raise Neighbour from None
