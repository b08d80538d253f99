"""How long a newcomer waits: from `git clone` to the first token, by curl and by OpenAI's client, and to the page.

    python -m bench.newcomer [--quick]

The README's commands, in a clone of this checkout's last commit in an empty folder: each is timed by itself, as it is
typed once the one before has ended. What is asked for by pip comes from where pip's settings say. The page is opened in
the system's Chromium, where there is one, and given the token, until the cluster is drawn. Writes
bench/results/newcomer.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.common import REPO, about, save
from tests.cluster.front.http.chromium import PROGRAM, chromium

OPENAI = """
import sys
from openai import OpenAI
client = OpenAI(base_url=sys.argv[1] + "/v1", api_key=sys.argv[2])
for event in client.chat.completions.create(
    model=client.models.list().data[0].id, messages=[{"role": "user", "content": "Hello"}], max_tokens=16, stream=True
):
    if event.choices[0].delta.content:
        print(event.choices[0].delta.content, flush=True)
"""
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16, "stream": True}
UP = ("--prefill", "1", "--decode", "1", "--port", "0", "--http-port", "0", "--json")
ASKED = "document.activeElement?.id === 'token'"
DRAWN = "!!document.querySelector('#picture path')"


def bench(folder: Path, *, is_quick: bool) -> dict[str, float]:
    """Seconds of each step, in their order."""
    took: dict[str, float] = {}
    clone = REPO if is_quick else folder / "kvrelay"
    if not is_quick:
        took["git clone"] = _timed(["git", "clone", "--quiet", str(REPO), str(clone)], folder)
        took["make .venv"] = _timed(["make", ".venv"], clone)
    kvrelay = str(clone / ".venv" / "bin" / "kvrelay")
    state = os.environ | {"XDG_STATE_HOME": str(folder / "state")}
    model = str(folder / "model")
    took["kvrelay make-model"] = _timed([kvrelay, "make-model", model], folder, state)
    began_s = time.monotonic()
    up = subprocess.Popen([kvrelay, "up", "--model", model, *UP], cwd=folder, env=state, stdout=subprocess.PIPE)
    try:
        assert up.stdout is not None
        url = json.loads(up.stdout.readline())["http"][0]
        took["kvrelay up, until it is ready"] = time.monotonic() - began_s
        began_s = time.monotonic()
        token = subprocess.run([kvrelay, "token"], env=state, check=True, capture_output=True, text=True).stdout.strip()
        took["kvrelay token"] = time.monotonic() - began_s
        headers = ["-H", f"Authorization: Bearer {token}", "-H", "Content-Type: application/json"]
        asked = ["curl", "-sN", f"{url}/v1/chat/completions", *headers, "-d", json.dumps(CHAT)]
        took["curl, to the first token"] = _first(asked, folder, '"content"')
        python = str(clone / ".venv" / "bin" / "python")
        took["openai, to the first token"] = _first([python, "-c", OPENAI, url, token], folder)
        if PROGRAM is not None:
            took["the page, until it is drawn"] = asyncio.run(_page(url, token))
    finally:
        up.terminate()
        up.wait(60)
    return {name: round(seconds, 2) for name, seconds in took.items()}


def _timed(command: list[str], folder: Path, env: dict[str, str] | None = None) -> float:
    began_s = time.monotonic()
    subprocess.run(command, cwd=folder, env=env, check=True, stdout=sys.stderr)
    return time.monotonic() - began_s


def _first(command: list[str], folder: Path, what: str = "") -> float:
    """To the first line that holds `what`, with the start of the program. Raises RuntimeError when none comes."""
    began_s = time.monotonic()
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = list[str]()
        for line in process.stdout:
            lines.append(line)
            if line.strip() and what in line:
                took_s = time.monotonic() - began_s
                process.stdout.read()
                return took_s
    raise RuntimeError(f"{command[0]} printed no token, but {lines}")


async def _page(url: str, token: str) -> float:
    async with chromium() as browser:
        began_s = time.monotonic()
        await browser.go(url)
        await browser.until(ASKED)
        await browser.call("Input.insertText", text=token)
        await browser.press("Enter")
        await browser.until(DRAWN)
        return time.monotonic() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.newcomer", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="from this checkout, without a clone; writes no file")
    is_quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory(prefix="kvrelay-newcomer-") as folder:
        took = bench(Path(folder), is_quick=is_quick)
    for name, seconds in took.items():
        print(f"{seconds:8.2f} s  {name}")
    if not is_quick:
        save("newcomer", about() | {"steps_s": took})


if __name__ == "__main__":
    main()
