"""Clients that nobody here wrote, each in an environment of its own below .bench/clients: made once, exact versions."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from bench.common import MODELS

PROGRAMS = Path(__file__).resolve().parent / "programs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """`program`: in programs/; it takes the server's URL and the model's folder, and says a line for each check."""

    title: str
    program: str
    packages: tuple[str, ...] = ()

    @property
    def is_node(self) -> bool:
        return self.program.endswith(".mjs")


CLIENTS = {
    "lm-eval": Client(
        title="lm-evaluation-harness", program="lm_eval.py", packages=("lm-eval[api]==0.4.13", "transformers==5.24.0")
    ),
    "guidellm": Client(title="GuideLLM", program="guidellm.sh", packages=("guidellm==0.8.1",)),
    "litellm": Client(title="LiteLLM", program="litellm.py", packages=("litellm==1.110.2",)),
    "langchain": Client(title="LangChain", program="langchain.py", packages=("langchain-openai==1.7.4",)),
    "openai1": Client(title="openai, version 1", program="openai1.py", packages=("openai==1.109.1",)),
    "node": Client(
        title="Node's openai and AI SDK",
        program="node.mjs",
        packages=("openai@6.49.0", "ai@6.0.326", "@ai-sdk/openai-compatible@2.0.92"),
    ),
    "curl": Client(title="curl", program="curl.sh"),
    "schemathesis": Client(title="schemathesis", program="schemathesis.sh", packages=("schemathesis==4.32.5",)),
}


def installed(name: str) -> Path | None:
    """The folder of its programs; made where it is not. None where npm would be needed and is not there. Raises
    CalledProcessError with pip's or npm's own words before it."""
    client, folder = CLIENTS[name], MODELS / "clients" / name
    done = folder / "installed"
    if client.is_node and shutil.which("npm") is None:
        return None
    if client.packages and (not done.exists() or done.read_text().split() != [*client.packages]):
        print(f"installing {', '.join(client.packages)} into {folder}, once", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        _install(client, folder)
        done.write_text("\n".join(client.packages))
    return folder / "bin"


def _install(client: Client, folder: Path) -> None:
    if client.is_node:
        subprocess.run(
            ["npm", "install", "--silent", "--no-audit", "--no-fund", *client.packages], cwd=folder, check=True
        )
    else:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", *client.packages], check=True)
