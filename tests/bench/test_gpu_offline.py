"""What is carried to a machine without a network: the right versions, no more than fits, put where it is found."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from bench.gpu import offline

ROOT = Path(__file__).resolve().parents[2]


def wheel(folder: Path, name: str = "dummy") -> None:
    """The smallest that pip installs."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}/__init__.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"]))


# Of what kvrelay depends on: what such a machine has not, and is not brought.
LACKING = ("ray", "fastapi", "uvicorn", "httptools", "llguidance", "mypy")
BY_THE_PROCESSES = ("cluster.front.server", "cluster.router.links.worker_link", "worker.driver", "worker.options")


def test_the_programs_import_nothing_that_such_a_machine_lacks() -> None:
    programs = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "bench" / "gpu").rglob("*.py")
    ]
    program = (
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({LACKING!r}))\n"  # None: importing it fails
        f"for name in {(*programs, *BY_THE_PROCESSES)!r}: importlib.import_module(name)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def without_registry(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """pip download makes one wheel; what it was told is kept."""
    told: list[tuple[str, ...]] = []

    def pip(*arguments: str) -> None:
        if arguments[0] == "install":
            return install(*arguments)
        told.append(arguments)
        return wheel(Path(arguments[arguments.index("-d") + 1]))

    install = offline.pip
    monkeypatch.setattr(offline, "pip", pip)
    return told


def test_versions_are_those_of_the_constraints() -> None:
    wanted = offline.pinned([ROOT / "constraints-gpu.txt", ROOT / "constraints.txt"])
    assert [line.partition("==")[0] for line in wanted] == list(offline.PACKAGES)
    assert f"grpcio=={stub_version()}" in wanted, "the stubs refuse an older one"


def stub_version() -> str:
    text = (ROOT / "kvrelay" / "v1" / "worker_pb2_grpc.py").read_text()
    return text.partition("GRPC_GENERATED_VERSION = '")[2].partition("'")[0]


def test_wheels_are_asked_for_as_the_other_machine_has_them(
    tmp_path: Path, without_registry: list[tuple[str, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert offline.main(["collect", "--into", str(tmp_path / "w"), "--python", "3.13"]) == 0
    [told] = without_registry
    assert told[told.index("--python-version") + 1] == "3.13"
    assert {"--no-deps", "--only-binary=:all:", "--platform=manylinux_2_28_x86_64"} <= set(told)
    assert "of 60 MiB in" in capsys.readouterr().out


def test_more_than_fits_is_refused(
    tmp_path: Path, without_registry: list[tuple[str, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    big = tmp_path / "aot" / "page" / "page.so"
    big.parent.mkdir(parents=True)
    big.write_bytes(random.Random(0).randbytes(3 << 20))
    given = ["collect", "--into", str(tmp_path / "w"), "--aot", str(tmp_path / "aot")]
    assert offline.main([*given, "--max-mib", "3"]) == 2
    assert "modules 3.0 MiB" in capsys.readouterr().err


def test_modules_come_where_flashinfer_looks(tmp_path: Path, without_registry: list[tuple[str, ...]]) -> None:
    library = tmp_path / "aot" / "page" / "page.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"elf")
    assert offline.main(["collect", "--into", str(tmp_path / "w"), "--aot", str(tmp_path / "aot")]) == 0
    offline.install(tmp_path / "w", tmp_path / "site")
    assert (tmp_path / "site" / "flashinfer" / "data" / "aot" / "page" / "page.so").read_bytes() == b"elf"


def test_install_needs_no_network_and_says_what_to_export(tmp_path: Path) -> None:
    """By its own interpreter, with nothing of this environment but pip."""
    wheel(tmp_path / "w")
    site = tmp_path / "site"
    command = [
        sys.executable,
        "-m",
        "bench.gpu.offline",
        "install",
        "--from",
        str(tmp_path / "w"),
        "--target",
        str(site),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{site}\n"
    assert (site / "dummy" / "__init__.py").exists()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["collect", "--into", "{there}"], "--into is '{there}', which holds other things than wheels"),
        (["collect", "--into", "{there}/w", "--aot", "{there}"], "--aot is '{there}', which holds no NAME/NAME.so"),
        (["install", "--from", "{there}", "--target", "{there}/s"], "--from is '{there}', which holds no wheels"),
    ],
)
def test_a_wrong_folder_is_one_sentence(
    given: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").touch()
    assert offline.main([word.format(there=tmp_path) for word in given]) == 2
    assert capsys.readouterr().err.startswith(sentence.format(there=tmp_path))
    assert (tmp_path / "notes.txt").exists()
