"""Passing is what a process does of each pass: rows from the stage before -> its layers, in which its ranks meet ->
rows to the next stage, or logits.

Each rank hands its hidden states to the rank of its number in the next stage: behind their last meeting all have the
same. On CPUs they go as frames over a socket pair, to the leader beside what else is said to it; elsewhere as messages
of a process group (process_group.py).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from engine.parallel.frames import Channel, Frame
from engine.parallel.messages import hidden_frame, hidden_of
from engine.parallel.shard import Position
from engine.types import OnLayer
from engine.weights.stage import Part

logger = logging.getLogger(__name__)


class Into(Protocol):
    def receive(self, num_rows: int) -> torch.Tensor:
        """Hidden states [rows, N] of the next pass, of the stage before. Raises ConnectionError, EngineBroken."""


class Out(Protocol):
    def send(self, hidden_TN: torch.Tensor) -> None:
        """To the next stage. Raises ConnectionError."""


class Passing:
    def __init__(self, position: Position, part: Part, into: Into | None, out: Out | None) -> None:
        """`into`: none of the first stage; `out`: none of the last."""
        self._position = position
        self._part = part
        self._into = into
        self._out = out
        self._on_layer: OnLayer | None = None  # of the pass that runs

    def run(
        self, run_alone: Callable[[OnLayer | None], torch.Tensor], num_rows: int, on_layer: OnLayer | None
    ) -> torch.Tensor:
        """`run_alone` is the pass through this process's layers. `on_layer` is told of each once all ranks of the stage
        have written it, and in the last stage before them of those whose rows have come: they are written, too."""
        if self._into is not None:
            self._part.entry.hidden = self._into.receive(num_rows)[None]
        if self._position.stage.is_last and on_layer is not None:
            for layer in range(self._part.layers.start):
                on_layer(layer)
        self._on_layer = on_layer
        made = run_alone(on_layer if self._position.shard.size == 1 else None)
        if self._out is not None:
            self._out.send(made)
        return made

    def on_met(self, layer: int) -> None:
        """All ranks of the stage have written the layer's KV."""
        if self._on_layer is not None:
            self._on_layer(layer)


class SocketInto:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._number = 0  # of the pass

    def receive(self, num_rows: int) -> torch.Tensor:
        self._number += 1
        arrived = self._channel.receive()
        if arrived is None:
            raise ConnectionError("the stage before is gone")
        return hidden_of(arrived, self._number)


class SocketOut:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._number = 0

    def send(self, hidden_TN: torch.Tensor) -> None:
        self._number += 1
        self._channel.send(hidden_frame(self._number, hidden_TN))


class LayersTold:
    """Tells of a pass's layers in their order, each once. Whoever hears that one is written knows the same of all
    before it: the pass has come that far."""

    def __init__(self, on_layer: OnLayer) -> None:
        self._on_layer = on_layer
        self._next = 0
        self._lock = threading.Lock()

    def up_to(self, layer: int) -> None:
        with self._lock:
            while self._next <= layer:
                self._on_layer(self._next)
                self._next += 1


class News:
    """What stages say to the leader of passes, put by in the thread that listens; and where their rows come in."""

    def __init__(self) -> None:
        self.told: dict[int, LayersTold] = {}  # by the pass; of those whose layers somebody waits for
        self._arrived: deque[Frame] = deque()

    def hear(self, frame: Frame) -> None:
        if frame.kind == "hidden":
            self._arrived.append(frame)
        elif (told := self.told.get(int(frame.fields["step"]))) is not None:
            try:
                told.up_to(int(frame.fields["layer"]))
            except Exception:  # this thread hears of lost processes, too; who ends the pass tells again, and fails
                logger.exception("a layer of step %d could not be told of", frame.fields["step"])

    def has_rows(self) -> bool:
        return bool(self._arrived)

    def take_rows(self, number: int) -> torch.Tensor:
        self.told.pop(number, None)
        return hidden_of(self._arrived.popleft(), number)


class LeaderInto:
    def __init__(self, news: News, wait_for: Callable[[Callable[[], bool]], None]) -> None:
        """`wait_for`: until that is so of what is heard."""
        self._news = news
        self._wait_for = wait_for
        self._number = 0

    def receive(self, num_rows: int) -> torch.Tensor:
        self._number += 1
        self._wait_for(self._news.has_rows)
        return self._news.take_rows(self._number)
