"""Which files a model directory must have, and what it is told to lack. It looks at names and sizes, reads an index of
shards and the headers of safetensors, and never a weight: what is in the files is for the loader to find out."""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from engine.hub import name_and_commit

CONFIG = "config.json"
WEIGHTS = ("*.safetensors", "*.bin")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
TOKENIZERS = (
    *("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model"),
)
UNREAD = ("*.gguf", "*.pth", "*.h5", "*.onnx")
WHOLE = re.compile(r"[IU]\d+")  # a dtype of safetensors, such as I8
POINTER = b"version https://git-lfs"
Files = tuple[tuple[str, int, int, int], ...]  # of a directory: name, bytes, time of change, inode


def why_not_there(model: str) -> str:
    """Of a path at which nothing is, which would else be taken for a name on the hub, or a file."""
    if os.path.isfile(model):
        return f"model {model!r} is a file; give a Hugging Face model directory"
    if os.path.isabs(model) and not os.path.exists(model):
        return f"model {model!r} is not there; give a Hugging Face model directory"
    return ""


def file_of(model: str, name: str, *, fetch: bool = False) -> Path | None:
    """One of its files, of a name on the hub as it was downloaded. `fetch`: or is now. None: it has none of that name,
    or whoever loads it will tell why it cannot be had."""
    if os.path.isdir(model):
        path = Path(model) / name
        return path if path.exists() else None
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    known, commit = name_and_commit(model)
    with suppress(Exception):  # whatever the hub's client raises
        found = try_to_load_from_cache(known, name, revision=commit)
        if isinstance(found, str) or fetch:
            return Path(found if isinstance(found, str) else hf_hub_download(known, name, revision=commit))
    return None


def folder_of(model: str) -> Path:
    """Where its files are."""
    config = file_of(model, CONFIG)
    return Path(model) if config is None else config.parent


def why_incomplete(directory: Path) -> str:
    """What a worker or a router would miss there, such as "has no config.json"; nothing where all is there."""
    if not (directory / CONFIG).exists():
        return f"has no {CONFIG}{_but(directory)}"
    weights = [path for pattern in WEIGHTS for path in sorted(directory.glob(pattern))]
    if not weights:
        return f"has no weights ({', '.join(WEIGHTS)}){_but(directory)}"
    if missing := [name for name in _shards(directory) if not (directory / name).exists()]:
        return f"lacks {len(missing)} of the files that its index names, first {missing[0]}"
    if barred := [path.name for path in weights if not os.access(path, os.R_OK)]:
        return f"has {barred[0]}, which this user may not read"
    if pointers := [path.name for path in weights if _is_pointer(path)]:
        return f"has a Git LFS pointer in place of {pointers[0]} (`git lfs pull` fetches it)"
    return "" if has_tokenizer(directory) else f"has no tokenizer ({TOKENIZERS[1]} or {TOKENIZERS[0]})"


def _but(directory: Path) -> str:
    others = sorted(path.name for pattern in UNREAD for path in directory.glob(pattern))
    return f", but {others[0]}, in a format that is not read" if others else ""


def why_unreadable(directory: Path) -> str:
    """Which of the files that it is loaded from is not what it should be; nothing where none is found."""
    files = _loaded_from(directory)
    if not files and (but := _but(directory)):
        return f"it has no weights ({', '.join(WEIGHTS)}){but}; give a checkpoint in safetensors"
    if not files and (others := sorted(path.name for pattern in WEIGHTS for path in directory.glob(pattern))):
        return f"it has {others[0]}, but no model.safetensors, nor {INDEXES[0]}, which names shards; copy what it lacks"
    indexes = [path for name in INDEXES if (path := directory / name).exists()]
    return next((why for path in [*indexes, *files] if (why := why_damaged(path))), "")


def why_damaged(path: Path) -> str:
    """Of a file of weights, an index of them or a tokenizer.json: with its name, why it cannot be what it should be;
    nothing where it may be."""
    try:
        if _is_pointer(path):
            return f"{path.name} is a Git LFS pointer; fetch what it stands for, with `git lfs pull`"
        told = json.loads(path.read_text(encoding="utf-8")) if path.suffix == ".json" else {}
        if not isinstance(told, dict) or (path.name in INDEXES and not _is_index(told)):
            wanted = '{"metadata": {...}, "weight_map": {WEIGHT: FILE, ...}}' if path.name in INDEXES else "object"
            return f"{path.name} holds no {wanted}; copy it anew"
        if path.suffix == ".safetensors":
            with safe_open(str(path), framework="numpy"):
                pass
        if path.suffix == ".bin" and not _is_of_torch(path):
            return f"{path.name} is damaged or cut short; copy it anew"
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror or error}"
    except (SafetensorError, ValueError) as error:
        return f"{path.name} is damaged or cut short ({error}); copy it anew"
    return ""


def _is_index(told: dict[str, object]) -> bool:
    """As transformers reads it, which wants its metadata, too."""
    shards = told.get("weight_map")
    names = list(shards.values()) if isinstance(shards, dict) else []
    return isinstance(told.get("metadata"), dict) and bool(names) and all(isinstance(name, str) for name in names)


def whole_numbers(directory: Path) -> Iterator[str]:
    """The names of its safetensors that are of a type without fractions, but for masks of bool."""
    for _, file in _opened(directory):
        yield from (name for name in sorted(file.keys()) if WHOLE.fullmatch(file.get_slice(name).get_dtype()))


def held_twice(directory: Path) -> str:
    """A weight that two of its safetensors hold, and which; nothing where each is in one. The loader takes either."""
    holders: dict[str, str] = {}
    for path, file in _opened(directory):
        names = sorted(file.keys())
        if twice := [name for name in names if name in holders]:
            return f"{twice[0]} in {holders[twice[0]]} and in {path.name}"
        holders |= dict.fromkeys(names, path.name)
    return ""


def _opened(directory: Path) -> Iterator[tuple[Path, Any]]:
    """Of the files that it is loaded from those in safetensors."""
    for path in _loaded_from(directory):
        if path.suffix == ".safetensors":
            with safe_open(str(path), framework="numpy") as file:
                yield path, file


def _loaded_from(directory: Path) -> list[Path]:
    whole = directory / "model.safetensors"
    names = [whole.name] if whole.exists() else [*_shards(directory)] or ["pytorch_model.bin"]
    return [path for name in names if (path := directory / str(name)).exists()]


def files_of(directory: Path) -> Files:
    """By which one that was changed, or put in another's place, is known. Of a name on the hub there are none."""
    if not directory.is_dir():
        return ()
    stats = ((entry.name, entry.stat()) for entry in os.scandir(directory) if entry.is_file())
    return tuple(sorted((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats))


def weight_bytes(directory: Path) -> int:
    """Of all its files of weights together."""
    return sum(path.stat().st_size for pattern in WEIGHTS for path in directory.glob(pattern))


def has_tokenizer(directory: Path) -> bool:
    return any((directory / name).exists() for name in TOKENIZERS)


def _shards(directory: Path) -> Iterator[str]:
    """Of the index that is loaded by: there may be one for each format. One that cannot be read is the loader's to
    tell."""
    for path in (directory / name for name in INDEXES):
        if path.exists():
            try:
                yield from sorted(set(json.loads(path.read_text())["weight_map"].values()))
            except (OSError, ValueError, KeyError, AttributeError, TypeError):
                return
            return


def _is_of_torch(path: Path) -> bool:
    """Whether it may be: a zip archive, whose directory is at its end, or a pickle, as before torch 1.6."""
    with path.open("rb") as file:
        return file.read(1) == b"\x80" or zipfile.is_zipfile(path)


def _is_pointer(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(POINTER)) == POINTER
