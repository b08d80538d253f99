"""transformers at what bench/gpu/engine.py measures the engine at, on the same GPU: `python -m bench.gpu.peers`.

`generate`, and its continuous batching. What it cannot run is told, not hidden.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.gpu import common as gpu_common
from bench.gpu import weights
from bench.gpu.engine import TINY, Sizes

MEASURED_S = 40.0  # for all of it; what is left then is told
Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Peer:
    """`run(prompts, new_tokens)` generates so many tokens for each and returns the seconds it took."""

    name: str
    run: Callable[[Prompts, int], float]

    def decode_s(self, prompts: Prompts, new_tokens: int) -> float:
        """Of one step: the time of 1 + N tokens less that of 1, over N."""
        self.run(prompts, 2)  # warm
        first_s = self.run(prompts, 1)
        return (self.run(prompts, 1 + new_tokens) - first_s) / new_tokens

    def prefill_s(self, prompts: Prompts) -> float:
        self.run(prompts, 1)
        return self.run(prompts, 1)


def peers(model: Any, device: torch.device) -> list[Peer]:
    generate = Peer("generate", _generate(model, device))
    if device.type != "cuda":  # its pages would take all memory that is free, others' too
        return [generate]
    return [generate, Peer("continuous batching", _batching(model, device))]


def _timed(device: torch.device, run: Callable[[], object]) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began_s = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began_s


def _generate(model: Any, device: torch.device) -> Callable[[Prompts, int], float]:
    def run(prompts: Prompts, new_tokens: int) -> float:
        ids = torch.tensor(prompts, device=device)
        return _timed(
            device,
            lambda: model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
            ),
        )

    return run


def _batching(model: Any, device: torch.device) -> Callable[[Prompts, int], float]:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    pages = ContinuousBatchingConfig(max_batch_tokens=8192, allow_block_sharing=False)  # no prefix is reused

    def run(prompts: Prompts, new_tokens: int) -> float:
        return _timed(
            device,
            lambda: model.generate_batch(
                [list(prompt) for prompt in prompts],
                generation_config=config,
                continuous_batching_config=pages,
                persistent_manager=True,
                max_new_tokens=new_tokens,
            ),
        )

    return run


def measure(model_dir: str, device: torch.device, sizes: Sizes) -> list[dict[str, Any]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16, device_map={"": device})
    generator = torch.Generator().manual_seed(0)
    vocab = model.config.get_text_config().vocab_size

    def prompts(count: int, tokens: int) -> list[list[int]]:
        drawn: list[list[int]] = torch.randint(3, vocab, (count, tokens), generator=generator).tolist()
        return drawn

    rows: list[dict[str, Any]] = []
    deadline = time.monotonic() + MEASURED_S
    for peer in peers(model, device):
        for kind, size in [("decode", b) for b in sizes.batches] + [("prefill", t) for t in sizes.prompts]:
            if time.monotonic() > deadline:
                print(f"{peer.name} is not measured at {kind} {size}: the time for it is over")
                continue
            try:
                if kind == "decode":
                    took_s = peer.decode_s(prompts(size, sizes.context), min(8, sizes.steps))
                else:
                    took_s = peer.prefill_s(prompts(1, size))
            except Exception as error:  # another project's code on a machine of its own: said, and gone on
                why = " ".join(str(error).split())[:120]
                print(f"{peer.name} cannot {kind} {size}: {type(error).__name__}: {why}")
                continue
            rows.append(gpu_common.said({"peer": peer.name, "kind": kind, "size": size, "ms": took_s * 1e3}))
    return rows


def main() -> None:
    arguments = gpu_common.parser(__doc__).parse_args()
    rehearse = arguments.rehearse
    gpu_common.check_device(rehearse)
    directory = weights.model_dir(arguments.model, rehearse)
    rows = measure(directory, torch.device(gpu_common.device_of(rehearse)), TINY if rehearse else Sizes())
    result = gpu_common.about(rehearse) | {"model": directory.rpartition("/")[2], "rows": rows}
    print(gpu_common.save("peers", result, rehearse, arguments.out))


if __name__ == "__main__":
    main()
