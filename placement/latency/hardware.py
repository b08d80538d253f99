"""Hardware says what one kind of GPU (or one CPU core) can do and costs, as a person wrote it in a YAML file.

Every figure is of one GPU. A datasheet's figure is a ceiling; `efficiency` says what share of it a serving engine gets,
`overhead` what a step costs besides, and each says where it comes from. `error` is by how much a latency computed from
this file was wrong where it was checked. Every mistake in a file is one sentence: file, key, value, mend.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from cluster.spec.documents import document, mistake_of
from cluster.spec.errors import sentences_of, show
from cluster.spec.knobs import Spec
from placement.catalogs.base import MachineCost, PlanError
from placement.named_files import named_file, names_of

SHOWN_SENTENCES = 4
IN_BYTES = ("memory_bytes", "memory_bytes_per_s", "node_link_bytes_per_s", "cross_link_bytes_per_s")
LEAST_BYTES = 1e6
LEAST_FLOPS = 1e9

Above0 = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]


class Sourced(Spec):
    """A share of a ceiling, and who found it."""

    value: Share
    source: str = Field(min_length=1)


class Cost(Spec):
    """Seconds, and who found them."""

    value: float = Field(ge=0, le=10)
    source: str = Field(min_length=1)


class Half(Spec):
    """The size at which a share of a ceiling is half of what a large one reaches, and who found it."""

    value: float = Field(ge=0)
    source: str = Field(min_length=1)


NO_SIZE = Half(value=0.0, source="not known: the same share at every size")
NO_COST = Cost(value=0.0, source="not known: in step_s")


class Error(Spec):
    """Nine times in ten a latency is within this share of the truth. `value`: of a model that no figure was fitted to.
    `one_gpu`: likewise, with neither TP nor PP. `fitted`: of `models`, to which figures were fitted, by name."""

    value: float = Field(ge=0, le=10)
    one_gpu: float | None = Field(None, ge=0, le=10)
    fitted: float | None = Field(None, ge=0, le=10)
    models: tuple[str, ...] = ()
    source: str = Field(min_length=1)

    def of(self, model: str, gpus: int = 1) -> float:
        if self.fitted is not None and model in self.models:
            return self.fitted
        return self.one_gpu if gpus == 1 and self.one_gpu is not None else self.value


class Efficiency(Spec):
    prefill_flops: Sourced  # of flops, in the matrices of a long step; of wide ones, where half_width is given
    prefill_flops_float8: Sourced | None = None  # the same in float8; none: as in wider dtypes
    half_width: Half = NO_SIZE  # of a GPU's products: the root of its parameters a layer
    attention_flops: Sourced  # of flops, in the attention of a prompt
    decode_bandwidth: Sourced  # of memory_bytes_per_s, reading weights
    attention_bandwidth: Sourced  # of memory_bytes_per_s, reading KV
    half_heads: Half = NO_SIZE  # that read KV in a decode step: requests times KV heads on a GPU
    link: Sourced  # of a link's bytes, moving KV to another worker
    collective: Sourced  # of a link's bytes, in an all-reduce
    overlap: Sourced  # of the shorter of arithmetic and reading weights, hidden behind the longer


class Overhead(Spec):
    step_s: Cost  # once a step and stage: sampling, gaps
    prefill_step_s: Cost = NO_COST  # once a step that reads prompts, besides
    request_s: Cost = NO_COST  # once a request for which a step draws a token
    layer_s: Cost  # once a layer: launching kernels; small where steps are captured as graphs
    reduce_s: Cost = NO_COST  # once an all-reduce, whatever the group
    hop_s: Cost  # of a ring all-reduce within a node: 2 (tp - 1) of them
    cross_hop_s: Cost  # between nodes


class PowerCap(Spec):
    """A machine held to a share of its power: by what its times grow."""

    power: Share
    prefill_time: float = Field(ge=1)
    decode_time: float = Field(ge=1)
    source: str = Field(min_length=1)


class Hardware(Spec):
    name: str = Field(min_length=1)
    unit: Literal["GPU", "core"] = "GPU"
    flops: dict[str, Above0]  # dense, by dtype: float32, bfloat16, float16, float8
    memory_bytes: Above0
    memory_bytes_per_s: Above0
    node_link_bytes_per_s: Above0  # one direction
    cross_link_bytes_per_s: Above0  # one direction, a GPU's share of its node's network
    gpus_per_node: int = Field(ge=1, le=1024)
    usd_per_gpu_hour: float = Field(ge=0)
    watts_per_gpu: Above0  # with its share of the machine
    memory_share: Share = 0.9  # of the memory, that an engine uses
    power_caps: tuple[PowerCap, ...] = ()
    efficiency: Efficiency
    overhead: Overhead
    error: Error

    @field_validator(*IN_BYTES, mode="before")
    @classmethod
    def _in_bytes(cls, value: Any) -> Any:
        return _large(value, LEAST_BYTES, "bytes, as 80.0e9, and not GB")

    @field_validator("flops", mode="before")
    @classmethod
    def _in_flops(cls, value: Any) -> Any:
        for flops in value.values() if isinstance(value, dict) else ():
            _large(flops, LEAST_FLOPS, "FLOP/s, as 989.0e12, and not TFLOP/s")
        return value

    @field_validator("flops", mode="after")
    @classmethod
    def _known_dtypes(cls, value: dict[str, float]) -> dict[str, float]:
        known = ("float32", "bfloat16", "float16", "float8")
        for dtype in value:
            if dtype not in known:
                raise ValueError(f"{show(dtype)} is no dtype; give some of {', '.join(known)}")
        if "bfloat16" not in value and "float16" not in value and "float32" not in value:
            raise ValueError("give FLOP/s for at least one of bfloat16, float16, float32")
        return value

    @model_validator(mode="after")
    def _caps_differ(self) -> Hardware:
        caps = [cap.power for cap in self.power_caps]
        if len(set(caps)) != len(caps):
            raise ValueError(f"power_caps has {caps}; give each power once")
        return self

    def flops_for(self, dtype: str) -> float:
        """FLOP/s in a dtype; one that the hardware lacks is computed in the next wider that it has."""
        halves = ("bfloat16", "float16")
        wider = {"float8": ("float8", *halves), "float16": ("float16", "bfloat16"), "bfloat16": halves}
        for name in (*wider.get(dtype, ()), "float32"):
            if name in self.flops:
                return self.flops[name]
        raise PlanError(f"{self.name} has no FLOP/s for {dtype}; give flops.{dtype} in its file")

    def matrix_flops_for(self, dtype: str, width: float) -> float:
        """FLOP/s that products of this width get."""
        share = self.efficiency.prefill_flops
        if dtype == "float8" and "float8" in self.flops:
            share = self.efficiency.prefill_flops_float8 or share
        return self.flops_for(dtype) * share.value * width / (width + self.efficiency.half_width.value)

    def cap(self, power: float) -> PowerCap:
        """How a cap slows it down. Raises PlanError for one that nobody measured."""
        if power == 1.0:
            return PowerCap(power=1.0, prefill_time=1.0, decode_time=1.0, source="no cap")
        for cap in self.power_caps:
            if cap.power == power:
                return cap
        known = ", ".join(f"{cap.power:g}" for cap in self.power_caps) or "none"
        raise PlanError(
            f"power cap is {power:g}; {self.name}'s file has power_caps for {known}, so give 1 or add it there"
        )

    def cost(self, power: float = 1.0) -> MachineCost:
        return MachineCost(usd_per_gpu_hour=self.usd_per_gpu_hour, watts_per_gpu=self.watts_per_gpu * power)


def _large(value: Any, least: float, mend: str) -> Any:
    if isinstance(value, bool) or (isinstance(value, int | float) and 0 < value < least):
        raise ValueError(f"no machine has that; give {mend}")
    return value


def load_hardware(hardware: str | Path) -> Hardware:
    """From a YAML file, or a name under configs/hardware. Raises PlanError."""
    path = _find(str(hardware))
    try:
        data = document(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise PlanError(f"hardware file {path} cannot be read: {why}; give another") from None
    except yaml.YAMLError as error:
        raise PlanError(f"{path} is not YAML: {mistake_of(error)}") from None
    return parse_hardware(data, str(path))


def parse_hardware(data: Any, path: str = "hardware") -> Hardware:
    """From plain data; `path` is named in what is wrong with it. Raises PlanError."""
    if not isinstance(data, dict):
        raise PlanError(f"{path} is {show(data)}; give keys and values such as memory_bytes: 80.0e9")
    try:
        return Hardware.model_validate(_numbers(data))
    except ValidationError as error:
        sentences = sentences_of(error, Hardware)
        more = [f"{path}: {len(sentences) - SHOWN_SENTENCES} more"] if len(sentences) > SHOWN_SENTENCES else []
        raise PlanError("\n".join([f"{path}: {s}" for s in sentences[:SHOWN_SENTENCES]] + more)) from None


def known_hardware() -> list[str]:
    return names_of("hardware", ".yaml")


def _find(hardware: str) -> Path:
    path = Path(hardware).expanduser()
    if path.is_file():
        return path
    shipped = named_file("hardware", hardware, ".yaml") if path.name == hardware else None
    if shipped is not None:
        return shipped
    known = ", ".join(known_hardware())
    raise PlanError(f"hardware is {hardware!r}, which is no file; give one, or a name of {known}")


def _numbers(value: Any) -> Any:
    """YAML reads 4.8e12 as text: it wants a sign in the exponent."""
    if isinstance(value, dict):
        return {str(key): _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    if isinstance(value, str) and value[:1].isdigit():
        try:
            return float(value)
        except ValueError:
            return value
    return value
