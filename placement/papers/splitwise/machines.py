"""Splitwise's A100 and H100 machines of eight GPUs, as its table and its paper have them: times, prices, power."""

from __future__ import annotations

from dataclasses import replace

from placement.catalogs.base import Degrees, Offer
from placement.latency.hardware import PowerCap
from placement.mixes.machines import MachineType, capped
from placement.papers.splitwise.latency import DecodeRule
from placement.papers.splitwise.table import splitwise_latency

GPUS = 8
PAGE_SIZE = 16
POWER_UNIT = "units of Splitwise's table, in which 40 H100 machines draw what 70 A100 machines draw"
USD_PER_GPU_HOUR = {"a100-80gb": 2.21, "h100-80gb": 4.76}
POWER = {"a100-80gb": 24.8, "h100-80gb": 44.0}
SHORT = {"a100-80gb": "A", "h100-80gb": "H"}
CAP = PowerCap(power=0.7, prefill_time=1.3, decode_time=1.0, source="its rows of h100-80gb-pcap; not measured")
CAUTION = (
    "Decode is read as Splitwise's simulator reads its table: a step takes no longer for more requests. The rule "
    "`table` reads it as it was measured; plan with that one."
)


def splitwise_machines(model: str = "bloom-176b", *, rule: DecodeRule = "table") -> tuple[MachineType, ...]:
    """Splitwise's A100 and H100 machines of eight GPUs, and the H100 machine at 70% of its power: A, H, Hcap.

    `model`: bloom-176b or llama2-70b. `rule`: how its table is read for decode. Raises LatencyError.
    """
    a100, h100 = (_machine(model, hardware, rule) for hardware in SHORT)
    tabled = splitwise_latency(model, "h100-80gb-pcap", rule=rule)
    hcap = capped(h100, CAP)
    return a100, h100, replace(hcap, name="h100-80gb-pcap", offer=replace(hcap.offer, latency=tabled))


def _machine(model: str, hardware: str, rule: DecodeRule) -> MachineType:
    latency = splitwise_latency(model, hardware, GPUS, rule=rule)
    offer = Offer(
        degrees=Degrees(tp=GPUS),
        latency=latency,
        num_pages=latency.kv_capacity_bytes // latency.kv_bytes_per_token // PAGE_SIZE,
        page_size=PAGE_SIZE,
        max_batch_tokens=2048,
        max_batch_size=512,
    )
    return MachineType(
        name=hardware,
        short=SHORT[hardware],
        title=hardware.partition("-")[0].upper(),
        model=model,
        offer=offer,
        usd_per_hour=USD_PER_GPU_HOUR[hardware] * GPUS,
        power=POWER[hardware],
        power_unit=POWER_UNIT,
        caution=CAUTION if rule == "published" else "",
    )
