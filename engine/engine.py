"""Engine owns one model, its KV pages and the forward step. It knows no role, no queue and no clock.

    step: chunks -> packed rows -> the model's forward, whose attention goes through the pages -> sampled tokens

`begin` queues a step on a GPU and does not wait for it (gpu/steps.py). One thread calls `step` and `begin`. Page
numbers come from the caller: the engine allocates and frees nothing. What it is made of, loading/ has made.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from engine import device as devices
from engine.drafting import DraftModel, Guesser
from engine.heads import MedusaHeads, has_heads
from engine.loading.load import LoadedModel, Progress, load_both, silent
from engine.loading.platform import Platform
from engine.options import EngineOptions
from engine.pages.layout import PAGE_SIZE
from engine.parallel.mirror import drop_graphs
from engine.pending import CheckedStep, DoneStep, PendingStep
from engine.types import Chunk, SampledToken, SampleSpec, SamplingParams, Step

if TYPE_CHECKING:
    from engine.sampling.structured import StructuredOutputs


class Engine:
    def __init__(self, loaded: LoadedModel, draft_model: Guesser | None = None) -> None:
        self.info = loaded.info
        self.model = loaded.model
        self.pages = loaded.pages
        self.memory = loaded.pages.memory
        self.layout = loaded.layout  # of the pages that requests may be given
        self.steps = loaded.steps
        self.adapters = loaded.adapters
        self.draft_model = draft_model
        self._source = loaded.source
        self.backend = loaded.model.backend
        self.device = loaded.model.device

    @classmethod
    def load(cls, options: EngineOptions, progress: Progress = silent, platform: Platform | None = None) -> Engine:
        """Load, check and return a ready engine: see loading.load. `platform`: None is the one of the options' device.

        Raises UnsupportedModel for a model that cannot be loaded or served, ValueError for an option out of range.
        """
        options.validate()
        if options.speculative_model and has_heads(options.speculative_model):
            loaded, _ = load_both(replace(options, speculative_model=""), progress, platform)
            return cls(loaded, MedusaHeads.of(options.speculative_model, loaded))
        loaded, draft = load_both(options, progress, platform)
        return cls(loaded, None if draft is None else DraftModel(draft))

    @cached_property
    def structured(self) -> StructuredOutputs:
        """What keeps the forms that requests give their answers."""
        from engine.sampling.structured import StructuredOutputs  # llguidance comes with it

        return StructuredOutputs(self._source, self.info)

    @property
    def can_overlap(self) -> bool:
        """Whether `begin` returns before the step is done, so that it pays to begin the next one meanwhile."""
        return self.steps.can_overlap and not self.layout.has_states  # a step that fails is taken back at once

    @property
    def num_stages(self) -> int:
        """Above 1: so many steps may be begun before the first is done, none of which needs a token of another, and
        each is computed in a part of the engine of its own."""
        return 1 if self.model.ranks is None else self.model.ranks.num_stages

    @cached_property
    def why_kept_whole(self) -> str:
        """Why no page of a request can be left out, in a few words; empty if one can be."""
        attentions = self.model.probe.attentions
        if self.num_stages > 1:
            return "is cut in pipeline stages, none of which sees all attention"
        if self.layout.has_states or not attentions:
            return "keeps a state beside KV"
        if any(layer.window or layer.chunk for layer in attentions):
            return "has layers with a window or chunks of their own"
        return "has ALiBi" if any(layer.has_slopes for layer in attentions) else ""

    def step(self, step: Step) -> list[SampledToken]:
        """Run every chunk's tokens; return one token for each chunk that has `sample`, in the chunks' order.

        A row whose logits are not finite brings a token with an `error`; the others are not to blame.
        """
        pending = self.begin(step)
        try:
            tokens = pending.result()
        except Exception:
            self.model.journal.take_back()
            raise
        self.model.journal.forget()
        return tokens

    def begin(self, step: Step) -> PendingStep:
        """Begin a step; its tokens come from `result()` of what is returned. One more may be begun before that.

        A chunk of it may name PENDING tokens: those that the step begun before it draws. On a CPU the step is done
        when this returns.
        """
        if not step.chunks:
            return DoneStep([])
        with torch.inference_mode(), devices.current(self.device):
            if self.draft_model is not None:
                step = self.draft_model.with_guesses(step)
            self.model.journal.forget()
            try:
                if step.copies:
                    self.model.copy_pages(self.memory, step.copies)
                    step.copies.clear()  # a second time they would undo what was written since
                with self.adapters.of(step.chunks):
                    pending = self.steps.begin(step)
                if self.draft_model is not None:
                    self.draft_model.end(step)
                return pending if self.model.ranks is None else CheckedStep(pending, self.model.ranks.check)
            except Exception:
                self.model.journal.take_back()
                raise

    @property
    def drafting_s(self) -> float:
        """What guesses have taken of its steps' time, in all."""
        return 0.0 if self.draft_model is None else self.draft_model.spent_s

    def probe(self) -> SampledToken:
        """Whether it still can: compute some tokens that nobody asked for, then the last one alone, in a page of the
        engine's own. Prompts go the first way, further tokens the second. Returns the last draw."""
        length = min(self.layout.page_size, PAGE_SIZE, self.info.max_model_len)
        for start in (0, length - 1):
            spec = SampleSpec(params=SamplingParams(temperature=0.0), position=length)
            chunk = Chunk(
                request_id="",
                token_ids=(0,) * (length - start),
                start=start,
                block_table=(self.layout.num_pages,),
                sample=spec,
            )
            [token] = self.step(Step(chunks=(chunk,)))
            if token.error:
                break
        return token

    def check(self) -> None:
        """Raise EngineBroken when no step can be run any more: its device, or one of its other processes, is lost."""
        devices.check(self.device)
        if self.model.ranks is not None:
            self.model.ranks.check()

    def close(self) -> None:
        """End the engine's other processes, where it has any. A second call does nothing."""
        if self.model.ranks is not None:
            drop_graphs(self.steps)  # which hold the process groups that end
            self.model.ranks.close()
