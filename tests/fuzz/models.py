"""Model directories with something wrong: loaded and served, or refused in a sentence, in bounded memory."""

from __future__ import annotations

import asyncio
import json
import random
import resource
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from cluster.front.tokenizer import TokenizerError, load_codec
from engine.engine import Engine
from engine.errors import UnsupportedModel
from engine.types import InvalidRequest
from tests.fuzz import mess
from tests.fuzz.doors import Unclear
from tests.serving.harness import engine_with

MORE_BYTES = 6 << 30  # that a load may take beyond what the process has: threads' stacks count, most is never touched
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors")


def model_dir(good: Path, seed: int) -> str:
    """What came of a copy of `good` in which one file is wrong."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder) / "model"
        shutil.copytree(good, copied)
        names = [name for name in FILES if (copied / name).exists()]
        _spoil(copied / (names[0] if chance.random() < 0.5 else chance.choice(names)), chance)
        with _bounded_memory():
            return _load(copied)


def _spoil(path: Path, chance: random.Random) -> None:
    good = path.read_bytes()
    if path.suffix == ".json" and chance.random() < 0.8:
        path.write_text(json.dumps(mess.document(json.loads(good), chance)))
    elif chance.random() < 0.1:
        path.unlink()
    else:
        head = good[:4000]  # where a safetensors file names its tensors
        path.write_bytes(mess.noise(chance, head) + good[4000:])


def _load(directory: Path) -> str:
    try:
        engine = Engine.load(engine_with(model=str(directory)))
        engine.close()
        codec = load_codec(str(directory), max_waiting_bytes=1 << 20)
        try:
            asyncio.run(codec.encode("hello world", 512))
        finally:
            codec.close()
    except (UnsupportedModel, TokenizerError, InvalidRequest) as error:
        return f"refused: {type(error).__name__}"
    except Exception as error:
        if str(error).startswith("max_model_len is"):  # the options', against the model's
            return "refused: ValueError"
        raise Unclear(f"{type(error).__name__}: {error}") from error
    return "served"


@contextmanager
def _bounded_memory() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + MORE_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
