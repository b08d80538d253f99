"""Has the FlashInfer modules that a model's layers ask for at hand before the first of them is tried.

    folder      <- libraries built beforehand: KVRELAY_FLASHINFER_AOT, or FlashInfer's own package of them
                <- the others, built now: one ninja over all their files, which goes on where a file fails
    FlashInfer  -> looks into that folder, and compiles nothing by itself any more

FlashInfer's way is to compile a module when it is first asked for, one after another: minutes for a model, where all of
them together take about as long as the slowest. What its own parallel build has made it would compile again when it is
asked for, since ninja's log of it stands in another folder: so ours are put where those built beforehand are.

Nothing raises here because a module cannot be had: its reason is handed back, and whoever needs it says so.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.attention.flashinfer.modules import Wanted, generator, imported
from engine.build_cache import cache_folder, locked
from engine.device import AOT_SETTING, nvcc

logger = logging.getLogger(__name__)

ABOUT = "about.json"  # in a folder that was built beforehand: what for
COMPLAINT = re.compile(r"\b(error|fatal|not found|undefined reference|killed|no space)\b", re.IGNORECASE)
REASON_LENGTH = 300
BY_US = "kvrelay"  # any value keeps FlashInfer from compiling


@dataclass(frozen=True, slots=True)
class Target:
    """What libraries are built for: they work with no other."""

    flashinfer: str  # its version
    arch: str  # as nvcc names it, 9.0a

    @classmethod
    def here(cls) -> Target:
        arches = sorted(imported(".jit.core").current_compilation_context.TARGET_CUDA_ARCHS)
        return cls(str(imported(".version").__version__), " ".join(f"{major}.{minor}" for major, minor in arches))


def provide(modules: Iterable[Wanted]) -> dict[Wanted, str]:
    """Have FlashInfer take the modules from a folder of this machine's, and build what is in none.

    Returns why, for each that cannot be had. Raises ValueError where KVRELAY_FLASHINFER_AOT names a folder of libraries
    for something else.
    """
    settings = imported(".jit.env")
    target = Target.here()
    folder = cache_folder() / "flashinfer" / f"{target.flashinfer}-{target.arch.replace(' ', '-')}"
    beforehand = [Path(settings._get_aot_dir())]
    if named := os.environ.get(AOT_SETTING):
        beforehand.insert(0, checked(Path(named), target))
    specs, failed = specs_of(modules)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        lacking = [spec for spec in specs.values() if not _linked(folder, spec.name, beforehand)]
        if lacking and named:
            logger.warning("%s is %s, which lacks %s", AOT_SETTING, named, ", ".join(spec.name for spec in lacking))
        reasons = build(lacking, folder) if lacking else {}
    settings.FLASHINFER_AOT_DIR = folder
    os.environ["FLASHINFER_DISABLE_JIT"] = BY_US  # what failed here would fail again, minutes later
    return failed | {module: reasons[spec.name] for module, spec in specs.items() if spec.name in reasons}


def checked(folder: Path, target: Target) -> Path:
    """A folder of libraries that were built beforehand. Raises ValueError when they are for something else."""
    try:
        about = Target(**json.loads((folder / ABOUT).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"{AOT_SETTING} is {folder}, where no {ABOUT} can be read ({error}); give a folder that "
            "python -m bench.gpu.prebuild made"
        ) from error
    if about != target:
        raise ValueError(
            f"{AOT_SETTING} is {folder}, built for FlashInfer {about.flashinfer} on {about.arch}, and here is "
            f"{target.flashinfer} on {target.arch}; build it again with python -m bench.gpu.prebuild"
        )
    return folder


def specs_of(modules: Iterable[Wanted]) -> tuple[dict[Wanted, Any], dict[Wanted, str]]:
    """FlashInfer's description of each module; and why, of those that it has none for."""
    specs: dict[Wanted, Any] = {}
    failed: dict[Wanted, str] = {}
    for module in modules:
        name, arguments = module
        try:
            specs[module] = generator(name)(*arguments)
        except Exception as error:  # an interface that has moved, a shape that it refuses
            failed[module] = f"{name}: {' '.join(str(error).split())[:REASON_LENGTH]}"
    return specs, failed


def library(folder: Path, name: str) -> Path:
    """Where FlashInfer looks for a module that was built beforehand."""
    return folder / name / f"{name}.so"


def _linked(folder: Path, name: str, beforehand: Sequence[Path]) -> bool:
    """Whether the folder has it, if only by a link that is made here."""
    own = library(folder, name)
    if own.exists():
        return True
    found = next((path for path in (library(each, name) for each in beforehand) if path.exists()), None)
    if found is None:
        return False
    own.parent.mkdir(exist_ok=True)
    own.unlink(missing_ok=True)  # a link to what is gone
    own.symlink_to(found.resolve())
    return True


def build(specs: Sequence[Any], folder: Path, jobs: int | None = None) -> dict[str, str]:
    """Compile them all, `jobs` files at a time, each library into the folder. Returns, by name, why some failed."""
    if why := why_no_compiler():
        return {spec.name: why for spec in specs}
    logger.info("building %d modules of FlashInfer: minutes, once on a machine", len(specs))
    os.environ["FLASHINFER_EXTRA_CUDAFLAGS"] = _with_cublas_headers(os.environ.get("FLASHINFER_EXTRA_CUDAFLAGS", ""))
    for spec in specs:
        spec.write_ninja()
    reasons = run_ninja({spec.name: spec for spec in specs}, folder, jobs or _jobs())
    for name, why in reasons.items():
        logger.warning("FlashInfer's module %s cannot be built: %s", name, why)
    return reasons


def why_no_compiler() -> str:
    if os.environ.get("FLASHINFER_DISABLE_JIT", BY_US) != BY_US:
        return "it was not built beforehand, and FLASHINFER_DISABLE_JIT is set"
    lacks = [name for name, there in (("nvcc", nvcc()), ("ninja", shutil.which("ninja"))) if there is None]
    return f"it was not built beforehand, and there is no {' and no '.join(lacks)} to build it" if lacks else ""


def _jobs() -> int:
    asked = os.environ.get("MAX_JOBS", "")
    return int(asked) if asked.isdigit() and int(asked) else len(os.sched_getaffinity(0))


def run_ninja(specs: Mapping[str, Any], folder: Path, jobs: int) -> dict[str, str]:
    """One ninja over all of them: it keeps every core busy to the end, and a file that fails stops its module only."""
    plan = folder / "all.ninja"
    lines = [f"subninja {spec.ninja_path}" for spec in specs.values()]
    plan.write_text("\n".join(["ninja_required_version = 1.3", *lines, ""]))
    command = ["ninja", "-C", str(folder), "-f", str(plan), "-k", "0", "-j", str(jobs)]
    told = _Told(specs, folder)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as ninja:
        assert ninja.stdout is not None
        for line in ninja.stdout:
            told.hear(line.rstrip())
    return told.ended(ninja.returncode)


class _Told:
    """What ninja says of the modules, line by line: [3/40] and a command that is done, or FAILED, the command, and
    what the command said."""

    def __init__(self, specs: Mapping[str, Any], folder: Path) -> None:
        self._specs = specs
        self._folder = folder
        self._done: list[str] = []
        self._said: dict[str, list[str]] = {}  # by a module that failed
        self._failing: str | None = None
        self._last = ""

    def hear(self, line: str) -> None:
        self._last = line or self._last
        if line.startswith("FAILED: "):
            self._failing = next((name for name in self._specs if f"/{name}/" in line), None)
            if self._failing is not None:
                self._said.setdefault(self._failing, [])
        elif line.startswith("["):
            self._failing = None
            logger.debug("files: %s", line[1 : line.index("]")])
            name = Path(line).stem
            if line.endswith(".so") and name in self._specs:
                self._take(name)
        elif self._failing is not None:
            self._said[self._failing].append(line)

    def ended(self, code: int) -> dict[str, str]:
        """Why each module has no library. Those of which nothing was said had been built before."""
        if code >= 0:
            for name, spec in self._specs.items():
                if name not in (*self._done, *self._said) and spec.jit_library_path.exists():
                    self._take(name)
        return {name: self._why(name) for name in self._specs if name not in self._done}

    def _why(self, name: str) -> str:
        said = self._said.get(name, [])[1:]  # after the command
        found = next((line for line in said if COMPLAINT.search(line)), said[0] if said else self._last)
        return found.strip()[:REASON_LENGTH]

    def _take(self, name: str) -> None:
        own = library(self._folder, name)
        own.parent.mkdir(exist_ok=True)
        whole = own.with_suffix(".tmp")
        shutil.copyfile(self._specs[name].jit_library_path, whole)
        os.replace(whole, own)
        self._done.append(name)
        size = own.stat().st_size / (1 << 20)
        logger.info("%d of %d built: %s, %.1f MiB", len(self._done), len(self._specs), name, size)


def _with_cublas_headers(flags: str) -> str:
    """Its norms include cublasLt.h, which a bare nvcc comes without: then those that came with torch are named, too."""
    home = Path(nvcc() or "").resolve().parents[1]
    if (home / "include" / "cublasLt.h").exists():
        return flags
    packages = importlib.util.find_spec("nvidia")
    roots = packages.submodule_search_locations if packages is not None else None
    for root in roots or ():
        for header in sorted(Path(root).glob("*/include/cublasLt.h")):
            named = f"-isystem {header.parent}"
            return flags if named in flags else f"{flags} {named}".strip()
    return flags
