"""MachineType is what provisioning buys: one machine that serves the model alone; its times, room, price and power.

From any Catalog (`machine_of`), or from another machine under a power cap (`capped`). It decides nothing. Prices are
USD per machine-hour. Power is in watts, or in what `power_unit` says: then it compares with machines of the same unit
only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from placement.catalogs.base import Catalog, Degrees, Offer, PlanError
from placement.latency.base import LatencyModel
from placement.latency.hardware import PowerCap
from placement.latency.scaled import ScaledLatency


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineType:
    """`short`: in a design's name, HA is an H for prompts and an A for tokens; `title` in a baseline's. `kind`: what it
    is the same with under whatever power cap."""

    name: str
    short: str
    title: str
    model: str
    offer: Offer
    usd_per_hour: float
    power: float
    power_unit: str = "W"
    power_cap: float = 1.0  # of the machine's power; `power` is what is left of it
    kind: str = ""
    caution: str = ""  # a sentence for the plan, where its times are not to be taken for truth

    @property
    def gpus(self) -> int:
        return self.offer.degrees.gpus

    @property
    def latency(self) -> LatencyModel:
        return self.offer.latency

    @property
    def is_capped(self) -> bool:
        return self.power_cap < 1


def machine_of(catalog: Catalog, degrees: Degrees | None = None, *, short: str = "") -> MachineType:
    """The machine that one worker of these degrees makes; without degrees tensor parallel over a whole node. `short`:
    its letter in the names of designs; when none is given, what stands before the first number: H for NVIDIA H100.
    Its KV goes from node to node, as those of two kinds share none. Raises PlanError."""
    wanted = degrees or Degrees(tp=catalog.gpus_per_node)
    offer = catalog.offer(wanted, within_node=False)
    if isinstance(offer, str):
        raise PlanError(f"{catalog.hardware} at {wanted} cannot serve {catalog.model}: {offer}")
    return MachineType(
        name=catalog.hardware,
        short=short or _letters(catalog.hardware),
        title=catalog.hardware,
        model=catalog.model,
        kind=catalog.hardware,
        offer=offer,
        usd_per_hour=catalog.cost.usd_per_gpu_hour * wanted.gpus,
        power=catalog.cost.watts_per_gpu * wanted.gpus,
    )


def _letters(hardware: str) -> str:
    letters = re.search(r"([A-Za-z]+)[0-9]", hardware)
    return (letters[1] if letters else hardware[:1]).upper()


def capped(machine: MachineType, cap: PowerCap) -> MachineType:
    return replace(
        machine,
        name=f"{machine.name} at {cap.power:.0%} power",
        short=f"{machine.short}cap",
        title=f"{machine.title}cap",
        offer=replace(machine.offer, latency=capped_latency(machine.latency, cap)),
        power=machine.power * cap.power,
        power_cap=machine.power_cap * cap.power,
    )


def capped_latency(latency: LatencyModel, cap: PowerCap) -> ScaledLatency:
    """A step of both kinds slows as a prompt does; the link does not."""
    return ScaledLatency(
        model=latency,
        prefill=cap.prefill_time,
        decode=cap.decode_time,
        transfer=1.0,
        how=f"held to {cap.power:.0%} of its power",
    )


def gpu_name(hardware: str, among: Sequence[str] = ()) -> str:
    """H100 of "NVIDIA H100 SXM 80 GB", or H100-SXM where one of the others is an H100, too; its first word where none
    looks like a GPU's."""
    words, others = _from_gpu_on(hardware), [_from_gpu_on(name) for name in among if name != hardware]
    enough = (count for count in range(1, len(words)) if all(other[:count] != words[:count] for other in others))
    return "-".join(words[: next(enough, len(words))])


def _from_gpu_on(hardware: str) -> list[str]:
    word = re.search(r"\b[A-Z]+\d+\w*", hardware)
    return hardware[word.start() if word else 0 :].split()


def short_name(hardware: str, among: Sequence[str]) -> str:
    """H of "NVIDIA H100 SXM 80 GB" where no other begins with it, else H100, else H100SXM."""
    letter = gpu_name(hardware)[:1]
    alike = [name for name in among if gpu_name(name)[:1] == letter]
    return letter.upper() if len(alike) == 1 else gpu_name(hardware, among).replace("-", "")
