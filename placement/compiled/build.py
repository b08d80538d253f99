"""Compiles the simulator and the policies it runs to C by mypyc: at first use, once for these sources and this Python.

It takes half a minute on two cores; engine/build_cache.py keeps it, as it does the engine's kernels, by a hash of the
sources. Copies are compiled (placement/compiled/extensions.py), their constructors written out (constructors.py beside
it). Where there is no compiler, one warning says so and the sources run as they are.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from engine.build_cache import NoCacheFolder, built_once, cache_folder
from placement.compiled.constructors import with_constructors
from placement.papers import registry

ROOT = Path(__file__).resolve().parents[2]
COMPILED = (
    "worker/priority.py",
    "engine/pages/news.py",
    "engine/pages/pool.py",
    "cluster/router/accounts.py",
    "cluster/router/candidates/decode.py",
    "cluster/router/candidates/prefill.py",
    "cluster/router/candidates/ranking.py",
    "cluster/router/decisions.py",
    "cluster/router/health/circuits.py",
    "cluster/router/health/health.py",
    "cluster/router/health/isolation.py",
    "cluster/router/health/shunned.py",
    "cluster/router/lines.py",
    "cluster/router/moving/moving.py",
    "cluster/router/options.py",
    "cluster/router/placing/handoff_times.py",
    "cluster/router/placing/lending.py",
    "cluster/router/placing/placing.py",
    "cluster/router/placing/predicting.py",
    "cluster/router/policy.py",
    "cluster/router/retry.py",
    "cluster/router/shares.py",
    "cluster/router/waiting.py",
    "cluster/router/workers.py",
    "prefill_worker/policy.py",
    "decode_worker/batches.py",
    "decode_worker/drafts.py",
    "decode_worker/policy.py",
    "decode_worker/run.py",
    "mixed_worker/policy.py",
    "worker/steps/costs.py",
    "placement/simulator/clients.py",
    "placement/simulator/clock.py",
    "placement/simulator/ledger.py",
    "placement/simulator/pages.py",
    "placement/simulator/reporting.py",
    "placement/simulator/simulate.py",
    "placement/simulator/machines/attempt.py",
    "placement/simulator/machines/decode.py",
    "placement/simulator/machines/draft_passes.py",
    "placement/simulator/machines/host.py",
    "placement/simulator/machines/mixed.py",
    "placement/simulator/machines/moves.py",
    "placement/simulator/machines/pipelined.py",
    "placement/simulator/machines/prefill.py",
    "placement/simulator/machines/prompt_side.py",
    "placement/simulator/machines/router.py",
    "placement/simulator/machines/routers.py",
    "placement/simulator/machines/speculation.py",
    "placement/simulator/machines/steps.py",
    "placement/latency/base.py",
    "placement/latency/roofline.py",
    "placement/latency/scaled.py",
    *registry.COMPILED,
)
OURS = frozenset(name.partition("/")[0] for name in COMPILED) | {"kv_transfer", "worker"}
BUILD_TIMEOUT_S = 900.0  # half a minute, but on a loaded machine
EXTENSIONS = str(ROOT / "placement/compiled/extensions.py")  # run as a file, or it would import what it compiles
MAKERS = tuple(f"placement/compiled/{name}.py" for name in ("build", "constructors", "extensions"))
IMPORTED = re.compile(r"^\s*(?:from|import) ([\w.]+)", re.MULTILINE)
SHIM = "from pkgutil import extend_path\n\n__path__ = extend_path(__path__, __name__)\n"

logger = logging.getLogger(__name__)


class CannotCompile(Exception):
    """One sentence that says why, and the mend."""


@functools.cache
def compiled_folder(cache: Path | None = None) -> Path | None:
    """The folder of the compiled modules, made now if need be; None, and one warning, where it cannot be made."""
    try:
        return built_once((cache or cache_folder()) / f"simulator-{_key()}", _build)
    except (CannotCompile, NoCacheFolder, OSError, subprocess.TimeoutExpired) as error:
        logger.warning("the simulator runs uncompiled, at about a quarter of its speed: %s", error)
        return None


def _key() -> str:
    digest = hashlib.sha256(f"{sys.version} {sysconfig.get_platform()}".encode())
    for path in sorted(_read_by_the_compiler()):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:24]


def _read_by_the_compiler() -> set[Path]:
    """The modules and all of ours that they import: what a name has for a type there is compiled in here."""
    waiting = [ROOT / name for name in (*COMPILED, *MAKERS)]
    known: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path not in known and path.is_file():
            known.add(path)
            for module in IMPORTED.findall(path.read_text()):
                if module.partition(".")[0] not in OURS:  # installed, other people's packages stand beside ours
                    continue
                beside = ROOT / module.replace(".", "/")
                waiting += [beside.with_suffix(".py"), beside / "__init__.py"]
    return known


def _build(target: Path) -> None:
    """Raises CannotCompile, TimeoutExpired."""
    _check_tools()
    logger.warning("compiling the simulator, once for this version of it; it takes half a minute")
    for name in COMPILED:
        copy = target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(with_constructors((ROOT / name).read_text()))
        for package in copy.relative_to(target).parents[:-1]:  # the rest of each package is found beside the sources
            (target / package / "__init__.py").write_text(SHIM)
    _run_mypyc(target, _copied_for_types(target / "read"))
    shutil.rmtree(target / "read")
    _check_that_it_runs(target)
    shutil.rmtree(target / "build", ignore_errors=True)
    shutil.rmtree(target / ".mypy_cache", ignore_errors=True)


def _check_tools() -> None:
    """What a build would only find missing after half a minute."""
    if importlib.util.find_spec("mypyc") is None:
        raise CannotCompile("mypyc is not installed; `pip install mypy[mypyc]`")
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        raise CannotCompile(f"there is no C compiler {compiler}; install one, or name it in CC")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        raise CannotCompile(f"there is no {header}; install Python's headers (python3-dev on Debian)")


def _copied_for_types(folder: Path) -> Path:
    """What the compiled modules import, where mypy may look: it refuses the folder that pip installs to."""
    for path in _read_by_the_compiler():
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
        for package in copy.relative_to(folder).parents[:-1]:
            (folder / package / "__init__.py").touch()
    return folder


def _run_mypyc(target: Path, types: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXTENSIONS, *COMPILED],
        cwd=target,
        env={**os.environ, "MYPYPATH": str(types)},
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise CannotCompile(f"mypyc failed: {' '.join(last)[:300]}")


def _check_that_it_runs(target: Path) -> None:
    """A pool whose processes cannot import what it runs would start them again for ever."""
    modules = [name.removesuffix(".py").replace("/", ".") for name in COMPILED]
    program = f"import sys; sys.path[:0] = {[str(target), str(ROOT)]}; import {', '.join(modules)}"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
    if done.returncode:
        raise CannotCompile(f"what mypyc made cannot be imported: {done.stderr.strip().splitlines()[-1]}")
