"""AdapterFiles is a LoRA adapter (Hu et al., 2021) as PEFT saves it: adapter_config.json and adapter_model.safetensors
in a directory. What it says is read here, and what cannot be served is refused; its weights are another matter
(weights.py).

No torch: a router reads it, too, for the digest by which its workers know the same adapter.
"""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import xxhash
from safetensors import SafetensorError, safe_open

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<which>[AB])\.weight")
MAX_RANK = 512
REFUSED = (  # beside what begins with use_
    *("lora_bias", "modules_to_save", "trainable_token_indices", "target_parameters"),
    *("layer_replication", "alora_invocation_tokens", "arrow_config"),
)
WHOLE_LAYER = re.compile(r"base_model\.model\.(?P<module>.+)\.(base_layer\.|lora_embedding_).+")  # head, embeddings
PLAIN_PATTERN = re.compile(r"\^?[\w.\\-]+\$?")  # names, perhaps with \d: nothing that takes long to match
PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")  # of the weights: others change the base model's


class AdapterError(ValueError):
    """It cannot be read or served: one sentence."""


class LoraPart(NamedTuple):
    """What it adds to one Linear: (x A^T) B^T * scale."""

    rank: int
    in_features: int
    out_features: int
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFiles:
    path: str
    digest: str  # of both files
    parts: Mapping[str, LoraPart]  # by the Linear's name in the model

    @property
    def rank(self) -> int:
        """The largest."""
        return max(part.rank for part in self.parts.values())

    @property
    def num_params(self) -> int:
        return sum(part.rank * (part.in_features + part.out_features) for part in self.parts.values())


def describe(path: str) -> Mapping[str, LoraPart]:
    """What it adds, by the Linears' names in the model: of its weights the header is read. Raises AdapterError."""
    with _reading(path) as folder:
        raw = (folder / CONFIG).read_bytes()
        with safe_open(str(folder / WEIGHTS), framework="numpy") as file:
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    return parts_of(path, raw, shapes)


def parts_of(path: str, raw: bytes, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, LoraPart]:
    """By the config and the weights' shapes. Raises AdapterError."""
    try:
        config = json.loads(raw)
        if why := _why_not(config):
            raise AdapterError(f"{path}: {why}")
        return dict(_parts(path, config, shapes))
    except AdapterError:
        raise
    except (ValueError, TypeError, ArithmeticError, RecursionError) as error:  # whatever stands there in its place
        raise AdapterError(f"{path} cannot be read: {' '.join(str(error).split())[:300]}") from None


def read_adapter(path: str) -> AdapterFiles:
    """All but the weights; reads them, for the digest. Raises AdapterError."""
    parts = describe(path)
    _, _, digest = read_whole(path)
    return AdapterFiles(path=path, digest=digest, parts=parts)


def read_whole(path: str) -> tuple[bytes, bytes, str]:
    """Both files, config and weights, and their digest. Raises AdapterError."""
    with _reading(path) as folder:
        raw, weights = (folder / CONFIG).read_bytes(), (folder / WEIGHTS).read_bytes()
    digest = xxhash.xxh3_128(raw)
    digest.update(weights)
    return raw, weights, digest.hexdigest()


def stamp_of(path: str) -> tuple[int, ...]:
    """Another one when its files are others, as far as the file system tells; empty where they are not there."""
    try:
        return tuple(n for name in (CONFIG, WEIGHTS) for n in _stat(Path(path) / name))
    except OSError:
        return ()


def _stat(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino


@contextmanager
def _reading(path: str) -> Iterator[Path]:
    """What goes wrong with its files is an AdapterError. None is opened that an open could wait for, such as a pipe:
    safetensors holds the interpreter meanwhile, and the whole process would stand still."""
    folder = Path(path)
    try:
        for name in (CONFIG, WEIGHTS):
            if not stat.S_ISREG((folder / name).stat().st_mode):
                raise AdapterError(f"{path}: {name} is no regular file; give a directory as PEFT saves one")
        yield folder
    except AdapterError:
        raise
    except FileNotFoundError as error:
        missing = Path(str(error.filename or folder / WEIGHTS)).name
        raise AdapterError(f"{path} has no {missing}; give a directory as PEFT saves one, with {WEIGHTS}") from None
    except (OSError, ValueError, SafetensorError) as error:
        raise AdapterError(f"{path} cannot be read: {' '.join(str(error).split())[:300]}") from None


def _why_not(config: Any) -> str:
    """What of its config cannot be served."""
    if not isinstance(config, dict):
        return f"{CONFIG} holds no object"
    if (kind := config.get("peft_type")) != "LORA":
        return f"peft_type is {kind!r}, and LORA adapters are served"
    if (task := config.get("task_type")) not in (None, "CAUSAL_LM"):
        return f"task_type is {task!r}, and CAUSAL_LM is served"
    for key in config:
        if config[key] and (key in REFUSED or (key.startswith("use_") and key != "use_rslora")):
            return f"{key} is {config[key]!r:.80}, which is not served; train it without"
    if config.get("bias", "none") != "none":
        return f"bias is {config['bias']!r}, and none is served; train it without"
    if (start := config.get("init_lora_weights")) not in PLAIN_STARTS:
        return f"init_lora_weights is {start!r}, which changes the base model; save it converted to a plain LoRA"
    return ""


def _parts(
    path: str, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, LoraPart]]:
    pairs: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, shape in shapes.items():
        if whole := WHOLE_LAYER.fullmatch(key):
            raise AdapterError(
                f"{path} changes {whole['module']}, and adapters of heads and embeddings are not served; train it "
                "without, by target_modules"
            )
        found = KEY.fullmatch(key)
        if found is None or len(shape) != 2:
            raise AdapterError(
                f"{path}: {WEIGHTS} has {key!r} of shape {list(shape)}, which is no part of a plain LoRA"
            )
        pairs.setdefault(found["module"], {})[found["which"]] = shape
    if not pairs:
        raise AdapterError(f"{path}: {WEIGHTS} is empty")
    for module, pair in pairs.items():
        if len(pair) != 2 or pair["A"][0] != pair["B"][1]:
            raise AdapterError(f"{path}: lora_A and lora_B of {module} do not fit each other: {pair}")
        rank = pair["A"][0]
        if not 0 < rank <= MAX_RANK:
            raise AdapterError(f"{path}: {module} has rank {rank}; up to {MAX_RANK} is served")
        if (told := _told(path, config, "r", "rank_pattern", module)) != rank:
            raise AdapterError(
                f"{path}: r of {module} is {told!r:.80}, and its weights have rank {rank}; give files of one adapter"
            )
        yield module, LoraPart(rank, pair["A"][1], pair["B"][0], _scale(path, config, module, rank))


def _scale(path: str, config: Mapping[str, Any], module: str, rank: int) -> float:
    """alpha / r, or alpha / sqrt(r) (rsLoRA, Kalajdzievski, 2023)."""
    alpha = _told(path, config, "lora_alpha", "alpha_pattern", module)
    if not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise AdapterError(f"{path}: lora_alpha of {module} is {alpha!r}; give a number")
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _told(path: str, config: Mapping[str, Any], usual: str, pattern: str, module: str) -> Any:
    """What the config says of this module: in `pattern`, by modules' names, or else what is `usual`."""
    values = config.get(pattern) or {}
    if not isinstance(values, dict) or not all(PLAIN_PATTERN.fullmatch(str(key)) for key in values):
        raise AdapterError(f"{path}: {pattern} is {values!r:.80}; give each by modules' names")
    try:
        key = next((key for key in values if re.match(rf"(.*\.)?({key})$", module)), None)  # PEFT's rule
    except re.error as error:
        raise AdapterError(f"{path}: {pattern} is {values!r:.80}: {error}") from None
    return config.get(usual) if key is None else values[key]
