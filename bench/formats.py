"""Whether checkpoints in GPTQ and AWQ are served as their own library reads them, in an environment that has it.

    python -m bench.formats

GPTQModel wants a newer torch than is locked here, and is built from source, so it is no dependency of the tests: it is
installed beside them, without what it asks for, into .bench/formats (some minutes, once), where it quantises tiny
models and tests/engine/weights/test_quantised.py loads them. The exit code is pytest's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig

from bench.common import MODELS, REPO

FOLDER = MODELS / "formats"
BUILDS_IT = ("setuptools>=80", "wheel")
PACKAGES = (
    "gptqmodel==7.7.0",
    *("defuser==0.0.28", "device-smi==0.5.7", "logbar==0.4.15", "optimum==2.3.0", "pypcre==0.6.4"),
    *("threadpoolctl==3.8.0", "tokenicer==0.0.14", "torchao==0.18.0"),
)


def python() -> str:
    """Its Python; the environment is made where there is none."""
    made, done = FOLDER / "bin" / "python", FOLDER / "installed"
    if done.exists():
        return str(made)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(FOLDER)], check=True)
    purelib = subprocess.run(
        [str(made), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    with open(f"{purelib}/beside.pth", "w") as paths:
        paths.write(sysconfig.get_path("purelib") + "\n")
    pip = [str(made), "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    subprocess.run([*pip, "--upgrade", *BUILDS_IT], check=True)
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", *PACKAGES], check=True)
    done.touch()
    return str(made)


def main() -> None:
    tests = [
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "tests/engine/weights/test_quantised.py",
        "-k",
        "gptqmodel",
        "-q",
    ]
    environment = os.environ | {"GPTQMODEL_CPU_WORKERS": "2", "PYTHONPATH": str(REPO)}
    sys.exit(subprocess.run([python(), *tests], cwd=REPO, env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
