"""DistServe's published latency coefficients of OPT-13B and OPT-66B on A100-80G, as DistServeLatency.

Formulas and figures: data/distserve-opt-a100.json. It knows no batching: that is placement/papers/distserve/rules.py,
or the live policies. DistServeCatalog offers these workers to the planner, with the KV that they hold and the links of
the paper's testbed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from placement.catalogs.base import Degrees, MachineCost, Offer
from placement.latency.base import LatencyError
from placement.papers.distserve.latency import DistServeLatency, Engine

DATA = Path(__file__).parent / "data" / "distserve-opt-a100.json"  # also where `placement` is the compiled package


@cache
def _published() -> dict[str, Any]:
    text = DATA.read_text(encoding="utf-8")
    published: dict[str, Any] = json.loads(text)
    return published


def _full_name(model: str) -> str:
    """opt_13b, opt-13b and facebook/opt-13b are one model."""
    name = model.replace("_", "-").lower()
    return name if "/" in name else f"facebook/{name}"


def distserve_degrees(model: str, engine: Engine = "distserve") -> list[tuple[int, int]]:
    """The (tp, pp) of a model that have both coefficients and a largest token batch."""
    name = _full_name(model)
    degrees = sorted(int(tp) for tp in _published()[engine].get(name, {}))
    keys = _published()["max_num_tokens"].get(name, {})
    return [(tp, pp) for tp in degrees for pp in range(1, 17) if f"tp{tp}pp{pp}" in keys]


def distserve_latency(model: str, tp: int, pp: int = 1, engine: Engine = "distserve") -> DistServeLatency:
    """Raises LatencyError where DistServe published nothing."""
    name = _full_name(model)
    models = _published()[engine]
    if name not in models:
        raise LatencyError(f"model is {model!r}; DistServe published coefficients of {', '.join(sorted(models))} only")
    if str(tp) not in models[name]:
        raise LatencyError(f"tp is {tp}; DistServe published {name} at TP {', '.join(sorted(models[name]))} only")
    largest = _published()["max_num_tokens"][name].get(f"tp{tp}pp{pp}")
    if largest is None:
        raise LatencyError(f"tp {tp} with pp {pp} does not hold {name}; give one of {distserve_degrees(model, engine)}")
    figures = models[name][str(tp)]
    return DistServeLatency(
        model=name,
        tp=tp,
        pp=pp,
        engine=engine,
        prefill=tuple(figures["prefill"]),
        decode_small=tuple(figures["decoding_smallbs"]),
        decode_large=tuple(figures["decoding_largebs"]),
        max_batch_tokens=largest,
    )


KV_BYTES_PER_TOKEN = {"facebook/opt-13b": 2 * 40 * 5120 * 2, "facebook/opt-66b": 2 * 64 * 9216 * 2}  # fp16 keys, values
NVLINK_BYTES_PER_S = 300e9  # of an A100, one direction
TESTBED_LINK_BYTES_PER_S = 25e9 / 8  # between the paper's four nodes
PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DistServeCatalog:
    """Workers of an OPT model on A100-80G, eight to a node, by DistServe's coefficients.

    `max_batch_tokens`: of a prefill step; None as many as DistServe takes, all that its memory holds. With `has_link`
    KV takes its time on NVLink within a node and on 25 Gbit/s between nodes, as in the paper's testbed; DistServe's own
    simulator lets it pass in none. The price is Azure's list price of an A100, the power its 400 W.
    """

    name: str
    engine: Engine = "distserve"
    gpus_per_node: int = 8
    max_batch_tokens: int | None = 2048
    max_batch_size: int = 512
    has_link: bool = True

    def __post_init__(self) -> None:
        """Raises LatencyError for a model that DistServe published nothing of."""
        known = sorted(_published()[self.engine])
        if _full_name(self.name) not in known:
            raise LatencyError(
                f"model is {self.name!r}; DistServe published coefficients of {', '.join(known)} only, so give one of "
                "them, or plan with --hardware and a roofline"
            )

    @property
    def model(self) -> str:
        return _full_name(self.name)

    @property
    def hardware(self) -> str:
        return "A100-80G"

    @property
    def cost(self) -> MachineCost:
        return MachineCost(usd_per_gpu_hour=3.67, watts_per_gpu=400.0)

    def degrees(self, max_gpus: int) -> list[Degrees]:
        return [
            Degrees(tp, pp)
            for tp, pp in distserve_degrees(self.name, self.engine)
            if tp * pp <= max_gpus and tp <= self.gpus_per_node
        ]

    def offer(self, degrees: Degrees, *, within_node: bool = True) -> Offer | str:
        try:
            latency = distserve_latency(self.name, degrees.tp, degrees.pp, self.engine)
        except LatencyError as error:
            return str(error)
        link = NVLINK_BYTES_PER_S if within_node else TESTBED_LINK_BYTES_PER_S
        per_token_s = KV_BYTES_PER_TOKEN[latency.model] / link if self.has_link else 0.0
        return Offer(
            degrees=degrees,
            latency=replace(latency, link_s_per_token=per_token_s),
            num_pages=latency.max_batch_tokens // PAGE_TOKENS,
            page_size=PAGE_TOKENS,
            max_batch_tokens=self.max_batch_tokens or latency.max_batch_tokens,
            max_batch_size=self.max_batch_size,
        )
