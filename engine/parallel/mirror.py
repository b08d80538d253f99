"""Steps that all processes run alike on GPUs: each has GpuSteps of its own, with graphs of the same sizes.

    leader   step -> frame to every process -> GpuSteps (graph or layers) -> draws -> the drawn ids to all ranks
    others   frame -> step -> GpuSteps, the same way -> take the drawn ids, in place of drawing

So a rank fills in a PENDING token by the code by which the leader does. Where there are stages no step has such a token
(Engine.num_stages), and nobody else has to know what was drawn: the next step brings it. Of what a request asks for,
the others are told which rows are drawn from, and no more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np
import torch

from engine.gpu.steps import Alone
from engine.kept import KeptPages
from engine.parallel.frames import Channel, Frame
from engine.parallel.meetings import nobody
from engine.sampling.device import Drawn, draw
from engine.sampling.plan import SamplingPlan
from engine.types import PENDING, Chunk, SampleSpec, SamplingParams, Step

ANY = SampleSpec(params=SamplingParams(temperature=0.0), position=0)


def chunks_frame(step: Step) -> Frame:
    chunks = step.chunks
    fields = {
        "requests": [chunk.request_id for chunk in chunks],
        "sampled": [chunk.sample is not None for chunk in chunks],
        "scores": [len(chunk.scores) for chunk in chunks],
        "rope_lens": [chunk.rope_len for chunk in chunks],
        "kept": [None if chunk.kept is None else asdict(chunk.kept) for chunk in chunks],
        "dropped": [chunk.num_dropped for chunk in chunks],
        "tells_layers": step.on_layer is not None,  # such a step takes no graph
    }
    arrays = {
        "starts": np.array([chunk.start for chunk in chunks], np.int64),
        **_joined("tokens", [chunk.token_ids for chunk in chunks]),
        **_joined("pages", [chunk.block_table for chunk in chunks]),
    }
    return Frame("chunks", fields, arrays)


def step_of(frame: Frame) -> Step:
    fields, tokens, pages = frame.fields, _cut(frame, "tokens"), _cut(frame, "pages")
    chunks = [
        Chunk(
            request_id=str(request),
            token_ids=tokens[i],
            start=int(frame.arrays["starts"][i]),
            block_table=pages[i],
            sample=ANY if fields["sampled"][i] else None,
            scores=(ANY,) * int(fields["scores"][i]),
            rope_len=int(fields["rope_lens"][i]),
            kept=_kept(fields["kept"][i]),
            num_dropped=int(fields["dropped"][i]),
        )
        for i, request in enumerate(fields["requests"])
    ]
    return Step(chunks=chunks, on_layer=nobody if fields["tells_layers"] else None)


def _kept(fields: Mapping[str, Any] | None) -> KeptPages | None:
    return None if fields is None else KeptPages(**{**fields, "pages": tuple(fields["pages"])})


def _joined(name: str, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    ends = np.array([0, *accumulate(map(len, rows))], np.int64)
    return {name: np.concatenate([np.asarray(row, np.int64) for row in rows]), f"{name}_ends": ends}


def _cut(frame: Frame, name: str) -> list[list[int]]:
    joined, ends = frame.arrays[name].tolist(), frame.arrays[f"{name}_ends"].tolist()
    return [joined[start:end] for start, end in pairwise(ends)]


def drop_graphs(steps: Any) -> None:
    if getattr(steps, "graphs", None) is not None:
        steps.graphs = None


class Broadcast(Protocol):
    def broadcast(self, x: torch.Tensor) -> None: ...


class LeaderMirror:
    has_others = True

    def __init__(
        self,
        tell: Callable[[Frame], AbstractContextManager[None]],
        group: Broadcast | None,
        all_have: Callable[[bool], bool],
    ) -> None:
        """`tell` sends a frame to every process; what they then run together stands inside. `group`: of the ranks that
        want the drawn ids; None: there are stages."""
        self._tell = tell
        self._group = group
        self.all_have = all_have

    def told(self, step: Step) -> AbstractContextManager[None]:
        if self._group is None:
            is_known = all(PENDING not in chunk.token_ids for chunk in step.chunks)
            assert is_known, "the first stage does not know what the last one draws"
        return self._tell(chunks_frame(step))

    def draw(self, logits: torch.Tensor, plan: SamplingPlan, placed: Mapping[str, torch.Tensor]) -> Drawn:
        drawn = draw(logits, plan, placed)
        if self._group is not None:
            self._group.broadcast(drawn.ids)
        return drawn


class RankMirror(Alone):
    has_others = True

    def __init__(self, group: Broadcast | None, leader: Channel) -> None:
        self._group = group
        self._leader = leader

    def all_have(self, is_done: bool) -> bool:
        """As the leader says, who hears it of all. Raises ConnectionError when that has ended."""
        self._leader.send(Frame("done", {"is_done": is_done}))
        said = self._leader.receive()
        if said is None:
            raise ConnectionError("the leader has ended")
        return bool(said.fields["is_done"])

    def draw(self, logits: torch.Tensor, plan: SamplingPlan, placed: Mapping[str, torch.Tensor]) -> Drawn:
        """What the leader has drawn; where there are stages, whatever: nobody reads it."""
        ids = torch.empty(len(plan.request_ids), dtype=torch.int64, device=logits.device)
        if self._group is not None:
            self._group.broadcast(ids)
        return Drawn(ids, torch.ones_like(ids, dtype=torch.bool))
