"""What a machine with a GPU and no network lacks, carried there as wheels. Needs nothing but Python and pip.

    python -m bench.gpu.offline collect --into DIR [--aot FOLDER]    where packages can be had
    python -m bench.gpu.offline install --from DIR --target SITE     there: prints what to export as PYTHONPATH

For a machine that has torch, transformers and what they need, but not FlashInfer, pydantic, or a gRPC as new as the
stubs. Versions are those of constraints-gpu.txt. `--aot` takes FlashInfer's modules along that were built beforehand,
as FOLDER/NAME/NAME.so: FlashInfer loads them and compiles nothing.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
MIB = 1 << 20
# None of these brings anything else that such a machine lacks; what bench/gpu and `pytest -m gpu` import is tried in an
# environment of its packages only.
PACKAGES = (
    "flashinfer-python",
    "apache-tvm-ffi",
    "grpcio",
    "grpcio-health-checking",
    "grpcio-reflection",
    "protobuf",
    "pydantic",  # what a router's accounts are made of, with what it needs
    "pydantic-core",
    "annotated-types",
    "typing-inspection",
    "starlette",  # the types of a router's doors
    "pytest-asyncio",
    "trustme",  # certificates of the tests, with what makes them
    "cryptography",
    "cffi",
    "pycparser",
)
# pip takes a platform by its very name: the newest that these packages' wheels may have, and all older spellings.
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux_2_17", "manylinux2014", "manylinux1")
AOT, AOT_IN_SITE = "aot.tar.xz", Path("flashinfer", "data", "aot")  # compressed they take a quarter


class Refused(Exception):
    """The text is the sentence to show."""


def pinned(constraints: Sequence[Path]) -> list[str]:
    """`name==version` of each package, from the first file that has it."""
    known: dict[str, str] = {}
    for path in constraints:
        for line in path.read_text().splitlines():
            name, found, version = line.partition("==")
            if found:
                known.setdefault(name.replace("_", "-").lower(), version)
    return [f"{name}=={known[name]}" for name in PACKAGES]


def download(into: Path, python: str, machine: str) -> None:
    wanted = pinned([REPO / "constraints-gpu.txt", REPO / "constraints.txt"])
    platforms = [f"--platform={name}_{machine}" for name in PLATFORMS]
    where = ["--python-version", python, "--implementation", "cp", *platforms]
    pip("download", "--no-deps", "--only-binary=:all:", *where, "-d", str(into), *wanted)


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *arguments]
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
        raise Refused(f"pip {arguments[0]} failed; it says why above")


def modules(aot: Path) -> list[Path]:
    """The libraries in it. Raises Refused where there are none."""
    found = sorted(path for path in aot.glob("*/*.so") if path.stem == path.parent.name)
    if not found:
        raise Refused(f"--aot is {str(aot)!r}, which holds no NAME/NAME.so; give the folder with FlashInfer's modules")
    return found


def collect(into: Path, aot: Path | None, python: str, machine: str, max_mib: float) -> None:
    built = modules(aot) if aot is not None else []
    if into.exists() and any(path.suffix != ".whl" and path.name != AOT for path in into.iterdir()):
        raise Refused(f"--into is {str(into)!r}, which holds other things than wheels; give a folder for them alone")
    shutil.rmtree(into, ignore_errors=True)  # one version of each: two would stop the installation
    into.mkdir(parents=True)
    download(into, python, machine)
    if built:
        with tarfile.open(into / AOT, "w:xz") as archive:
            for path in built:
                archive.add(path, f"{path.stem}/{path.name}")
    wheels, libraries, tree = (sum(map(_size, paths)) for paths in (into.glob("*.whl"), into.glob(AOT), tree_of()))
    whole = wheels + libraries + tree
    parts = f"wheels {wheels / MIB:.1f} MiB, modules {libraries / MIB:.1f} MiB, this tree {tree / MIB:.1f} MiB"
    if whole > max_mib * MIB:
        raise Refused(f"{parts}: {whole / MIB:.1f} MiB, and --max-mib is {max_mib:g}; leave modules out, or give more")
    print(f"{parts}: {whole / MIB:.1f} of {max_mib:g} MiB in {into}")


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def tree_of() -> Iterator[Path]:
    """What travels of this checkout: all but what git ignores; all of it where there is no git to ask."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        said = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        yield from REPO.rglob("*")
        return
    yield from (REPO / name for name in said.split("\0") if name)


def install(wheels: Path, target: Path) -> None:
    found = sorted(map(str, wheels.glob("*.whl")))
    if not found:
        raise Refused(f"--from is {str(wheels)!r}, which holds no wheels; give the folder that `collect` filled")
    offline = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade"]
    pip("install", *offline, "--target", str(target), *found)
    if (wheels / AOT).exists():
        with tarfile.open(wheels / AOT) as archive:
            archive.extractall(target / AOT_IN_SITE, filter="data")
    print(target)


def parser() -> argparse.ArgumentParser:
    about = argparse.RawDescriptionHelpFormatter
    parsed = argparse.ArgumentParser(prog="python -m bench.gpu.offline", description=__doc__, formatter_class=about)
    verbs = parsed.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("collect", help="wheels into a folder, on a machine that can have them")
    verb.add_argument("--into", type=Path, required=True, metavar="DIR")
    verb.add_argument("--aot", type=Path, metavar="FOLDER", help="FlashInfer's modules that were built beforehand")
    verb.add_argument("--max-mib", type=float, default=60, help="of wheels, modules and this tree; default: 60")
    verb.add_argument("--python", default="3.12", help="of the other machine; default: 3.12")
    verb.add_argument("--machine", default="x86_64", help="its processor; default: x86_64")
    verb = verbs.add_parser("install", help="on the other machine, without a network")
    verb.add_argument("--from", dest="wheels", type=Path, required=True, metavar="DIR", help="what `collect` filled")
    verb.add_argument("--target", type=Path, required=True, metavar="SITE", help="the folder to put on PYTHONPATH")
    return parsed


def main(argv: Sequence[str] | None = None) -> int:
    given = parser().parse_args(argv)
    try:
        if given.verb == "collect":
            collect(given.into, given.aot, given.python, given.machine, given.max_mib)
        else:
            install(given.wheels.resolve(), given.target.resolve())
    except Refused as refused:
        print(refused, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
