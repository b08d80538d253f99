"""Opens the catalogs that a PlanRequest names: one for each kind of machine, narrowed to what it allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvrelay.plan.request import PlanRequest
from placement.catalogs.base import Catalog, Degrees, MachineCost, Offer, PlanError
from placement.catalogs.guesses import Guesses, guesses_by
from placement.catalogs.profile import ProfileCatalog, check_model
from placement.catalogs.roofline import open_catalog
from placement.checks.margin import load_margin
from placement.latency.hardware import Hardware, load_hardware
from placement.latency.model_files import load_shape, shape_if_known
from placement.latency.model_shape import FEW_BITS, ModelShape
from placement.latency.profile import Profile
from placement.latency.profile_file import read_profile
from placement.papers import registry


def catalogs(request: PlanRequest) -> list[Catalog]:
    """One for each kind of machine, narrowed to what the request allows."""
    opened = _catalogs(request)
    error = load_margin(request.margin).error if request.margin is not None else 0.0
    if not error and request.tensor_parallel is None:
        return opened
    return [Narrowed(of=catalog, tp=request.tensor_parallel, error=error) for catalog in opened]


def _catalogs(request: PlanRequest) -> list[Catalog]:
    if request.latency_kind == "profile":
        return [_profile_catalog(request)]
    assert request.model is not None
    if request.latency_kind in registry.CATALOGS:
        open_published = registry.published(registry.CATALOGS[request.latency_kind])
        return [open_published(name=request.model, **_limits(request))]
    options = {"max_pp": request.max_pp, "guesses": guesses_of(request), **_few_bits(request), **_limits(request)}
    return [open_catalog(request.model, name, **options) for name in request.kinds]


def _few_bits(request: PlanRequest) -> dict[str, str]:
    return {key: getattr(request, key) for key in FEW_BITS}


def _limits(request: PlanRequest) -> dict[str, Any]:
    limits = {"max_batch_tokens": request.max_batch_tokens, "max_batch_size": request.max_batch_size}
    return {key: value for key, value in limits.items() if value is not None}


def _profile_catalog(request: PlanRequest) -> Catalog:
    profiles = [read_profile(path) for path in request.profile]
    cost = _cost(load_hardware(request.kinds[0]), profiles[0]) if request.kinds else None
    if request.model is not None and (given := shape_if_known(request.model)) is not None:
        check_model(profiles[0], given)  # the others are of the same
    guesses, shape = guesses_of(request), _shape(request) if request.speculative_model else None
    return ProfileCatalog(*profiles, cost=cost, guesses=guesses, shape=shape)


def _cost(hardware: Hardware, profile: Profile) -> MachineCost:
    """Raises PlanError where it is of GPUs, and what was measured are cores."""
    if profile.threads and hardware.unit != "core":
        raise PlanError(
            f"hardware is {hardware.name}, whose price is a {hardware.unit}'s, and {profile.name} is of workers on "
            "cores; give a file whose unit is core, such as cpu-generic"
        )
    return hardware.cost()


def guesses_of(request: PlanRequest) -> Guesses | None:
    """None: it does not ask for any. Raises PlanError."""
    num_tokens, chance, model = request.num_speculative_tokens, request.acceptance_rate, request.speculative_model
    if num_tokens is None or chance is None:
        return None
    return guesses_by(model or "", num_tokens, chance, _shape(request) if model else None)


def _shape(request: PlanRequest) -> ModelShape:
    """Of the model, as it was measured where it was."""
    if not request.profile:
        return load_shape(request.model or "").as_served().in_few_bits(**_few_bits(request))
    measured = read_profile(request.profile[0]).model
    return load_shape(request.model or str(measured.get("name"))).with_dtype(str(measured.get("dtype", "auto")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrowed:
    """A catalog with one tensor-parallel degree alone, and with the error that was found of its times where that is
    larger than its own."""

    of: Catalog
    tp: int | None
    error: float

    @property
    def model(self) -> str:
        return self.of.model

    @property
    def hardware(self) -> str:
        return self.of.hardware

    @property
    def gpus_per_node(self) -> int:
        return self.of.gpus_per_node

    @property
    def cost(self) -> MachineCost:
        return self.of.cost

    def degrees(self, max_gpus: int) -> Sequence[Degrees]:
        if self.tp is None:
            return self.of.degrees(max_gpus)
        matching = [degrees for degrees in self.of.degrees(max_gpus) if degrees.tp == self.tp]
        return matching or ([Degrees(self.tp)] if self.tp <= max_gpus else [])  # its offer says why there is none

    def offer(self, degrees: Degrees, *, within_node: bool = True) -> Offer | str:
        offer = self.of.offer(degrees, within_node=within_node)
        return offer if isinstance(offer, str) else replace(offer, error=max(offer.error, self.error))
