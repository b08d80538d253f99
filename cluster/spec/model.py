"""ClusterSpec is what a person writes to say what shall run: a model, a router, pools of workers, the transfer.

    file or flags --load--> ClusterSpec --resolve (cluster/spec/resolve.py)--> no "auto" left --> one plan a worker

It checks; it starts nothing and looks at no machine. A spec is never changed after it is made. Every mistake is one
sentence (SpecError). Keys that are knobs of a running part come from that part's options class.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, field_validator, model_validator

from cluster.front.options import FrontOptions
from cluster.router.options import RouterOptions
from cluster.spec.errors import show
from cluster.spec.knobs import Spec, setting, with_knobs
from cluster.spec.pool import ANOTHER_MODEL, TRANSPORTS, PoolSpec, check_devices, check_name, check_pool
from cluster.spec.tls import FilePath, MemberTls, RouterTls
from cluster.usage.options import OFF, Prices, UsageOptions
from engine.hub import name_and_commit
from engine.options import EngineOptions
from kv_transfer.options import TransferOptions
from worker.roles import PHASES, ROLES
from worker.wire.tls import why_open

Name = Annotated[str, Field(min_length=1)]
SERVED_NAME = re.compile(r"[\w.:/-]{1,128}", re.ASCII)
MAX_PORT = 65_535
USUAL_HTTP_PORT = 8000  # vLLM's
LISTENED = "routers listen by it from their start"
Price = Annotated[float, Field(ge=0, description="of a million tokens")]
Port = Annotated[int, Field(ge=0, le=MAX_PORT)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]


class PricesSpec(Spec):
    changes = "now"

    currency: Annotated[str, Field(min_length=1, max_length=8)]
    prompt: Price
    cached: Price
    generated: Price

    @property
    def prices(self) -> Prices:
        return Prices(**self.model_dump())


@with_knobs(RouterOptions, FrontOptions, UsageOptions)
class RouterSpec(Spec):
    changes = "now"

    replicas: int = setting(1, "how many", unit="routers", ge=1, le=64, fixed="clients know them by their ports")
    host: str = setting(
        "auto", "address to listen on; auto: 127.0.0.1, or with `--address` this node's own", fixed=LISTENED
    )
    port: Port = setting(50051, "router i listens on port + i; 0: any free ones", fixed=LISTENED)
    metrics_port: Port | None = setting(
        None,
        "router i serves `/metrics` on this + i, on `host`; 0: any free ones; null: not at all",
        fixed=LISTENED,
    )
    http_port: Port | Literal["auto"] | None = setting(
        "auto",
        "router i serves OpenAI's API and `/metrics` on this + i, on `host`; 0: any free ones; null: not at all; auto: "
        "on loopback 8000 + i, or any free one where that is taken or `port` is 0, and elsewhere not at all",
        fixed=LISTENED,
    )
    auth: bool = setting(
        True,
        "clients send a token; false: everyone may call, on loopback or with `tls.client_ca` only",
        fixed=LISTENED,
    )
    tokens_file: FilePath | None = setting(
        None, "named tokens on the router's node, `name:token` a line, followed as they change; null: `up` makes one"
    )
    tls: RouterTls | None = setting(
        None,
        "of the public port, `{cert: FILE, key: FILE}`, for mTLS with `client_ca`; see [security.md](security.md)",
        fixed="routers hold the paths; new contents of the files are taken as they come",
    )
    reflection: bool = setting(True, "says which services there are; with a token, like any other call", fixed=LISTENED)
    drain_s: Seconds = setting(5.0, "how long running requests may take to end when the cluster is stopped", unit="s")
    resources: dict[str, float] = setting(
        {},
        "that place a router; none: where `kvrelay up` runs",
        unit="Ray resources",
        fixed="routers stay where they were placed",
    )
    prices: PricesSpec | None = setting(
        None,
        "that `kvrelay usage` shows costs by, `{currency, prompt, cached, generated}`, of a million tokens each, all "
        "four; null: none",
    )

    @field_validator("usage_db", mode="before", check_fields=False)
    @classmethod
    def _yaml_off(cls, value: object) -> object:
        return OFF if value is False else value  # what YAML makes of it

    @field_validator("usage_db", mode="after", check_fields=False)
    @classmethod
    def _no_url(cls, value: str | None) -> str | None:
        return UsageOptions(usage_db=value).usage_db

    @field_validator("adapters", mode="before", check_fields=False)
    @classmethod
    def _adapters_in_words(cls, value: object) -> object:
        """As vLLM's --lora-modules has them: NAME=DIRECTORY, several with spaces between."""
        if not isinstance(value, str):
            return value
        pairs = [word.partition("=") for word in value.split()]
        if not pairs or not all(name and path for name, _, path in pairs):
            raise ValueError(f"{show(value)} does not say which; give NAME=DIRECTORY, or {{NAME: DIRECTORY}}")
        names = [name for name, _, _ in pairs]
        if len(set(names)) < len(names):
            raise ValueError(f"{show(value)} says one of the names twice; keep one of them")
        return {name: path for name, _, path in pairs}

    @field_validator("adapters", mode="after", check_fields=False)
    @classmethod
    def _adapters_have_names(cls, value: Mapping[str, str]) -> Mapping[str, str]:
        for name, path in value.items():
            if not SERVED_NAME.fullmatch(name):
                raise ValueError(f"{show(name)} is no adapter's name; give letters, digits and . _ - : / , at most 128")
            if not path:
                raise ValueError(f"{name} has no directory; give one as PEFT saves it")
        return value

    def why_open(self, host: str) -> str:
        return why_open(host, auth=self.auth, tls=self.tls.files if self.tls else None)


@with_knobs(TransferOptions)
class TransferSpec(Spec):
    changes = "rolling"

    @field_validator("nccl", mode="before", check_fields=False)
    @classmethod
    def _only_nccl(cls, value: object) -> object:
        if not isinstance(value, Mapping):
            return value
        for key in value:
            if not str(key).startswith(("NCCL_", "TORCH_NCCL_")):
                raise ValueError(f"{show(key)} is no setting of NCCL's; give keys that begin with NCCL_ or TORCH_NCCL_")
        return {str(key): str(int(v) if isinstance(v, bool) else v) for key, v in value.items()}

    @field_validator("transports", mode="after", check_fields=False)
    @classmethod
    def _transports(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError(f"give at least one of {', '.join(TRANSPORTS)}")
        for name in value:
            if name not in TRANSPORTS:
                raise ValueError(f"{show(name)} is no transport; give some of {', '.join(TRANSPORTS)}")
        return value


@with_knobs(EngineOptions, scope="cluster")
class ModelSpec(Spec):
    changes = "now"

    if TYPE_CHECKING:  # of the engine's knobs, one that others look at
        dtype: str

    name: str = setting(..., "what requests call it, and pools in their `model`", fixed="clients know it")
    model: Name = setting(..., "a directory or hub id, as `model` of the cluster", fixed=ANOTHER_MODEL)

    @field_validator("name", mode="after")
    @classmethod
    def _good_name(cls, value: str) -> str:
        if not SERVED_NAME.fullmatch(value):
            raise ValueError("give letters, digits and . _ - : / , at most 128")
        return value


@with_knobs(EngineOptions, scope="cluster")
class ClusterSpec(Spec):
    changes = "now"

    if TYPE_CHECKING:  # those of the engine's knobs that others look at
        dtype: str
        page_size: int | None
        quantization: str
        max_model_len: int | None

    name: str = setting(
        "kvrelay",
        "of the cluster: `a-z`, `0-9` and `-`, at most 40; what `kvrelay down` takes",
        fixed="it is the cluster's name",
    )
    model: Name = setting(
        ...,
        "a Hugging Face directory or hub id. `./x` is meant from the spec's folder if it is there, else from yours",
        fixed=ANOTHER_MODEL,
    )
    served_model_name: str | None = setting(
        None, "what requests may call it; null: the directory's name or the hub id", fixed="clients know it"
    )
    ready_timeout_s: Seconds = setting(600.0, "how long `up` waits until all are ready", unit="s")
    liveness_timeout_s: Seconds = setting(
        10.0,
        "a worker or router whose process or event loop stands still for so long is killed and replaced",
        unit="s",
        fixed="every process is started with it",
    )
    router: RouterSpec = setting(RouterSpec(), "see *Router keys*")
    pools: Annotated[tuple[PoolSpec, ...], Field(min_length=1)] = setting(
        ..., "a list; prompts and answers each need a pool: of role prefill and of role decode, or mixed"
    )
    models: tuple[ModelSpec, ...] = setting(
        (), "served beside `model`, from pools that name them; a list, see *Several models*"
    )
    transfer: TransferSpec = setting(TransferSpec(), "see *Transfer keys*")
    tls: MemberTls | None = setting(
        None,
        "between all processes, `{cert: FILE, key: FILE, ca: FILE}` on every node; see [security.md](security.md)",
        fixed="every process holds the paths; new contents of the files are taken as they come",
    )

    replan: Literal["off", "advise", "act"] = setting(
        "off",
        "where requests miss the router's targets (`slo_ttft_ms`, `slo_tpot_ms`), `kvrelay up` weighs other roles for "
        "its workers, as `kvrelay replan` does, and `kvrelay decisions` shows; act: and has workers change theirs",
    )
    replan_attainment: float = setting(
        0.9, "share of requests that shall meet both; with fewer, other roles are weighed", gt=0, lt=1
    )
    replan_policy: Literal["kvrelay", "distserve"] = setting(
        "kvrelay", "whose rule decides: distserve's, to compare with, weighs neither prices nor chance"
    )
    replan_most_devices: Annotated[int, Field(ge=2, le=4096)] | None = setting(
        None, "GPUs (of a CPU, ranks) that they may take: pools grow and shrink; none: they keep their sizes"
    )

    @field_validator("replan", mode="before")
    @classmethod
    def _yaml_off(cls, value: object) -> object:
        return "off" if value is False else value  # what YAML makes of it

    @field_validator("name", mode="after")
    @classmethod
    def _good_name(cls, value: str) -> str:
        return check_name(value)

    @model_validator(mode="after")
    def _pools_make_sense(self) -> ClusterSpec:
        self._check_models()
        for name in self.served:
            for phase in PHASES:
                if not any(phase in ROLES[pool.role].phases for pool in self.pools if pool.model == name):
                    of = f" of {name}" if name else ""
                    more = f" and model {name}" if name else ""
                    raise ValueError(
                        f"pools has none that computes {phase}{of}; add one with role {phase}, or mixed{more}"
                    )
        for label, count in Counter(pool.label for pool in self.pools).items():
            if count > 1:
                raise ValueError(f"pools has {count} pools named {label}; give each a name of its own")
        for index, pool in enumerate(self.pools):
            check_pool(index, pool)
        check_devices(
            self.pools, [pool.device for pool in self.pools], self.transfer.options(TransferOptions).transports
        )
        _check_ports(self.router)
        _check_auth(self.router)
        self._check_replan()
        for name in (self.model_name, *(model.name for model in self.models)):
            if name in self.router.options(FrontOptions).adapters:
                raise ValueError(f"router.adapters has {show(name)}, which is a model's own name; take another")
        return self

    def _check_models(self) -> None:
        for name, count in Counter([self.model_name, *(model.name for model in self.models)]).items():
            if count > 1:
                raise ValueError(f"models has {show(name)}, the name of another one; give each its own")
        for index, pool in enumerate(self.pools):
            if pool.model not in self.served:
                known = ", ".join(model.name for model in self.models) or "none"
                raise ValueError(
                    f"pools[{index}].model is {show(pool.model)}, which is not in models; there are {known}, and a "
                    "pool without a model serves the cluster's own"
                )

    @property
    def served(self) -> dict[str, ClusterSpec | ModelSpec]:
        """What pools may name in their `model`, and who has the model's own keys; the cluster's own is ''."""
        return {"": self, **{model.name: model for model in self.models}}

    def _check_replan(self) -> None:
        if self.replan != "off" and self.models:
            raise ValueError(
                f"replan is {self.replan}, and there are several models, of which a replanner knows one; make it off, "
                "or take models out"
            )
        if self.replan != "off" and not self.targets_s:
            raise ValueError(
                f"replan is {self.replan}, and router has no targets; give slo_ttft_ms, slo_tpot_ms or both"
            )
        for key in ("replan_attainment", "replan_policy", "replan_most_devices"):
            if self.replan == "off" and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} is given, and replan is off; make it advise or act")
        if self.replan_policy == "distserve" and self.replan_most_devices is not None:
            raise ValueError(
                "replan_most_devices is given, and replan_policy is distserve, which has no rule for fewer devices; "
                "take one of them out"
            )

    @property
    def targets_s(self) -> dict[str, float]:
        """ttft_s, tpot_s: those that the router was given."""
        options = self.router.options(RouterOptions)
        given_ms = {"ttft_s": options.slo_ttft_ms, "tpot_s": options.slo_tpot_ms}
        return {name: ms / 1e3 for name, ms in given_ms.items() if ms}

    def with_paths(self, found: Callable[[str], str]) -> ClusterSpec:
        """Each model where `found` says that it lies."""
        models = tuple(each.model_copy(update={"model": found(each.model)}) for each in self.models)
        beside = {"models": models} if models else {}  # else it would count as given
        return self.model_copy(update={"model": found(self.model), **beside})

    def with_adapters_in(self, folder: Path) -> ClusterSpec:
        """Their directories by whole paths: a relative one is meant from there, where it is found there."""
        adapters = self.router.options(FrontOptions).adapters
        if not adapters:
            return self
        found = {name: _found_in(folder, path) for name, path in adapters.items()}
        return self.model_copy(update={"router": self.router.model_copy(update={"adapters": found})})

    @property
    def model_name(self) -> str:
        """What requests call the model."""
        is_path = self.model.startswith((".", "/", "~"))
        return self.served_model_name or (Path(self.model).name if is_path else name_and_commit(self.model)[0])


def _found_in(folder: Path, path: str) -> str:
    whole = folder / Path(path).expanduser()
    return str(whole.absolute()) if whole.is_dir() else path


def _check_auth(router: RouterSpec) -> None:
    if not router.auth and router.tokens_file:
        raise ValueError("router.auth is false, and a tokens_file is given; give one of them")
    if why := router.why_open(router.host) if router.host != "auto" else "":
        raise ValueError(f"router.{why}")


def _check_ports(router: RouterSpec) -> None:
    ports = {"port": router.port, "metrics_port": router.metrics_port, "http_port": router.http_port}
    for key, port in ports.items():
        if isinstance(port, int) and port + router.replicas - 1 > MAX_PORT:
            raise ValueError(
                f"router.{key} is {port}, too high for {router.replicas} replicas with a port each; "
                f"give {MAX_PORT + 1 - router.replicas} or less"
            )
