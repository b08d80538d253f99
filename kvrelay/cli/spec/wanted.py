"""The spec that a file, its environment variables and flags make together, and where each of its values comes from:
what `kvrelay up` starts, `kvrelay apply` brings a cluster to and `kvrelay config show` shows. It starts nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from kvrelay.cli.console import USAGE, CliError
from kvrelay.cli.spec_flags import SpecChanges

if TYPE_CHECKING:
    from cluster.spec.model import ClusterSpec

SpecArgument = Annotated[Path | None, typer.Argument(help="A cluster spec, YAML. See configs/.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleCounts:
    """How many of each role, where there is no file."""

    prefill: Annotated[int | None, typer.Option(help="Prefill workers. Default: 1; with --mixed: none.")] = None
    decode: Annotated[int | None, typer.Option(help="Decode workers. Default: 1; with --mixed: none.")] = None
    mixed: Annotated[int | None, typer.Option(help="Workers that do both, in the same steps. Default: none.")] = None

    @property
    def asked(self) -> dict[str, int]:
        numbers = {"prefill": self.prefill, "decode": self.decode, "mixed": self.mixed}
        return {role: number for role, number in numbers.items() if number is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    spec: ClusterSpec
    sources: dict[str, str]  # cluster/spec/sources.py

    def with_found_model(self, *, must_be_here: bool) -> Self:
        """A model directory by its full path, for workers stand elsewhere. That it is not there is better told now than
        by a worker in some seconds; on other hosts only they can tell."""
        from kvrelay.model_found import why_not_found

        def found(model: str) -> str:
            if must_be_here and (why := why_not_found(model)):
                raise CliError(why, USAGE)
            path = Path(model).expanduser()
            return str(path.absolute()) if path.is_dir() else model

        return replace(self, spec=self.spec.with_paths(found).with_adapters_in(Path.cwd()))

    def with_tokens_file(self) -> Self:
        """The one that the environment names, where the spec names none."""
        from cluster.spec.tls import full_path
        from kvrelay.client.access import TOKENS_FILE_VARIABLE

        path, router = os.environ.get(TOKENS_FILE_VARIABLE), self.spec.router
        if not path or not router.auth or router.tokens_file:
            return self
        spec = self.spec.model_copy(update={"router": router.model_copy(update={"tokens_file": full_path(path)})})
        return replace(self, spec=spec, sources={**self.sources, "router.tokens_file": f"${{{TOKENS_FILE_VARIABLE}}}"})


def build(path: Path | None, changes: SpecChanges, asked: Mapping[str, int]) -> Wanted:
    """A flag wins over the file. `asked`: workers of each role. Raises SpecError, CliError."""
    from cluster.spec.load import parse_spec, read_spec

    if path is None and "model" not in changes.cluster:
        raise CliError("nothing to serve; give a spec file, or --model DIR", USAGE)
    if path is not None and asked:
        flags = " and ".join(f"--{role}" for role in asked)
        raise CliError(f"{flags} and a spec do not go together; change replicas in its pools", USAGE)
    sources: dict[str, str] = {}
    if path is None:
        pools = asked if "mixed" in asked else {"prefill": 1, "decode": 1, **asked}
        data: dict[str, Any] = {"pools": [{"role": role, "replicas": number} for role, number in pools.items()]}
        sources = {f"pools[{index}].replicas": f"--{role}" for index, role in enumerate(pools) if role in asked}
    else:
        written, sources = read_spec(path)
        data = written.model_dump(exclude_unset=True)
    return Wanted(spec=parse_spec(changes.applied(data)), sources=sources | changes.sources(data))
