"""The models that the GPU benchmarks load; `python -m bench.gpu.weights [--model 8b|1b]` writes one beforehand.

Random weights in .bench/, written once: drawn on the GPU, shards side by side (a write, and a copy from the GPU, let go
of the interpreter), by plain writes of what safetensors' own save_file would copy twice. 16 GB take as long as the disk
does; where that is slow and memory is plenty, .bench may be a link into /dev/shm.
"""

from __future__ import annotations

import json
import struct
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from bench import common
from bench.gpu import common as gpu_common

# As Llama 3.1 8B, but for the vocabulary's tokenizer: requests are token ids.
LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
LLAMA_1B = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
SHAPES = {"8b": LLAMA_8B, "1b": LLAMA_1B}
MAX_POSITIONS = 16384
SHARD_BYTES = 1 << 30
WRITERS = 8

Shapes = Mapping[str, torch.Size]


def model_dir(name: str | None, rehearse: bool) -> str:
    """A directory with random weights, made once in .bench/."""
    chosen = name or ("tiny" if rehearse else "8b")
    if chosen in SHAPES:
        return str(make_llama(chosen, gpu_common.device_of(rehearse)))
    return str(common.demo_model(chosen)) if chosen in ("tiny", "125m") else chosen


def make_llama(size: str, device: str) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = common.MODELS / f"random-llama-{size}"
    if (directory / "model.safetensors.index.json").exists():
        return directory
    config = LlamaConfig(
        **SHAPES[size],
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(directory)
    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in LlamaForCausalLM(config).named_parameters()}
    write_shards(directory, shapes, device)
    return directory


def write_shards(directory: Path, shapes: Shapes, device: str) -> None:
    """The index comes last: with it the model is there, and a run that was cut writes again."""
    shards = {f"model-{i:05d}.safetensors": names for i, names in enumerate(_shards(shapes))}
    with ThreadPoolExecutor(WRITERS) as pool:
        written = [pool.submit(_write, directory / file, names, shapes, device) for file, names in shards.items()]
        for shard in written:
            shard.result()
    index = {name: file for file, names in shards.items() for name in names}
    text = json.dumps({"metadata": {"total_size": sum(map(_nbytes, shapes.values()))}, "weight_map": index})
    (directory / "model.safetensors.index.json").write_text(text)


def _shards(shapes: Shapes) -> Iterator[list[str]]:
    names: list[str] = []
    for name in sorted(shapes):
        if names and sum(_nbytes(shapes[other]) for other in (*names, name)) > SHARD_BYTES:
            yield names
            names = []
        names.append(name)
    yield names


def _nbytes(shape: torch.Size) -> int:
    return 2 * shape.numel()


def _write(path: Path, names: Sequence[str], shapes: Shapes, device: str) -> None:
    """safetensors: the header's length, the header, then each tensor where the header says."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in names:
        end = at + _nbytes(shapes[name])
        header[name] = {"dtype": "BF16", "shape": list(shapes[name]), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            data = _random_weight(name, shapes[name], device).view(torch.uint8).flatten().numpy()
            while data.size:  # one write takes 2 GiB at most
                data = data[file.write(data.data) :]


def _random_weight(name: str, shape: torch.Size, device: str) -> torch.Tensor:
    """Drawn by its name alone, with the spread that kvrelay's demo models have."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
    spread = 1.0 if "embed_tokens" in name else gain / shape[1] ** 0.5
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    weight = torch.empty(shape, dtype=torch.float32, device=device).normal_(0.0, spread, generator=generator)
    return weight.to(torch.bfloat16).cpu()


def main() -> None:
    arguments = gpu_common.parser(__doc__).parse_args()
    gpu_common.check_device(arguments.rehearse)
    began_s = time.monotonic()
    directory = Path(model_dir(arguments.model, arguments.rehearse))
    print(f"{directory}: there after {time.monotonic() - began_s:.1f} s")


if __name__ == "__main__":
    main()
