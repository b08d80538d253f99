"""MachineType is what provisioning buys: one machine that serves the model alone; its times, room, price and power.

From Splitwise's table (`splitwise_machines`), from any Catalog (`machine_of`), or from another machine under a power
cap (`capped`). It decides nothing. Prices are USD per machine-hour. Power is in watts, or in what `power_unit` says:
then it compares with machines of the same unit only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from placement.catalogs.base import Catalog, Degrees, Offer, PlanError
from placement.latency.base import DecodeLine, LatencyModel
from placement.papers.splitwise.rules import SplitwiseTimes
from placement.papers.splitwise.table import DecodeRule, SplitwiseLatency, splitwise_latency

SPLITWISE_GPUS = 8
SPLITWISE_PAGE_SIZE = 16
SPLITWISE_POWER_UNIT = "units of Splitwise's table, in which 40 H100 machines draw what 70 A100 machines draw"
SPLITWISE_USD_PER_GPU_HOUR = {"a100-80gb": 2.21, "h100-80gb": 4.76}
SPLITWISE_POWER = {"a100-80gb": 24.8, "h100-80gb": 44.0}
SPLITWISE_SHORT = {"a100-80gb": "A", "h100-80gb": "H"}
RATE_AT_TOKENS = 1024  # how long a prompt the link's rate is asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerCap:
    """A machine held to `share` of its power: prompts take `prompt_factor` times as long, decode `token_factor`."""

    share: float
    prompt_factor: float
    token_factor: float

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise PlanError(f"power cap is {self.share:g}; give a share of the machine's power, above 0 and at most 1")
        for key in ("prompt_factor", "token_factor"):
            if not getattr(self, key) >= 1:
                raise PlanError(f"{key} of a power cap is {getattr(self, key):g}; give 1 or more")


SPLITWISE_CAP = PowerCap(share=0.7, prompt_factor=1.3, token_factor=1.0)  # its rows of h100-80gb-pcap; not measured


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineType:
    """`short`: in a design's name, HA is an H for prompts and an A for tokens; `title` in a baseline's."""

    name: str
    short: str
    title: str
    model: str
    offer: Offer
    usd_per_hour: float
    power: float
    power_unit: str = "W"
    power_cap: float = 1.0  # of the machine's power; `power` is what is left of it

    @property
    def gpus(self) -> int:
        return self.offer.degrees.gpus

    @property
    def latency(self) -> LatencyModel:
        return self.offer.latency

    @property
    def is_capped(self) -> bool:
        return self.power_cap < 1


def splitwise_machines(model: str = "bloom-176b", *, rule: DecodeRule = "table") -> tuple[MachineType, ...]:
    """Splitwise's A100 and H100 machines of eight GPUs, and the H100 machine at 70% of its power: A, H, Hcap.

    `model`: bloom-176b or llama2-70b. `rule`: how its table is read for decode. Raises LatencyError.
    """
    full = tuple(_splitwise_machine(model, hardware, rule) for hardware in SPLITWISE_SHORT)
    h100 = full[-1]
    measured = splitwise_latency(model, "h100-80gb-pcap", rule=rule)
    held = capped(h100, SPLITWISE_CAP)
    return (*full, replace(held, name="h100-80gb-pcap", offer=replace(held.offer, latency=measured)))


def _splitwise_machine(model: str, hardware: str, rule: DecodeRule) -> MachineType:
    latency = splitwise_latency(model, hardware, SPLITWISE_GPUS, rule=rule)
    offer = Offer(
        degrees=Degrees(tp=SPLITWISE_GPUS),
        latency=latency,
        num_pages=latency.kv_capacity_bytes // latency.kv_bytes_per_token // SPLITWISE_PAGE_SIZE,
        page_size=SPLITWISE_PAGE_SIZE,
        max_batch_tokens=2048,
        max_batch_size=512,
    )
    return MachineType(
        name=hardware,
        short=SPLITWISE_SHORT[hardware],
        title=hardware.partition("-")[0].upper(),
        model=model,
        offer=offer,
        usd_per_hour=SPLITWISE_USD_PER_GPU_HOUR[hardware] * SPLITWISE_GPUS,
        power=SPLITWISE_POWER[hardware],
        power_unit=SPLITWISE_POWER_UNIT,
    )


def machine_of(catalog: Catalog, degrees: Degrees | None = None, *, short: str = "") -> MachineType:
    """The machine that one worker of these degrees makes; without degrees tensor parallel over a whole node. `short`:
    its letter in the names of designs; when none is given, what stands before the first number: H for NVIDIA H100.
    Raises PlanError."""
    wanted = degrees or Degrees(tp=catalog.gpus_per_node)
    offer = catalog.offer(wanted)
    if isinstance(offer, str):
        raise PlanError(f"{catalog.hardware} at {wanted} cannot serve {catalog.model}: {offer}")
    return MachineType(
        name=catalog.hardware,
        short=short or _letters(catalog.hardware),
        title=catalog.hardware,
        model=catalog.model,
        offer=offer,
        usd_per_hour=catalog.cost.usd_per_gpu_hour * wanted.gpus,
        power=catalog.cost.watts_per_gpu * wanted.gpus,
    )


def _letters(hardware: str) -> str:
    found = re.search(r"([A-Za-z]+)[0-9]", hardware)
    return (found[1] if found else hardware[:1]).upper()


def capped(machine: MachineType, cap: PowerCap) -> MachineType:
    latency = CappedLatency(of=machine.latency, cap=cap)
    return replace(
        machine,
        name=f"{machine.name} at {cap.share:.0%} power",
        short=f"{machine.short}cap",
        title=f"{machine.title}cap",
        offer=replace(machine.offer, latency=latency),
        power=machine.power * cap.share,
        power_cap=machine.power_cap * cap.share,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CappedLatency:
    """Another machine's times under a power cap. A step of both kinds slows as a prompt does; the link does not."""

    of: LatencyModel
    cap: PowerCap

    @property
    def source(self) -> str:
        return f"{self.of.source}, held to {self.cap.share:.0%} of its power"

    @property
    def stages(self) -> int:
        return self.of.stages

    def prefill_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        return self.of.prefill_s(chunks) * self.cap.prompt_factor

    def decode_line(self, batch_size: int, context_tokens: int) -> DecodeLine:
        line = self.of.decode_line(batch_size, context_tokens)
        factor = self.cap.token_factor
        return DecodeLine(line.step_s * factor, line.per_token_s * factor, line.until_tokens)

    def mixed_s(self, chunks: Sequence[tuple[int, int]], batch_size: int, context_tokens: int) -> float:
        factor = self.cap.prompt_factor if chunks else self.cap.token_factor
        return self.of.mixed_s(chunks, batch_size, context_tokens) * factor

    def transfer_s(self, num_tokens: int) -> float:
        return self.of.transfer_s(num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatTimes:
    """Any machine under Splitwise's rules, which know no context: each decoding request attends to `context_tokens`,
    the workload's mean. KV is counted in tokens, one "byte" each."""

    latency: LatencyModel
    kv_capacity_bytes: int
    context_tokens: int
    link_bytes_per_s: float
    kv_bytes_per_token: int = 1

    def decode_line(self, batch_size: int, context_tokens: int) -> DecodeLine:
        return DecodeLine(self.latency.decode_line(batch_size, batch_size * self.context_tokens).step_s, 0.0)

    def mixed_s(self, chunks: Sequence[tuple[int, int]], batch_size: int, context_tokens: int) -> float:
        return self.latency.mixed_s(chunks, batch_size, batch_size * self.context_tokens)


def times_for_splitwise(machines: Sequence[MachineType], context_tokens: int) -> list[SplitwiseTimes]:
    """One view for each machine, all counting KV alike. Raises PlanError for pipeline stages."""
    own = [machine.latency for machine in machines if isinstance(machine.latency, SplitwiseLatency)]
    if len(own) == len(machines):
        return list(own)
    return [_flat(machine, context_tokens) for machine in machines]


def _flat(machine: MachineType, context_tokens: int) -> FlatTimes:
    if machine.latency.stages > 1:
        raise PlanError(
            f"{machine.name} has {machine.latency.stages} pipeline stages; Splitwise's rules know none, give PP 1 or "
            f"the live rules"
        )
    took_s = machine.latency.transfer_s(RATE_AT_TOKENS)
    return FlatTimes(
        latency=machine.latency,
        kv_capacity_bytes=machine.offer.kv_tokens,
        context_tokens=context_tokens,
        link_bytes_per_s=RATE_AT_TOKENS / took_s if took_s > 0 else float("inf"),
    )
