"""RooflineCatalog: what workers of a model can be had on a kind of GPU, by first principles; and why some cannot.

Memory of a GPU: its share of the weights, what a step needs besides (activations and logits of the largest step), and
the rest of `memory_share` for KV pages. It measures nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from placement.catalogs.base import Degrees, MachineCost, Offer, PlanError
from placement.catalogs.guesses import Guesses
from placement.latency.base import LatencyModel
from placement.latency.hardware import Hardware, load_hardware
from placement.latency.model_files import load_shape
from placement.latency.model_shape import ModelShape
from placement.latency.roofline import kv_heads_per_gpu, roofline_latency
from placement.latency.tensor_parallel import few_bits_of, why_not_cut, why_not_staged
from prefill_worker.options import PrefillOptions

MAX_TRIED_PP = 16
LOGIT_BYTES = 4  # drawn from in float32
ACTIVATION_ROWS = 4  # of hidden width that are alive at once, beside the widest product


class RooflineCatalog:
    """`max_model_len`: a worker must hold at least one request of it (None: of one step's tokens). `max_sampled`:
    requests for which a step draws a token (None: as many as a mixed worker's may, with prompts besides).
    `expert_parallel`: ranks have whole experts."""

    def __init__(
        self,
        shape: ModelShape,
        hardware: Hardware,
        *,
        max_pp: int = 1,
        page_size: int = 16,
        max_batch_tokens: int = 2048,
        max_batch_size: int = 256,
        max_sampled: int | None = None,
        max_model_len: int | None = None,
        power_cap: float = 1.0,
        guesses: Guesses | None = None,
        expert_parallel: bool = False,
    ) -> None:
        self.shape = shape
        self.machine = hardware
        self.max_pp = max_pp
        self.page_size = page_size
        self.max_batch_tokens = max_batch_tokens
        self.max_batch_size = max_batch_size
        self.max_sampled = max_sampled or max_batch_size + PrefillOptions().max_prefill_requests
        self.max_model_len = max_model_len
        self.power_cap = power_cap
        self.guesses = guesses
        self.expert_parallel = expert_parallel
        hardware.cap(power_cap)
        hardware.flops_for(shape.compute_dtype)

    @property
    def model(self) -> str:
        return self.shape.name

    @property
    def hardware(self) -> str:
        return self.machine.name

    @property
    def gpus_per_node(self) -> int:
        return self.machine.gpus_per_node

    @property
    def cost(self) -> MachineCost:
        return self.machine.cost(self.power_cap)

    def degrees(self, max_gpus: int) -> Sequence[Degrees]:
        """TP within a node that a worker loads, PP that it loads and that divides the layers; the smallest first."""
        tps = self._tps()
        pps = [pp for pp in range(1, min(self.max_pp, self.shape.num_layers) + 1) if self._has_even_stages(pp)]
        threads = 1 if self.machine.unit == "core" else 0
        fitting = [Degrees(tp, pp, threads) for tp in tps for pp in pps if tp * pp <= max_gpus]
        return sorted(fitting, key=lambda degrees: (degrees.gpus, degrees.pp))

    def _tps(self) -> list[int]:
        return [tp for tp in range(1, self.gpus_per_node + 1) if not self._why_not_cut(tp)]

    def _has_even_stages(self, pp: int) -> bool:
        return self.shape.num_layers % pp == 0 and not why_not_staged(self.shape, pp)

    def _why_not_cut(self, tp: int) -> str:
        return why_not_cut(self.shape, tp, has_whole_experts=self.expert_parallel)

    def offer(self, degrees: Degrees, *, within_node: bool = True) -> Offer | str:
        refusal = self._refusal(degrees)
        if refusal:
            return refusal
        pages = self.num_pages(degrees)
        if pages * self.page_size < self._least_kv_tokens:
            return self._too_big(degrees)
        latency = roofline_latency(self.shape, self.machine, degrees, power_cap=self.power_cap, within_node=within_node)
        return Offer(
            degrees=degrees,
            latency=latency,
            num_pages=pages,
            page_size=self.page_size,
            max_len=self.shape.max_positions,
            max_batch_tokens=self.max_batch_tokens,
            max_batch_size=self.max_batch_size,
            error=self.machine.error.of(self.model, degrees.gpus),
            **self._ahead(degrees, latency),
        )

    def _ahead(self, degrees: Degrees, latency: LatencyModel) -> dict[str, Any]:
        """What the offer says of guesses; nothing where a draft model leaves no room."""
        guesses = self.guesses
        if guesses is None:
            return {}
        pages = self.num_pages(degrees, guesses)
        if pages * self.page_size < self._least_kv_tokens:
            return {}
        speculation = guesses.on(self.machine, latency, self.shape, self.power_cap)
        return {"speculation": speculation, "speculative_pages": pages}

    # memory, in bytes of one GPU

    def weight_bytes(self, degrees: Degrees) -> float:
        return self.shape.weight_bytes / degrees.gpus

    @property
    def _usable_bytes(self) -> float:
        return self.machine.memory_bytes * self.machine.memory_share

    def step_bytes(self, degrees: Degrees) -> float:
        """Activations of the largest step, and its logits."""
        shape = self.shape
        widest = max(shape.mlp_params, shape.expert_params * max(1, shape.experts_per_token)) / shape.hidden
        row = (ACTIVATION_ROWS * shape.hidden + widest / degrees.tp) * shape.dtype_bytes
        logits = self.max_sampled * shape.vocab / degrees.tp * LOGIT_BYTES
        return max(self.max_batch_tokens, self.max_batch_size) * row + logits

    def kv_bytes_per_token(self, degrees: Degrees) -> float:
        """KV heads that TP cannot cut are held more than once."""
        shape = self.shape
        heads = kv_heads_per_gpu(shape, degrees.tp)
        layers = math.ceil(shape.num_layers / degrees.pp)
        return layers * heads * (shape.k_dim + shape.v_dim) * shape.kv_dtype_bytes

    def num_pages(self, degrees: Degrees, guesses: Guesses | None = None) -> int:
        """Of a worker; 0 where the weights leave no room. A draft model and its KV are on the GPU that has most."""
        left = self._usable_bytes - self.weight_bytes(degrees) - self.step_bytes(degrees)
        token_bytes = self.kv_bytes_per_token(degrees)
        if guesses is not None:
            left -= guesses.weight_bytes(self.shape)
            token_bytes += guesses.kv_bytes_per_token
        return max(0, int(left / (token_bytes * self.page_size)))

    @property
    def _least_kv_tokens(self) -> int:
        return max(self.max_batch_tokens, self.max_model_len or 0)

    # why not

    def _refusal(self, degrees: Degrees) -> str:
        tp, pp = degrees.tp, degrees.pp
        if tp < 1 or pp < 1:
            return f"TP {tp} x PP {pp} is no worker; give 1 or more of each"
        if why := self._why_not_cut(tp):
            return f"{why}; give TP {_either(self._tps())}"
        if tp > self.gpus_per_node:
            return (
                f"TP {tp} is more {self.machine.unit}s than a node has, {self.gpus_per_node}; "
                f"give TP {_either(self._tps())}, and PP for the rest"
            )
        return why_not_staged(self.shape, pp)

    def _too_big(self, degrees: Degrees) -> str:
        mend = self.smallest_that_fits()
        smaller = "a smaller step" if self._beside_step(degrees) else "a smaller model"
        advice = f"give {mend} or more" if mend else f"give {smaller}, or a GPU with more memory"
        return f"{self.why_no_room(degrees)}; {advice}"

    def why_no_room(self, degrees: Degrees) -> str:
        """For the model and a request; empty: there is room, or something else stands in the way."""
        pages, need = self.num_pages(degrees), self._least_kv_tokens
        held = pages * self.page_size
        if held >= need or self._refusal(degrees):
            return ""
        unit = self.machine.unit
        have = f"{degrees.gpus} {unit}{'s' if degrees.gpus > 1 else ''} of {_gb(self.machine.memory_bytes)} each"
        what = f"{self.model}, {_gb(self.shape.weight_bytes)} of weights,"
        if pages:
            why = f"{what} leaves room for {held} tokens of KV on {have} ({degrees}), less than one of {need}"
        else:
            why = f"{what} does not fit on {have} ({degrees}){self._beside_step(degrees)}"
        return why + self._why_uneven() + self._why_one_gpu()

    def _beside_step(self, degrees: Degrees) -> str:
        """What takes the room that the weights leave; empty: they leave none, or enough."""
        if self.num_pages(degrees) or self.weight_bytes(degrees) >= self._usable_bytes:
            return ""
        step = f"max_batch_tokens {self.max_batch_tokens} and max_batch_size {self.max_batch_size}"
        return f" beside a step of {step}, {_gb(self.step_bytes(degrees))} on each"

    def _why_uneven(self) -> str:
        """That it would fit in stages, but for what they must divide."""
        staged = next(self._that_fit(are_even=False), None)
        if staged is None or self.smallest_that_fits() is not None:
            return ""
        return f", and its {self.shape.num_layers} layers divide into no {staged.pp} to {MAX_TRIED_PP} equal stages"

    def _why_one_gpu(self) -> str:
        few = few_bits_of(self.shape)
        return f", and {few} goes with TP 1 alone" if few else ""

    def smallest_that_fits(self, tp: int | None = None) -> Degrees | None:
        """Whatever `max_pp`; of one tensor-parallel degree, where that is given."""
        return next((degrees for degrees in self._that_fit() if tp in (None, degrees.tp)), None)

    def _that_fit(self, *, are_even: bool = True) -> Iterator[Degrees]:
        """Of the fewest stages, in a node, first."""
        for pp in range(1, min(MAX_TRIED_PP, self.shape.num_layers) + 1):
            if not (self._has_even_stages(pp) if are_even else not why_not_staged(self.shape, pp)):
                continue
            for tp in self._tps():
                degrees = Degrees(tp, pp)
                if not self.gpus_per_node % tp and self.num_pages(degrees) * self.page_size >= self._least_kv_tokens:
                    yield degrees


def open_catalog(
    model: str | Path, hardware: str | Path, *, kv_dtype: str = "auto", quantization: str = "none", **options: object
) -> RooflineCatalog:
    """From the names or paths of a model, as kvrelay serves it, and a hardware file; options as RooflineCatalog's.
    Raises PlanError."""
    machine = load_hardware(hardware)
    _check_bits(machine, kv_dtype, quantization)
    shape = load_shape(model).as_served().in_few_bits(kv_dtype=kv_dtype, quantization=quantization)
    return RooflineCatalog(shape, machine, **options)  # type: ignore[arg-type]


def _check_bits(machine: Hardware, kv_dtype: str, quantization: str) -> None:
    """As workers would, on such devices. Raises PlanError."""
    has_gpus = machine.unit == "GPU"
    if has_gpus and quantization == "int8":
        raise PlanError(f"quantization is int8, which is for CPUs, and hardware is {machine.name}; take it out")
    own, foreign, of = ("fp8_e4m3", "int8", "CPUs") if has_gpus else ("int8", "fp8_e4m3", "GPUs")
    if kv_dtype == foreign:
        raise PlanError(
            f"kv_dtype is {kv_dtype}, which is for {of}, and hardware is {machine.name}; give {own} or auto"
        )


def _either(values: Sequence[int]) -> str:
    texts = [str(value) for value in values]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.0f} GB" if num_bytes >= 1e12 else f"{num_bytes / 1e9:.3g} GB"
