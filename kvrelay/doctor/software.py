"""What is installed, against what kvrelay's own package says that it needs. Reads no file but packages' metadata."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from kvrelay.doctor.finding import Finding

PART = "software"
TOLD = ("torch", "transformers", "ray", "grpcio", "protobuf", "flashinfer-python")  # each by itself
NCCL = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")  # both install the same file


def software() -> list[Finding]:
    """Of this environment."""
    ours = metadata.metadata("kvrelay")
    needed = metadata.requires("kvrelay") or []
    return [
        python_version(platform.python_version(), ours["Requires-Python"] or ""),
        *packages(needed, installed_version),
        *nccl_packages(installed_version),
    ]


def installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def python_version(version: str, bounds: str) -> Finding:
    if SpecifierSet(bounds).contains(version, prereleases=True):
        return Finding(part=PART, name="python", verdict="good", found=version)
    mend = f"install kvrelay in a Python {bounds}"
    return Finding(part=PART, name="python", verdict="bad", found=f"{version}, not {bounds}", mend=mend)


def packages(needed: Iterable[str], version_of: Callable[[str], str | None]) -> Iterator[Finding]:
    """A finding for each of TOLD that is there or must be, for each other one that is missing or out of its bounds, and
    one for all the rest. Extras bind what is installed of them; they need not be."""
    required: dict[str, SpecifierSet] = {}
    optional: dict[str, list[SpecifierSet]] = {}
    for requirement in map(Requirement, needed):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            required[requirement.name] = requirement.specifier
        elif "gpu" in str(requirement.marker):
            optional.setdefault(requirement.name, []).append(requirement.specifier)
    fine = 0
    for name in (*TOLD, *(name for name in required if name not in TOLD)):
        bounds = [required[name]] if name in required else optional.get(name, [])
        finding = _package(name, version_of(name), bounds, is_required=name in required)
        if finding is not None and (finding.verdict != "good" or name in TOLD):
            yield finding
        else:
            fine += finding is not None
    yield Finding(part=PART, name="other packages", verdict="good", found=f"{fine} within their bounds")


def _package(name: str, version: str | None, bounds: list[SpecifierSet], *, is_required: bool) -> Finding | None:
    """None: it is not there and need not be. Several bounds: of extras that exclude each other."""
    wanted = " or ".join(str(each) or "any version" for each in bounds)
    install = f"pip install '{name}{bounds[0] if bounds else ''}'"
    if version is None:
        missing = Finding(
            part=PART, name=name, verdict="bad", found=f"not installed, and {wanted} is needed", mend=install
        )
        return missing if is_required else None
    if not bounds or any(each.contains(version, prereleases=True) for each in bounds):
        return Finding(part=PART, name=name, verdict="good", found=version)
    return Finding(part=PART, name=name, verdict="bad", found=f"{version}, not {wanted}", mend=install)


def nccl_packages(version_of: Callable[[str], str | None]) -> Iterator[Finding]:
    """None of two is what a CPU has."""
    there = {name: version for name in NCCL if (version := version_of(name)) is not None}
    if len(there) == len(NCCL):
        found = " and ".join(f"{name} {version}" for name, version in there.items())
        mend = "uninstall both and install torch again: each overwrites the other's library"
        yield Finding(part=PART, name="NCCL packages", verdict="bad", found=found, mend=mend)
