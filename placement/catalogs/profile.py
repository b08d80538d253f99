"""ProfileCatalog: the workers that `kvrelay calibrate` measured, as the planner can have them.

Each profile is a kind of worker, told from the others by its threads; all are of one model on one machine. What one of
them could not measure, it has from another: a lone mixed worker hands nothing over and shares its host with nobody, and
a pair of prefill and decode has no step of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from placement.catalogs.base import Degrees, MachineCost, Offer, PlanError
from placement.catalogs.guesses import Guesses
from placement.latency.model_shape import FEW_BITS, ModelShape
from placement.latency.profile import Profile, SlowdownPoint
from placement.latency.profile_latency import ProfileLatency

UNCOUNTED = 0.15  # of a model's parameters: in a tower for images, which a config's count leaves out
MISCOUNTED = 0.05  # of a family whose config does not say all


class ProfileCatalog:
    """Implements Catalog. Where threads are known a "GPU" is a core and the machine is a node; else it is the share of
    the machine that a worker had. Raises PlanError for profiles that do not go together."""

    def __init__(
        self,
        *profiles: Profile,
        cost: MachineCost | None = None,
        guesses: Guesses | None = None,
        shape: ModelShape | None = None,
    ) -> None:
        """`shape`: the model's, which `guesses` by a draft model need."""
        _check(profiles)
        self.profiles = {degrees_of(profile): profile for profile in _complete(profiles)}
        self._guesses, self._shape = guesses, shape
        self._cost = cost or MachineCost(usd_per_gpu_hour=0.0, watts_per_gpu=0.0)
        share = next((ProfileLatency(profile).prompt_share for profile in profiles if profile.is_mixed), None)
        self._latency = {
            degrees: ProfileLatency(profile, None if profile.is_mixed else share)
            for degrees, profile in self.profiles.items()
        }

    @property
    def _first(self) -> Profile:
        return next(iter(self.profiles.values()))

    @property
    def model(self) -> str:
        return str(self._first.model.get("name", "model"))

    @property
    def hardware(self) -> str:
        machine = self._first.machine
        return str(machine.get("cpu") or machine.get("host") or "measured worker")

    @property
    def gpus_per_node(self) -> int:
        cores = int(self._first.machine.get("cores", 1)) if self._first.threads else 1
        return max(cores, *(degrees.gpus for degrees in self.profiles), 1)

    @property
    def cost(self) -> MachineCost:
        return self._cost

    def degrees(self, max_gpus: int) -> Sequence[Degrees]:
        return sorted((degrees for degrees in self.profiles if degrees.gpus <= max_gpus), key=lambda each: each.gpus)

    def offer(self, degrees: Degrees, *, within_node: bool = True) -> Offer | str:
        if degrees not in self.profiles:
            measured = " and ".join(map(str, self.profiles))
            return f"{degrees} was not measured, only {measured}; calibrate a cluster that runs it"
        profile = self.profiles[degrees]
        prefill, decode = profile.prefill_pool, profile.decode_pool
        pack_tokens = prefill.options.get("pack_tokens")
        guesses, num_pages = self._guesses, min(prefill.num_pages, decode.num_pages)
        return Offer(
            degrees=degrees,
            latency=self._latency[degrees],
            num_pages=num_pages,
            page_size=profile.page_size,
            max_batch_tokens=int(prefill.options.get("max_batch_tokens", 512)),
            pack_tokens=None if pack_tokens in (None, "None") else int(pack_tokens),
            max_batch_size=int(decode.options.get("max_batch_size", 64)),
            message_s=profile.message_s,
            handoff_s=profile.loaded_handoff_s,
            error=max(profile.wrong_by),
            slowdown=profile.by_batch,
            speculation=guesses.beside(self._latency[degrees], self._shape) if guesses else None,
            speculative_pages=int(num_pages * guesses.page_share(self._shape, degrees.tp)) if guesses else 0,
        )


def degrees_of(profile: Profile) -> Degrees:
    return Degrees(profile.tp, profile.pp, profile.threads)


def check_model(profile: Profile, shape: ModelShape) -> None:
    """Raises PlanError for a model that the profile cannot be of. Few bits change no count; a profile that does not
    say its own is believed."""
    measured = profile.model.get("num_params")
    if not isinstance(measured, int) or 1 - MISCOUNTED <= measured / shape.num_params <= 1 + UNCOUNTED:
        return
    name = profile.model.get("name", "a model")
    raise PlanError(
        f"model is {shape.name}, of {shape.num_params:,} parameters, and {profile.name} was measured of {name}, of "
        f"{measured:,}; give the model that was measured, or calibrate this one"
    )


def _check(profiles: Sequence[Profile]) -> None:
    first, *others = profiles
    for other in others:
        for key, value in _alike(other).items():
            if value != (of_first := _alike(first)[key]):
                raise PlanError(
                    f"{key} is {value} in {other.name} and {of_first} in {first.name}; give profiles of one model and "
                    "one machine"
                )
    seen: dict[Degrees, Profile] = {}
    for profile in profiles:
        degrees = degrees_of(profile)
        if others and not profile.threads:
            raise PlanError(f"{profile.name} does not say its workers' threads; measure again with kvrelay calibrate")
        if degrees in seen:
            raise PlanError(f"{seen[degrees].name} and {profile.name} are both of {degrees}; give one of them")
        seen[degrees] = profile
    if all(profile.is_mixed for profile in profiles):
        raise PlanError(
            f"{first.name} is of a mixed worker, which hands nothing over; give one of a prefill and a decode "
            "worker with it, so that they can be compared"
        )


def _alike(profile: Profile) -> dict[str, object]:
    """What profiles of a catalog have in common."""
    model = {f"model.{key}": profile.model.get(key) for key in ("name", "dtype", "fingerprint")}
    narrow = {key: profile.prefill_pool.options.get(key, "not given") for key in FEW_BITS}
    return {**model, **narrow, "page_size": profile.page_size, "machine.cpu": profile.machine.get("cpu")}


def _complete(profiles: Sequence[Profile]) -> list[Profile]:
    """With handoffs, and what workers of a host cost each other, as they were measured of the first pair."""
    pair = next(profile for profile in profiles if not profile.is_mixed)
    slowdown = tuple(SlowdownPoint(batch_size=size, prefill=p, decode=d) for size, p, d in pair.by_batch)
    return [
        replace(profile, transfer=pair.transfer, handoff_s=pair.handoff_s, slowdown=slowdown)
        if profile.is_mixed
        else profile
        for profile in profiles
    ]
