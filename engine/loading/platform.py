"""Platform is what loading asks of the machine that a model is to run on; cpu.py and gpu.py answer."""

from __future__ import annotations

from typing import Protocol

import torch
from transformers import PreTrainedModel

from engine.attention.probe import Probe
from engine.options import EngineOptions
from engine.paged_model import KvPages, PagedModel
from engine.pages.fp8 import KvScale
from engine.pending import Steps
from engine.types import ModelInfo
from engine.weights.config import ServedConfig

OWN_PAGES = 1  # the engine's, behind those that requests are given: where probes and a graph's dummy rows stand


class Platform(Protocol):
    device: torch.device

    def prepare(
        self, module: PreTrainedModel, probe: Probe, options: EngineOptions, served: ServedConfig
    ) -> PagedModel:
        """Fuse layers, pack or join weights, choose kernels. Raises ValueError for an attention that cannot be had."""

    def peak_bytes(
        self, model: PagedModel, options: EngineOptions, info: ModelInfo, scales: tuple[KvScale, ...] | None
    ) -> int:
        """What a large step needs of the device's memory beyond what stands there before it, and graphs keep."""

    def default_kv_bytes(self, options: EngineOptions, peak_bytes: int, page_bytes: int) -> int:
        """Of pages for requests, where the options name neither pages nor bytes. Raises ValueError."""

    def steps(self, model: PagedModel, pages: KvPages, options: EngineOptions, info: ModelInfo) -> Steps:
        """What runs steps over the pages from now on."""
