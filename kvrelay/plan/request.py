"""PlanRequest is what a person asks the planner. It checks; it reads no file (see reading.py) and plans nothing.

Latency targets are written with their unit (250ms, 0.25s); a bare number is milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from cluster.spec.knobs import Spec, setting, with_knobs
from decode_worker.options import DecodeOptions
from engine.knobs import knobs_of
from engine.options import EngineOptions
from kvrelay.bench.options import WorkloadOptions
from kvrelay.plan.durations import parse_duration
from placement.latency.model_shape import FEW_BITS
from placement.papers import registry
from placement.plan import RequestClass, Slo

LATENCIES = ("auto", "roofline", "profile", *registry.CATALOGS)
SIZES = ("num_gpus", "rate", "budget")
RANDOM = ("random_input_len", "random_output_len", "random_range_ratio")
OF_TRACES = ("trace_scale", "trace_timestamps", "max_input_len", "max_output_len", "num_prompts")
WORKLOAD_KEYS = ("trace", *OF_TRACES, *RANDOM, "burstiness", "seed")
OF_ONE_KIND = ("what_if", "max_pp", "algorithm")
GUESSING = ("speculative_model", "acceptance_rate")
PROMPT_LOOKUP = "prompt lookup"  # that there is no model for it
MOST_GUESSES = knobs_of(DecodeOptions)["num_speculative_tokens"].le
CLASS_KEYS = ("name", "share", "ttft", "tpot", "attainment")


def counted(kind: str) -> tuple[str, int | None]:
    """Of hardware: h100-sxm:8 is 8 GPUs of h100-sxm."""
    name, colon, count = kind.rpartition(":")
    return (name, int(count)) if colon and count.isdecimal() else (kind, None)


def listed(value: object) -> object:
    """h100,a100 and [h100, a100] are one."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


Duration = Annotated[float, BeforeValidator(parse_duration), Field(gt=0, le=86_400)]
Share = Annotated[float, Field(gt=0, lt=1)]
Count = Annotated[int, Field(ge=1)]
Above0 = Annotated[float, Field(gt=0)]
Paths = Annotated[tuple[Path, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str | Path) else value)]
Names = Annotated[tuple[str, ...], BeforeValidator(listed), Field(min_length=1)]


class PlanClass(Spec):
    """Requests with targets of their own; `share` of all, in any unit: shares are made to sum to 1."""

    name: str = Field(min_length=1)
    share: Above0 = 1.0
    ttft: Duration | None = None
    tpot: Duration | None = None
    attainment: Share | None = None  # None: as the request's

    @model_validator(mode="after")
    def _has_a_target(self) -> PlanClass:
        if self.ttft is None and self.tpot is None:
            raise ValueError(f"class {self.name} has no target; give it ttft, tpot or both")
        return self


@with_knobs(EngineOptions, only=FEW_BITS)
@with_knobs(WorkloadOptions, only=WORKLOAD_KEYS)
class PlanRequest(Spec):
    """Its keys are the flags of `kvrelay plan`; those of the workload are WorkloadOptions' own."""

    model: str | None = setting(
        None, "A model directory, or a name of configs/models or the hub (if downloaded).", min_length=1
    )
    hardware: Names | None = setting(
        None, "A file, or a name of configs/hardware; several with commas between them. NAME:8: there are 8 GPUs of it."
    )
    num_gpus: Count | None = setting(None, "Use so many GPUs at most; cores, with profiles of CPU workers.")
    rate: Above0 | None = setting(None, "Serve so many requests per second.")
    budget: Above0 | None = setting(None, "Spend so many USD an hour at most.")

    ttft: Duration | None = setting(None, "Time to first token: 250ms, 0.25s; a bare number is ms.")  # here in seconds
    tpot: Duration | None = setting(None, "Time per output token after it: 25ms.")
    attainment: Share = setting(0.9, "Share of requests that must meet both.")
    classes: tuple[PlanClass, ...] = setting(
        (), "Requests with targets of their own, NAME:SHARE:TTFT:TPOT. May be repeated."
    )
    objective: Literal["goodput", "cost", "power"] | None = setting(
        None, "`goodput`, `cost` or `power`. Default: cost with --rate, else goodput."
    )

    latency: str = setting(
        "auto",
        f"`roofline`, `profile` or {', '.join(registry.CATALOGS)} (its own figures). Default: by what is given.",
    )  # one of LATENCIES
    profile: Paths = setting(
        (), "What kvrelay calibrate measured, instead of a roofline. May be repeated: workers of other threads."
    )
    margin: Path | None = setting(None, "What kvrelay verify found; it widens the intervals.")
    max_pp: Count = setting(1, "Pipeline stages to try, at most.")
    tensor_parallel: Count | None = setting(None, "This degree alone. Default: all; of mixed machines, a whole node.")
    colocated: bool = setting(True, "Also try workers that do both, which may win. Default: yes.")
    algorithm: Literal["auto", "high", "low"] = setting(
        "auto", "DistServe's: high or low node-affinity. Default: auto, by the links."
    )
    max_batch_tokens: Count | None = setting(None, "Prompt tokens of a prefill step, at most.")
    max_batch_size: Count | None = setting(None, "Requests of a decode step, at most.")
    num_speculative_tokens: Annotated[int, Field(ge=1, le=MOST_GUESSES)] | None = setting(
        None, "Also try to guess so many tokens ahead of each request: says whether that pays."
    )
    speculative_model: str | None = setting(
        None,
        "A smaller model that guesses them, as `model`, or a directory of heads. Default: `prompt lookup`.",
        min_length=1,
    )
    acceptance_rate: Annotated[float, Field(ge=0, le=1)] | None = setting(
        None, "Chance of such a guess to be right where those before it are; it is believed."
    )
    what_if: bool = setting(
        False, "Also simulate what moves the answer: times, targets, lengths; one worker more; twice the rate."
    )
    processes: int | None = setting(
        None, "Simulate in so many; 0: in this one, uncompiled, at a quarter of the speed. Default: one a core.", ge=0
    )

    @model_validator(mode="before")
    @classmethod
    def _counts_are_a_size(cls, data: Any) -> Any:
        """All GPUs that `hardware` counts, where nothing else is said; of one kind that is `num_gpus` and no more."""
        kinds = listed(data.get("hardware")) if isinstance(data, Mapping) else None
        if not isinstance(kinds, Sequence) or not all(isinstance(each, str) for each in kinds):
            return data
        names, counts = zip(*(counted(each) for each in kinds), strict=True) if kinds else ((), ())
        if not counts or None in counts or any(data.get(key) is not None for key in SIZES):
            return data
        return {**data, "num_gpus": sum(counts)} | ({"hardware": names} if len(names) == 1 else {})

    @field_validator("latency", mode="after")
    @classmethod
    def _known_latency(cls, value: str) -> str:
        if value not in LATENCIES:
            *others, last = (f"'{name}'" for name in LATENCIES)
            raise ValueError(f"give {', '.join(others)} or {last}")
        return value

    @field_validator("speculative_model", mode="after")
    @classmethod
    def _lookup_is_no_model(cls, value: str | None) -> str | None:
        return None if value == PROMPT_LOOKUP else value

    @field_validator("hardware", mode="after")
    @classmethod
    def _each_once(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for each in value or ():
            name, colon, count = each.rpartition(":")
            if colon and not count.isdecimal() and not any(mark in count for mark in "/."):  # of a path
                raise ValueError(f"{count!r} is no count of GPUs; give a whole number, such as {name}:8")
        names = [counted(each)[0] for each in value or ()]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{name} is there twice; give each kind of machine once")
        return value

    @model_validator(mode="after")
    def _makes_sense(self) -> PlanRequest:
        self._check_size()
        self._check_targets()
        self._check_workload()
        self._check_machines()
        self._check_guesses()
        return self

    # In these sentences `key` is a key; it is shown as it was written, in a file or as a flag.

    def _check_size(self) -> None:
        given = [key for key in SIZES if getattr(self, key) is not None]
        if not given and self.gpus_of:
            name = next(name for name in self.kinds if name not in self.gpus_of)
            kinds = ", ".join(self.hardware or ())
            raise ValueError(
                f"`hardware` is {kinds}, and how many there are of {name} is not said; give {name}:8, or `num_gpus`"
            )
        if not given:
            raise ValueError("nothing says how much; give one of `num_gpus`, `rate` or `budget`")
        if self.gpus_of and (self.rate is not None or len(self.kinds) == 1):
            kinds = ", ".join(self.hardware or ())
            raise ValueError(f"`hardware` is {kinds} and `{given[0]}` {getattr(self, given[0]):g}; give one of them")
        if few := next((name for name, count in self.gpus_of.items() if not count), None):
            raise ValueError(f"`hardware` has 0 of {few}; give 1 or more, or take it out")
        if len(given) > 1:
            values = " and ".join(f"`{key}` {getattr(self, key):g}" for key in given)
            raise ValueError(f"{values} do not go together; give one of them")
        if self.rate is not None and self.objective == "goodput":
            raise ValueError("`objective` is goodput, but `rate` fixes it; give `objective` cost or power")

    def _check_targets(self) -> None:
        own = [key for key in ("ttft", "tpot") if getattr(self, key) is not None]
        if self.classes and own:
            raise ValueError(f"`{own[0]}` does not go with `classes`; give each class its own targets")
        if not self.classes and not own:
            raise ValueError("no target is given; give `ttft`, `tpot` or both, or `classes` with targets")
        names = [each.name for each in self.classes]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"`classes` has the name {twice} twice; give each class its own")

    def _check_workload(self) -> None:
        asked, random = self.workload, self.changed(RANDOM)
        if asked.trace is not None and random:
            raise ValueError(f"`{random[0]}` does not go with `trace`; give one of the two")
        if asked.trace is None and (asked.random_input_len is None or asked.random_output_len is None):
            raise ValueError("no requests are given; give `trace`, or `random_input_len` and `random_output_len`")
        if asked.trace is None and (foreign := self.changed(OF_TRACES)):
            raise ValueError(f"`{foreign[0]}` is of a trace and there is none; give `trace`, or take it out")
        if asked.trace_timestamps and asked.burstiness != 1:
            raise ValueError("`burstiness` does not go with `trace_timestamps`; the trace has its own bursts")

    def changed(self, keys: Sequence[str]) -> list[str]:
        """Those that have not their defaults."""
        return [key for key in keys if getattr(self, key) != type(self).model_fields[key].default]

    def _check_machines(self) -> None:
        kind = self.latency_kind
        if kind == "profile" and not self.profile:
            raise ValueError("`latency` is profile and there is none; give `profile`")
        if kind != "profile" and self.profile:
            raise ValueError(f"`latency` is {self.latency}, but `profile` is given; take one of them out")
        if kind != "profile" and self.model is None:
            raise ValueError("`model` is missing; give a model directory, or a name of configs/models")
        if kind == "roofline" and not self.hardware:
            raise ValueError("`hardware` is missing; give a file, or a name of configs/hardware")
        if kind != "roofline" and len(self.hardware or ()) > 1:
            names = ", ".join(self.hardware or ())
            raise ValueError(f"`hardware` is {names}; a {kind} is of one kind of machine, give no more than one")
        if kind != "roofline" and (narrow := self.changed(FEW_BITS)):
            raise ValueError(
                f"`{narrow[0]}` is {getattr(self, narrow[0])}, and a {kind} is of workers as they were measured; take "
                "it out"
            )
        if len(self.hardware or ()) > 1 and (one_kind := self.changed(OF_ONE_KIND)):
            names = ", ".join(self.hardware or ())
            raise ValueError(f"`{one_kind[0]}` is of one kind of machine and `hardware` is {names}; give one of them")

    def _check_guesses(self) -> None:
        asked, chance = self.num_speculative_tokens, self.acceptance_rate
        if asked is None and (given := [key for key in GUESSING if getattr(self, key) is not None]):
            raise ValueError(
                f"`{given[0]}` is {getattr(self, given[0])} and nothing is guessed; give `num_speculative_tokens`, too"
            )
        if asked is not None and chance is None:
            raise ValueError(
                f"`num_speculative_tokens` is {asked}, and how often a guess is right is not said; give "
                "`acceptance_rate`, from 0 to 1"
            )
        if asked is not None and (self.latency_kind not in ("roofline", "profile") or len(self.hardware or ()) > 1):
            raise ValueError(
                f"`num_speculative_tokens` is {asked}, which is for one kind of machine, by a roofline or a profile; "
                "take it out"
            )

    @property
    def workload(self) -> WorkloadOptions:
        return WorkloadOptions(**{name: getattr(self, name) for name in WORKLOAD_KEYS})

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of hardware, without how many there are."""
        return tuple(counted(each)[0] for each in self.hardware or ())

    @property
    def gpus_of(self) -> dict[str, int]:
        """How many there are of those kinds of which it is said."""
        return {name: count for name, count in map(counted, self.hardware or ()) if count is not None}

    @property
    def wanted(self) -> Literal["goodput", "cost", "power"]:
        """The objective: a rate is served at the least cost, anything else used for the most goodput."""
        return self.objective or ("cost" if self.rate is not None else "goodput")

    @property
    def latency_kind(self) -> str:
        """One of LATENCIES, but not auto."""
        if self.latency == "auto":
            return "profile" if self.profile else "roofline"
        return self.latency

    @property
    def slo(self) -> Slo:
        """The targets of all; with classes those of the first, for words."""
        return Slo(ttft_s=_or_inf(self.ttft), tpot_s=_or_inf(self.tpot), attainment=self.attainment)

    @property
    def request_classes(self) -> tuple[RequestClass, ...]:
        whole = sum(each.share for each in self.classes) or 1.0
        return tuple(
            RequestClass(
                name=each.name,
                share=each.share / whole,
                slo=Slo(
                    ttft_s=_or_inf(each.ttft), tpot_s=_or_inf(each.tpot), attainment=each.attainment or self.attainment
                ),
            )
            for each in self.classes
        )


def _or_inf(value: float | None) -> float:
    return math.inf if value is None else value
