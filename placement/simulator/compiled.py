"""The simulator and the policies it runs, compiled to C by mypyc: the same sources, the same outcome, about three times
as fast. Made once, kept by a hash of the sources, and used by processes of its own only.

    with simulation_pool(2) as pool:
        outcomes = pool.starmap(simulate, [(cluster, workload), ...])

Where mypyc or a C compiler is missing the pool runs the sources as they are. A process must not mix both kinds, so the
one that makes the pool keeps what it has imported.
"""

from __future__ import annotations

import ast
import copyreg
import gc
import hashlib
import importlib.util
import multiprocessing
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from importlib import import_module
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

from placement.papers import registry

ROOT = Path(__file__).resolve().parent.parent.parent
COMPILED = (
    "engine/pages/pool.py",
    "cluster/router/accounts.py",
    "cluster/router/candidates/decode.py",
    "cluster/router/candidates/prefill.py",
    "cluster/router/candidates/ranking.py",
    "cluster/router/policy.py",
    "cluster/router/retry.py",
    "prefill_worker/policy.py",
    "decode_worker/policy.py",
    "decode_worker/run.py",
    "placement/simulator/attempt.py",
    "placement/simulator/clock.py",
    "placement/simulator/colocated/batch.py",
    "placement/simulator/colocated/cluster.py",
    "placement/simulator/decode_machine.py",
    "placement/simulator/host.py",
    "placement/latency/base.py",
    "placement/simulator/ledger.py",
    "placement/simulator/pages.py",
    "placement/simulator/prefill_machine.py",
    "placement/simulator/reporting.py",
    "placement/simulator/router_machine.py",
    "placement/simulator/simulate.py",
    *registry.COMPILED,
)
PASSED_TO_PROCESSES = (  # compiled dataclasses that are arguments; pickle cannot restore them by itself
    ("cluster.router.policy", "RouterOptions"),
    ("prefill_worker.policy", "PrefillOptions"),
    ("decode_worker.policy", "DecodeOptions"),
    ("placement.latency.base", "DecodeLine"),
    ("placement.simulator.colocated.cluster", "ColocatedCluster"),
    *registry.PASSED_TO_PROCESSES,
)
BUILD_TIMEOUT_S = 900.0  # a minute, but on a loaded machine


@contextmanager
def simulation_pool(processes: int, *, cache: Path | None = None) -> Iterator[Pool]:
    """Fresh processes that import the compiled modules, or the sources where there are none."""
    path = compiled_path(cache)
    for module, name in PASSED_TO_PROCESSES:
        copyreg.pickle(getattr(import_module(module), name), _taken_apart)
    context = multiprocessing.get_context("spawn")  # a spawned process takes over sys.path
    if path is not None:
        sys.path.insert(0, str(path))
    try:
        pool = context.Pool(processes, _collect_seldom)
    finally:
        if path is not None:
            sys.path.remove(str(path))
    with pool:
        yield pool


def _collect_seldom() -> None:
    """A simulation frees what it drops by itself; looking for cycles among a million live objects is for nothing."""
    gc.set_threshold(200_000, 20, 50)


def _taken_apart(value: Any) -> tuple[Any, ...]:
    kind = type(value)
    return _put_together, (kind.__module__, kind.__name__, {f.name: getattr(value, f.name) for f in fields(value)})


def _put_together(module: str, name: str, values: dict[str, Any]) -> Any:
    return getattr(import_module(module), name)(**values)


def compiled_path(cache: Path | None = None) -> Path | None:
    """The folder that holds the compiled modules, made now if need be; None where they cannot be made."""
    if importlib.util.find_spec("mypyc") is None:
        return None
    root = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvrelay" / "compiled"
    path = root / _key()
    if path.exists():
        return path
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as made:
            if not _build(Path(made)):
                return None
            os.chmod(made, 0o755)
            shutil.copytree(made, f"{path}.{os.getpid()}")
        os.replace(f"{path}.{os.getpid()}", path)
    except OSError:  # no place to keep it, or another process was first
        return path if path.exists() else None
    return path


def with_constructors(source: str) -> str:
    """The same module, the constructors of its dataclasses written out. dataclasses would make them at import, which is
    after the compiler has seen the module: they would be interpreted, and one of a frozen class takes microseconds. The
    copies are not frozen either, which only means that nobody tells who changes one; the sources tell."""
    module = ast.parse(source)
    for kind in module.body:
        call = kind.decorator_list[0] if isinstance(kind, ast.ClassDef) and kind.decorator_list else None
        if isinstance(kind, ast.ClassDef) and isinstance(call, ast.Call) and ast.unparse(call.func) == "dataclass":
            is_kw_only = any(option.arg == "kw_only" for option in call.keywords)
            for option in call.keywords:
                if option.arg == "frozen":
                    option.arg = "unsafe_hash"  # values stay hashable
            kind.body.append(_constructor(kind, is_kw_only))
    return ast.unparse(ast.fix_missing_locations(module))


def _constructor(kind: ast.ClassDef, is_kw_only: bool) -> ast.stmt:
    given, body = [], []
    for line in kind.body:
        if not isinstance(line, ast.AnnAssign):
            continue
        name, type_name = ast.unparse(line.target), ast.unparse(line.annotation)
        value = _default(line.value)
        default = "" if value is None else f" = {ast.unparse(value)}"
        if "default_factory=" in default:
            assert isinstance(line.value, ast.Call)
            make = ast.unparse(line.value.keywords[0].value)
            type_name, default = f"{type_name} | None", " = None"
            body.append(f"self.{name} = ({make})() if {name} is None else {name}")
        else:
            body.append(f"self.{name} = {name}")
        given.append(f"{name}: {type_name}{default}")
    if any(isinstance(line, ast.FunctionDef) and line.name == "__post_init__" for line in kind.body):
        body.append("self.__post_init__()")
    star = "*, " if is_kw_only else ""
    return ast.parse(f"def __init__(self, {star}{', '.join(given)}) -> None:\n    " + "\n    ".join(body)).body[0]


def _default(value: ast.expr | None) -> ast.expr | None:
    """`knob(64, "...")` stands for its first argument."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "knob":
        return value.args[0]
    return value


def _key() -> str:
    digest = hashlib.sha256(f"{sys.version} {sysconfig.get_platform()} {ROOT}".encode())
    for name in COMPILED:
        digest.update((ROOT / name).read_bytes())
    digest.update(Path(__file__).read_bytes())
    return digest.hexdigest()[:24]


def _build(target: Path) -> bool:
    for name in COMPILED:
        copy = target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(with_constructors((ROOT / name).read_text()))
        for package in copy.relative_to(target).parents[:-1]:  # what is not compiled is found beside the sources
            (target / package / "__init__.py").write_text(f"__path__.append({str(ROOT / package)!r})\n")
    command = [
        sys.executable,
        "-m",
        "mypyc",
        "--config-file",
        "",
        "--follow-imports=silent",
        "--ignore-missing-imports",
    ]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    try:
        done = subprocess.run(
            [*command, *COMPILED],
            cwd=target,
            env=environment,
            capture_output=True,
            timeout=BUILD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    shutil.rmtree(target / "build", ignore_errors=True)
    shutil.rmtree(target / ".mypy_cache", ignore_errors=True)
    return done.returncode == 0
