"""llama.cpp's server over HTTP, as its users call it: python llamacpp_server.py MODEL THREADS. See lines.py.

The model is converted once, beside this environment, by llama.cpp's own converter (to_gguf.py), and stays in bf16. What
differs from a plain start, and why:

- pip's llama-cpp-python has the library without the server, so that bench.peers.install builds it from that package's
  sources, natively for this CPU, without the web page that the build would fetch.
- A slot has a KV of its own: in the shared one each token's attention walks the pages of all requests.
- No prompt is kept for another (`cache_prompt`, `--cache-ram`): every one is new, and keeping them costs copies.
- A token whose text ends within a character is not sent before the next one is there. Times go by the count of tokens
  that each message states; such a token's own id is not told (-1).
"""

import asyncio
import contextlib
import ctypes
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
from lines import Lines

SLOTS = 64
SLOT_TOKENS = 2304  # the longest prompt of bench.engine, and what is made of it
PR_SET_PDEATHSIG = 1
GREEDY = {"temperature": 0.0, "samplers": ["top_k"], "top_k": 1, "ignore_eos": True, "cache_prompt": False}


def converted(model: Path) -> Path:
    path = Path(sys.prefix) / "models" / f"{model.name}.gguf"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        [sources] = (Path(sys.prefix) / "src").iterdir()
        program = Path(__file__).with_name("to_gguf.py")
        command = [sys.executable, str(program), str(sources / "vendor" / "llama.cpp"), str(model)]
        partial = path.with_suffix(".partial")
        subprocess.run([*command, "--outtype", "bf16", "--outfile", str(partial)], check=True, stdout=sys.stderr)
        partial.rename(path)
    return path


@contextlib.contextmanager
def serving(model: Path, threads: int) -> Iterator[str]:
    """Its URL; ready a moment later."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.prefix) / "bin" / "llama-server"), "--model", str(model), "--port", str(port)]
    command += ["--threads", str(threads), "--threads-batch", str(threads), "--parallel", str(SLOTS)]
    command += ["--ctx-size", str(SLOTS * SLOT_TOKENS), "--no-kv-unified", "--cache-ram", "0"]
    command += ["--fit", "off", "--no-ui", "--offline", "--log-disable"]
    # It ends with this process, however that ends.
    process = subprocess.Popen(command, preexec_fn=lambda: ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL))
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


async def wait_ready(session: aiohttp.ClientSession) -> None:
    """bench.peers.serve ends this process where it takes too long."""
    while True:
        with contextlib.suppress(aiohttp.ClientConnectionError):
            async with session.get("/health") as answer:
                if answer.status == 200:
                    return
        await asyncio.sleep(0.1)


async def messages(session: aiohttp.ClientSession, prompt: list[int], max_tokens: int) -> AsyncIterator[dict[str, Any]]:
    asked = {"prompt": prompt, "n_predict": max_tokens, "stream": True, "return_tokens": True, **GREEDY}
    async with session.post("/completion", json=asked) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])


async def play_one(
    session: aiohttp.ClientSession, due_s: float, prompt: list[int], max_tokens: int
) -> tuple[list[float], list[int]]:
    await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
    times_s: list[float] = []
    tokens: list[int] = []
    async for message in messages(session, prompt, max_tokens):
        new = message["tokens_predicted"] - len(times_s)
        times_s += [time.perf_counter()] * new
        tokens += ([-1] * new + message["tokens"])[-new:] if new else []
    return times_s, tokens


async def main() -> None:
    lines = Lines()
    model, threads = Path(sys.argv[1]), int(sys.argv[2])
    unlimited = aiohttp.TCPConnector(limit=0)
    with serving(converted(model), threads) as url:
        async with aiohttp.ClientSession(url, connector=unlimited, timeout=aiohttp.ClientTimeout(None)) as session:
            await wait_ready(session)
            await play_one(session, 0.0, [1, 2, 3], 4)
            lines.ready()
            while (requests := await asyncio.to_thread(lines.asked)) is not None:
                began_s = time.perf_counter()
                played = [play_one(session, began_s + at_s, prompt, count) for at_s, prompt, count in requests]
                lines.played(began_s, await asyncio.gather(*played))


if __name__ == "__main__":
    asyncio.run(main())
