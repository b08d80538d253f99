"""ProfileCatalog: the one kind of worker that `kvrelay calibrate` measured, as the planner can have it."""

from __future__ import annotations

from collections.abc import Sequence

from placement.catalogs.base import Degrees, MachineCost, Offer
from placement.latency.profile import Profile
from placement.latency.profile_latency import ProfileLatency


class ProfileCatalog:
    """Implements Catalog. There is one kind of worker, the one that was measured: "GPU" is the share of the machine
    that it had."""

    def __init__(self, profile: Profile, *, cost: MachineCost | None = None, gpus_per_node: int = 1) -> None:
        self.profile = profile
        self._cost = cost or MachineCost(usd_per_gpu_hour=0.0, watts_per_gpu=0.0)
        self._gpus_per_node = gpus_per_node
        self._latency = ProfileLatency(profile)
        self._degrees = Degrees(profile.tp, profile.pp)

    @property
    def model(self) -> str:
        return str(self.profile.model.get("name", "model"))

    @property
    def hardware(self) -> str:
        machine = self.profile.machine
        return str(machine.get("cpu") or machine.get("host") or "measured worker")

    @property
    def gpus_per_node(self) -> int:
        return max(self._gpus_per_node, self._degrees.tp)

    @property
    def cost(self) -> MachineCost:
        return self._cost

    def degrees(self, max_gpus: int) -> Sequence[Degrees]:
        return (self._degrees,) if self._degrees.gpus <= max_gpus else ()

    def offer(self, degrees: Degrees, *, within_node: bool = True) -> Offer | str:
        if degrees != self._degrees:
            return f"{degrees} was not measured, only {self._degrees}; calibrate a cluster that runs it"
        prefill, decode = self.profile.prefill_pool, self.profile.decode_pool
        error, pack_tokens = self.profile.error, prefill.options.get("pack_tokens")
        return Offer(
            degrees=degrees,
            latency=self._latency,
            num_pages=min(prefill.num_pages, decode.num_pages),
            page_size=self.profile.page_size,
            max_batch_tokens=int(prefill.options.get("max_batch_tokens", 512)),
            pack_tokens=None if pack_tokens in (None, "None") else int(pack_tokens),
            max_batch_size=int(decode.options.get("max_batch_size", 64)),
            message_s=self.profile.message_s,
            handoff_s=self.profile.handoff_s,
            error=max(error.prefill, error.decode),
            slowdown=tuple((point.batch_size, point.prefill, point.decode) for point in self.profile.slowdown),
        )
